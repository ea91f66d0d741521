"""The chat template for vLLM: the one that the embedded engine uses, in a file.

Two changes. Our own part prints the arguments of earlier tool calls as the model wrote them, and vLLM hands it objects
only, so there the written string is found inside one (see `inside/art_in_vllm/bodies.py`). And vLLM adds the fields that a
tool lacks, as nulls, which the templates of most models would print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art_backend.chat.render import chat_template, hermes_template
from art_backend.vllm.inside.art_in_vllm.bodies import RAW_ARGUMENTS

_GIVEN = "{%- set arguments = function.arguments or {} %}"
_UNWRAPPED = f"""{_GIVEN}
            {{%- set arguments = arguments.{RAW_ARGUMENTS} if arguments.{RAW_ARGUMENTS} is defined else arguments %}}"""

_WITHOUT_NULLS = """\
{%- if tools %}
    {%- set cleaned = namespace(tools=[]) %}
    {%- for tool in tools %}
        {%- set function = dict(tool.function.items() | rejectattr(1, 'none') | list) %}
        {%- set cleaned.tools = cleaned.tools + [dict(tool, function=function)] %}
    {%- endfor %}
    {%- set tools = cleaned.tools %}
{%- endif %}
"""


def vllm_template(tokenizer: Any) -> tuple[str, bool]:
    """The template, and whether it prints raw arguments. Raises RenderError."""
    template, ours = chat_template(tokenizer), hermes_template()
    if ours not in template:
        return _WITHOUT_NULLS + template, False
    assert _GIVEN in ours
    return template.replace(_GIVEN, _UNWRAPPED), True


def write_template(folder: Path, tokenizer: Any) -> tuple[Path, bool]:
    """Write it into `folder`; returns the file and whether it prints raw arguments. Raises RenderError."""
    template, raw_arguments = vllm_template(tokenizer)
    file = folder / "chat_template.jinja"
    file.write_text(template, encoding="utf-8")
    return file, raw_arguments
