"""What the diagnosis and the choice of an engine say of this machine, and of one with a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from art_backend import doctor
from art_backend.doctor import Check, diagnose
from art_backend.engine import TransformersEngine
from art_backend.vllm import VLLMEngine, VLLMOptions
from art_backend.vllm.choice import check_engine, choose_engine, make_engine
from art_backend.vllm.gpus import gpus
from art_backend.vllm.interpreter import VARIABLE
from art_core.errors import ConfigError, EngineError

FAKE = Path(__file__).parent / "vllm_fake"
GPU = "#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without vLLM and without a GPU; the returned folder is the first one on the path of commands."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def add_gpu(folder: Path) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(GPU)
    tool.chmod(0o755)


def by_name() -> dict[str, Check]:
    return {check.name: check for check in diagnose()}


def test_a_machine_as_it_is(nowhere: Path) -> None:
    checks = by_name()
    assert checks["python"].ok
    assert checks["torch"].ok
    assert checks["gpu"].detail.startswith("none")
    assert checks["vllm"] == Check("vllm", True, "not installed", "art vllm install")
    assert checks["extra local"] == Check("extra local", True, "installed")
    assert "not fetched" in checks["default model"].detail
    assert {f"extra {name}" for name in doctor.EXTRAS} <= set(checks)
    assert checks["LocalBackend()"].detail.startswith("takes engine transformers (there is no GPU")


def test_a_gpu_without_the_right_builds_has_fixes(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    add_gpu(nowhere)
    checks = by_name()
    assert "H200" in checks["gpu"].detail
    assert (checks["vllm"].ok, checks["vllm"].fix) == (False, "art vllm install")
    if not torch.cuda.is_available():
        assert (checks["torch"].ok, checks["torch"].fix) == (False, "pip install --force-reinstall torch")
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    assert "CPU build" in by_name()["vllm"].detail
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    assert "has no vLLM" in by_name()["vllm"].detail


@pytest.mark.parametrize(("gpu", "words"), [(False, "pip install --no-deps"), (True, "art-plugins[unsloth]")])
def test_unsloth_is_to_be_had_without_the_wrong_torch(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, words: str
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda module: module != "unsloth")
    if gpu:
        add_gpu(nowhere)
    assert words in (by_name()["unsloth"].fix or "")


def test_the_engine_of_a_machine(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gpus()
    assert choose_engine("auto").name == "transformers"
    add_gpu(nowhere)
    assert gpus() == ["NVIDIA H200, 143771 MiB"]
    assert (choose_engine("auto").name, "art vllm install" in choose_engine("auto").reason) == ("transformers", True)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    assert "CPU build" in choose_engine("auto").reason
    fake = nowhere / "fake"
    (fake / "vllm-1.0.dist-info").mkdir(parents=True)
    (fake / "vllm-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    assert choose_engine("auto").name == "vllm"
    assert choose_engine("transformers").name == "transformers"


def test_an_engine_is_made_as_asked(nowhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sizes = {"max_batch_size": 4, "max_model_len": 64, "lora_rank": 4}
    assert isinstance(make_engine("auto", "m", **sizes), TransformersEngine)
    assert isinstance(make_engine(VLLMOptions(tool_call_parser="x"), "m", **sizes), VLLMEngine)
    assert [r.message for r in caplog.records if r.message.startswith("Engine: ")] == [
        "Engine: transformers (there is no GPU, where vLLM would be faster).",
        "Engine: vllm (as asked).",
    ]
    with pytest.raises(ConfigError, match="engine='vlm'"):
        check_engine("vlm")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="art vllm install"):
        check_engine("vllm")
    with pytest.raises(EngineError, match="has no vLLM"):
        check_engine(VLLMOptions(python=sys.executable))
