"""A merged model folder computes what base and adapter compute, and loads wherever the base model loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_backend.base_model import load_tokenizer
from art_backend.chat.render import chat_template
from art_backend.config import GRPOConfig
from art_backend.export import export_merged, export_run
from art_backend.peft_trainer import PeftTrainer
from art_core.errors import CheckpointError, ConfigError
from tests.backend.test_local import backend, group, trainable
from tests.backend.trainer_contract import SHAPE, save_tiny, small_batch

IDS = torch.tensor([[5, 9, 33, 7, 12, 60, 4]])


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits  # type: ignore[attr-defined, no-any-return]


def trained_adapter(base: str, folder: Path) -> Path:
    trainer = PeftTrainer(torch.float32)
    trainer.load(base, SHAPE, 0)
    trainer.step(small_batch(0), GRPOConfig(learning_rate=5e-2))
    trainer.save(folder)
    return folder


@pytest.mark.parametrize("family", ["smollm2", "qwen2.5", "phi3"])
def test_the_merged_model_computes_what_base_and_adapter_do(tmp_path: Path, family: str) -> None:
    base = save_tiny(tmp_path / "base", family)
    adapter = trained_adapter(base, tmp_path / "adapter")
    merged = export_merged(Path(base), adapter, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    unmerged = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, str(adapter)))
    assert (expected - unmerged).abs().max() > 1e-2
    got = logits(AutoModelForCausalLM.from_pretrained(str(merged), dtype=torch.float32))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(str(merged)).get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    assert not list(tmp_path.glob(".merged*"))


def test_several_files_of_weights_keep_their_names_and_precision(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    cut = tmp_path / "cut"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(cut, max_shard_size="20KB")
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert len(files) > 1
    AutoTokenizer.from_pretrained(base).save_pretrained(cut)
    merged = export_merged(cut, adapter, tmp_path / "merged")
    assert sorted(path.name for path in merged.glob("*.safetensors")) == files
    half = {name: tensor for file in files for name, tensor in load_file(merged / file).items()}
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"
    a, b = (
        load_file(adapter / "adapter_model.safetensors")[
            f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"
        ]
        for x in "AB"
    )
    old = next(tensors[name] for file in files if name in (tensors := load_file(cut / file)))
    exact = old.float() + SHAPE.alpha / SHAPE.r * b @ a
    assert torch.equal(half[name], exact.to(torch.bfloat16))


async def test_a_backend_exports_a_step_with_the_template_it_trained_under(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        await model.train([await group(model, [1.0, 0.0])], learning_rate=1e-2)
        newest = await local.export_merged(model, tmp_path / "out" / "newest")
        first = await local.export_merged(model, str(tmp_path / "first"), step=0)
        with pytest.raises(ConfigError, match="exists already"):
            await local.export_merged(model, newest)
        with pytest.raises(CheckpointError, match="step 7 has no complete checkpoint"):
            await local.export_merged(model, tmp_path / "seventh", step=7)
    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    same, other = (AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32) for path in (first, newest))
    assert torch.equal(logits(base), logits(same))  # a fresh adapter changes nothing
    assert not torch.equal(logits(base), logits(other))
    assert AutoTokenizer.from_pretrained(str(newest)).chat_template == chat_template(load_tokenizer(tiny_llama))
    assert export_run(tmp_path, tmp_path / "by_folder") == tmp_path / "by_folder"  # the only run below
    assert not (tmp_path / "seventh").exists()


def test_mistakes_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    target = tmp_path / "merged"
    other = save_tiny(tmp_path / "other", intermediate_size=80)
    with pytest.raises(ConfigError, match=r"shape \(48, 80\)"):
        export_merged(Path(other), adapter, target)
    shallow = save_tiny(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="was trained on another model"):
        export_merged(Path(shallow), adapter, target)
    (tmp_path / "shallow" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        export_merged(Path(shallow), adapter, target)
    (tmp_path / "shallow" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        export_merged(Path(shallow), adapter, target)
    with pytest.raises(ConfigError, match="and holds none"):
        export_run(tmp_path, target)
    for name in ("one", "two"):
        (tmp_path / "p" / "models" / name).mkdir(parents=True)
        (tmp_path / "p" / "models" / name / "model.json").write_text(json.dumps({"base_model": base}))
    with pytest.raises(ConfigError, match=r"and holds several: .*one.*two"):
        export_run(tmp_path, target)
    with pytest.raises(CheckpointError, match="train the model first"):
        export_run(tmp_path / "p" / "models" / "one", target)
    assert not target.exists()
    assert not list(tmp_path.glob(".merged*"))
