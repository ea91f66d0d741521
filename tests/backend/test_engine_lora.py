"""Which adapters are served, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_backend.engine.lora import MergedWeights, load_adapter
from art_core.errors import EngineError
from tests.backend.engine_models import save_adapter, sharp_llama


@pytest.fixture(scope="module")
def model() -> Any:
    return sharp_llama()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ["embed_tokens"]}, "no LoRA weight of a linear layer"),
    ],
)
def test_variants_that_would_be_served_wrongly_are_refused(
    model: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save_adapter(model, tmp_path, 1, **options)
    with pytest.raises(EngineError, match=message):
        load_adapter(tmp_path)


def test_other_adapter_types_and_missing_files(model: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"adapter_config\.json and adapter_model\.safetensors are needed"):
        load_adapter(tmp_path)
    save_adapter(model, tmp_path, 1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(EngineError, match="is a IA3 adapter"):
        load_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(EngineError, match="A and a B of rank 8"):
        load_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    save_adapter(LlamaForCausalLM(config), tmp_path, 1)
    with pytest.raises(EngineError, match="was trained on another base model"):
        MergedWeights(model).check(load_adapter(tmp_path))
