"""The command line and the environment that vLLM is given."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_backend.base_model import load_tokenizer
from art_backend.chat.render import chat_template, hermes_template, render_text
from art_backend.vllm.command import INSIDE, Options, command, environment, model_length
from art_backend.vllm.inside.art_in_vllm.bodies import RAW_ARGUMENTS
from art_backend.vllm.interpreter import Interpreter
from art_backend.vllm.template import vllm_template
from art_core.errors import ConfigError

OPTIONS = Options(
    folder=Path("/m"),
    template=Path("/t"),
    raw_arguments=True,
    max_batch_size=8,
    max_model_len=512,
    max_lora_rank=16,
    max_adapters=8,
    dtype="float32",
    tool_call_parser=None,
    reasoning_parser=None,
    sleeps=False,
    extra_args=(),
)
CPU = Interpreter(Path("/v/bin/python"), "0.32.0", True, "as given")
CUDA = Interpreter(Path("/v/bin/python"), "0.32.0", False, "as given")


def flags(line: list[str]) -> dict[str, str]:
    """Each option with what follows it."""
    return {part: line[at + 1] if at + 1 < len(line) else "" for at, part in enumerate(line) if part.startswith("--")}


def test_sampling_is_that_of_the_policy() -> None:
    line = command(CPU, OPTIONS, "127.0.0.1", 99)
    assert line[:3] == ["/v/bin/python", str(INSIDE / "art_in_vllm" / "serve.py"), "99"]
    assert flags(line)["--generation-config"] == "vllm"
    assert flags(line)["--logprobs-mode"] == "processed_logprobs"
    assert flags(line)["--chat-template"] == "/t"
    assert flags(line)["--tokenizer-mode"] == "hf"
    assert {"--enable-lora", "--no-enable-chunked-prefill"} <= set(line)


def test_a_gpu_server_may_split_prefills_and_sleeps() -> None:
    line = command(CUDA, replace(OPTIONS, sleeps=True), "127.0.0.1", 99)
    assert "--enable-sleep-mode" in line
    assert "--no-enable-chunked-prefill" not in line
    assert environment(CUDA, replace(OPTIONS, sleeps=True), "k", {})["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(CUDA, OPTIONS, "k", {})


def test_parsers_pass_through_and_extra_arguments_win() -> None:
    options = replace(
        OPTIONS, tool_call_parser="qwen3_coder", reasoning_parser="qwen3", extra_args=("--max-num-seqs", "3")
    )
    line = command(CPU, options, "127.0.0.1", 99)
    assert flags(line)["--tool-call-parser"] == "qwen3_coder"
    assert flags(line)["--reasoning-parser"] == "qwen3"
    assert line[-2:] == ["--max-num-seqs", "3"]
    assert environment(CPU, options, "k", {})["ART_READ_CALLS"] == "0"
    assert environment(CPU, OPTIONS, "k", {})["ART_READ_CALLS"] == "1"


def test_the_environment_of_another_interpreter_is_not_mixed_with_ours() -> None:
    here = Interpreter(Path(sys.executable), "0.32.0", True, "this environment")
    base = {"PYTHONPATH": "/ours", "VLLM_CPU_KVCACHE_SPACE": "7"}
    assert environment(CPU, OPTIONS, "k", base)["PYTHONPATH"] == str(INSIDE)
    assert environment(here, OPTIONS, "k", base)["PYTHONPATH"] == f"{INSIDE}:/ours"
    assert environment(CPU, OPTIONS, "k", base)["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environment(CPU, OPTIONS, "key", base)["VLLM_API_KEY"] == "key"
    assert "key" not in " ".join(command(CPU, OPTIONS, "127.0.0.1", 99))


def test_a_small_machine_computes_with_all_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, reserved in ((2, "0"), (8, None)):
        monkeypatch.setattr("os.cpu_count", lambda count=count: count)
        assert environment(CPU, OPTIONS, "k", {}).get("VLLM_CPU_NUM_OF_RESERVED_CPU") == reserved
    assert environment(CPU, OPTIONS, "k", {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"})["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"


def test_what_the_engine_sets_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        replace(OPTIONS, extra_args=("--served-model-name", "x"))
    with pytest.raises(ConfigError, match="max_lora_rank=3"):
        replace(OPTIONS, max_lora_rank=3)


def test_the_length_is_never_more_than_the_model_takes(tiny_llama: Path) -> None:
    assert (model_length(tiny_llama, 100_000), model_length(tiny_llama, 100)) == (2048, 100)


def test_the_template_is_the_embedded_engines_with_raw_arguments(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    template, raw = vllm_template(tokenizer)
    assert raw
    assert RAW_ARGUMENTS in template
    without = "\n".join(line for line in template.splitlines() if RAW_ARGUMENTS not in line)
    assert without == "\n".join(chat_template(tokenizer).splitlines())
    tokenizer.chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    template, raw = vllm_template(tokenizer)
    assert template.endswith(tokenizer.chat_template)
    assert not raw
    assert hermes_template() in chat_template(load_tokenizer(tiny_llama))


def test_what_a_tool_lacks_is_not_shown_as_null(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    template, _ = vllm_template(tokenizer)
    given = [{"type": "function", "function": {"name": "paint", "parameters": {"default": None}}}]
    filled: list[Any] = [
        {"type": "function", "function": {"name": "paint", "description": None, "parameters": {"default": None}}}
    ]
    messages = [{"role": "user", "content": "Red"}]
    assert render_text(tokenizer, messages, filled, template=template) == render_text(tokenizer, messages, given)
    assert render_text(tokenizer, messages, template=template) == "Red"
