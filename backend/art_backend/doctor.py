"""What this machine can run, what is missing, and the command that fixes it. Plain data; whoever asks prints it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from art_backend.vllm.gpus import gpus
from art_core.errors import ARTError

ENOUGH_MEMORY_GB = 6.0
"""The default model, its engine and its trainer take about 4 GB."""
EXTRAS = {
    "mcp": ("fastmcp", "jsonschema"),
    "local": ("torch", "transformers", "peft", "fastapi", "uvicorn", "safetensors"),
    "langgraph": ("langchain", "langchain_openai", "langgraph"),
    "crewai": ("crewai",),
    "adk": ("google.adk", "litellm"),
    "judge": ("litellm", "tenacity"),
}
"""Extra -> the modules that show that it is installed."""


@dataclass(frozen=True)
class Check:
    """One finding.

    `ok` False: something does not work, or far slower than it could. A `fix` (a command) may also come with an `ok` check:
    what it brings is optional.
    """

    name: str
    ok: bool
    detail: str
    fix: str | None = None


def diagnose() -> list[Check]:
    """All findings, the fundamental ones first. Takes some seconds; changes nothing and asks no network."""
    findings: list[Callable[[], Check]] = [_python, _torch, _gpu, _memory]
    checks = [find() for find in findings]
    checks += [_extra(name, modules) for name, modules in EXTRAS.items()]
    if not all(check.ok for check in checks if check.name == "extra local"):
        return checks  # what the others look for is useless without it
    return [*checks, _vllm(), _unsloth(), _default_model(), _choice()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Check("python", fits, f"{version} ({sys.executable})", None if fits else "uv venv --python 3.12")


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", False, "not installed", "pip install 'art-plugins[local]'")
    if not gpus():
        return Check("torch", True, version)
    import torch

    sees = torch.cuda.is_available()
    detail = version if sees else f"{version}: a build that does not see this machine's GPU"
    return Check("torch", sees, detail, None if sees else "pip install --force-reinstall torch")


def _gpu() -> Check:
    return Check("gpu", True, "; ".join(gpus()) or "none: everything is computed on the CPU")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    enough = total >= ENOUGH_MEMORY_GB
    detail = f"{total:.0f} GB, {os.cpu_count()} CPUs"
    return Check("memory", enough, detail if enough else f"{detail}: training needs {ENOUGH_MEMORY_GB:.0f} GB or more")


def _extra(name: str, modules: tuple[str, ...]) -> Check:
    missing = [module for module in modules if not _installed(module)]
    install = f"pip install 'art-plugins[{name}]'"
    if not missing:
        return Check(f"extra {name}", True, "installed")
    needed = name in ("local", "mcp")
    return Check(f"extra {name}", not needed, f"not installed (no {', '.join(missing)})", install)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _vllm() -> Check:
    from art_backend.vllm.interpreter import find_interpreter

    install, gpu = "art vllm install", bool(gpus())
    try:
        found = find_interpreter()
    except ARTError as error:
        return Check("vllm", False, str(error), install)
    if found is None:
        return Check("vllm", not gpu, "not installed" + (": rollouts are far faster with it" if gpu else ""), install)
    detail = f"{found.version} ({found.origin}: {found.python})"
    if gpu and found.cpu_build:
        return Check("vllm", False, f"{detail}: a CPU build, on a machine with a GPU", f"{install} --force")
    return Check("vllm", True, detail)


def _unsloth() -> Check:
    if _installed("unsloth"):
        return Check("unsloth", True, importlib.metadata.version("unsloth"))
    if gpus():
        detail, fix = "not installed (optional: faster training)", "pip install 'art-plugins[unsloth]'"
    else:  # the extra would bring the CUDA build of torch
        detail = "not installed (optional: no faster than PEFT without a GPU)"
        fix = "pip install --no-deps 'unsloth>=2026.10.9' 'unsloth_zoo>=2026.10.9'"
    return Check("unsloth", True, detail, fix)


def _default_model() -> Check:
    from art_backend.default_model import DEFAULT_MODEL, cache_folder

    folder = cache_folder() / "models" / DEFAULT_MODEL
    if folder.is_dir():
        return Check("default model", True, f"{DEFAULT_MODEL} in {folder}")
    return Check("default model", True, f"{DEFAULT_MODEL} is not fetched yet (93 MB): the first run does it")


def _choice() -> Check:
    from art_backend.trainer_choice import choose_trainer
    from art_backend.vllm.choice import choose_engine

    try:
        engine, trainer = choose_engine("auto"), choose_trainer("auto")
    except ARTError as error:
        return Check("LocalBackend()", False, str(error))
    detail = f"engine {engine.name} ({engine.reason}), trainer {trainer.name} ({trainer.reason})"
    return Check("LocalBackend()", True, f"takes {detail}")
