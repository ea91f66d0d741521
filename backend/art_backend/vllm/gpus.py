"""The NVIDIA GPUs of this machine, by their driver's own tool: the torch at hand may be a build that sees none."""

from __future__ import annotations

import shutil
import subprocess


def gpus() -> list[str]:
    """Each GPU's name and memory, e.g. `NVIDIA H200, 143771 MiB`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []
