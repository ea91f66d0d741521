"""Activations computed twice: the same gradient, less memory, and only where an estimate says that they would not fit."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from art_backend import activation_memory
from art_backend.activation_memory import ActivationPlan, activation_bytes, available_bytes, bytes_per_token, recomputes
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.minibatches import make_minibatches
from art_backend.objective import PolicyObjective
from art_backend.packed_model import PackedModel
from art_backend.peft_trainer import PeftTrainer
from art_backend.recompute import KeptBytes, recomputed
from art_backend.session import Session
from art_backend.step_metrics import PolicyTally
from tests.backend.packed_reference import long_batch, save_tiny_llama, tiny_model
from tests.backend.policy_session import gradients, near_policy, session, spread

CONFIG = GRPOConfig(packed_sequence_length=200)


def gradient(own: Session, recompute: bool) -> dict[str, torch.Tensor]:
    (batch,) = make_minibatches(near_policy(long_batch()), own.packed.device, CONFIG, seed=0)
    objective = PolicyObjective(CONFIG, batch, PolicyTally())
    own.gradient(batch, objective, 1e30, recompute=recompute)
    return gradients(own.parameters)


@pytest.mark.parametrize("last_layers", [None, 1])
def test_the_gradient_is_the_same(last_layers: int | None) -> None:
    own = Session.attach(
        PackedModel(tiny_model()), "tiny", AdapterConfig(r=4, alpha=8, last_layers=last_layers), seed=3
    )
    spread(own.parameters)
    forwards = [layer.forward for layer in own.packed.decoder.layers]
    kept, again = gradient(own, False), gradient(own, True)
    assert kept.keys() == again.keys()
    size = max(each.abs().max().item() for each in kept.values())
    assert size > 1e-3
    for name, expected in kept.items():
        torch.testing.assert_close(again[name], expected, atol=1e-6 * size, rtol=0)
    assert [layer.forward for layer in own.packed.decoder.layers] == forwards


def test_less_is_kept() -> None:
    own = session()
    (batch,) = make_minibatches(long_batch(), own.packed.device, GRPOConfig(), seed=0)
    kept = own.packed.kept_bytes(batch.rows[0])
    with recomputed(own.packed.decoder):
        again = own.packed.kept_bytes(batch.rows[0])
    assert again < kept / 4


def test_kept_bytes_are_those_of_a_sum_done_by_hand() -> None:
    layer = torch.nn.Linear(8, 16)
    kept = KeptBytes(layer)
    with kept:
        layer(torch.ones(4, 8)).relu()
    assert kept.total == 4 * (4 * 8 + 4 * 16)  # the input for the weight's gradient, relu's result; not the weight


PEAK = """
import json, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from art_backend.activation_memory import activation_bytes
from art_backend.config import AdapterConfig, GRPOConfig
from art_backend.minibatches import make_minibatches
from art_backend.objective import PolicyObjective
from art_backend.packed_model import PackedModel
from art_backend.protocols import TrainSequence
from art_backend.session import Session
from art_backend.step_metrics import PolicyTally

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

config = LlamaConfig(vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=12,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=8192)
session = Session.attach(PackedModel(LlamaForCausalLM(config).eval()), "x", AdapterConfig(r=8, alpha=8), 0)
prompt = tuple(i % 997 for i in range(1600))
batch = [TrainSequence(prompt + tuple((i * 7 + j) % 997 for j in range(300)), (-6.0,) * 300, 1.0) for i in range(8)]
asked = GRPOConfig(packed_sequence_length=8192, activation_checkpointing=sys.argv[1] == "True")
(cut,) = make_minibatches(batch, session.packed.device, asked, seed=0)
planned = session.plan_activations(asked, [cut])
torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
session.gradient(cut, PolicyObjective(asked, cut, PolicyTally()), 1e9, recompute=asked.activation_checkpointing)
print(json.dumps([planned.estimate, status("VmHWM") - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_estimate_is_near_the_measured_peak_and_recomputing_lowers_it() -> None:
    import json

    def peak(recompute: bool) -> tuple[float, float]:
        done = subprocess.run([sys.executable, "-c", PEAK, str(recompute)], capture_output=True, text=True, check=True)
        estimate, measured = json.loads(done.stdout.splitlines()[-1])
        return estimate, measured

    estimate, measured = peak(False)
    print(f"estimated {estimate / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")
    assert measured / 2 < estimate < 2 * measured
    _, again = peak(True)
    print(f"recomputed: measured {again / 1e6:.0f} MB")
    assert again < 0.7 * measured


def test_auto_recomputes_only_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = PeftTrainer(torch.float32)
    trainer.load(str(save_tiny_llama(tmp_path)), AdapterConfig(r=4, alpha=8), 0)
    batch = near_policy(long_batch())
    roomy = trainer.step(batch, GRPOConfig())
    assert roomy["memory/recomputed"] == 0
    assert 0 < roomy["memory/activations_estimated_gb"] < 1
    monkeypatch.setattr(activation_memory, "available_bytes", lambda device: 1_000_000)
    assert trainer.step(batch, GRPOConfig())["memory/recomputed"] == 1
    assert trainer.step(batch, GRPOConfig(activation_checkpointing=False))["memory/recomputed"] == 0
    assert trainer.sft_step(batch, SFTConfig())["memory/recomputed"] == 1
    monkeypatch.setattr(activation_memory, "available_bytes", lambda device: None)
    assert trainer.step(batch, GRPOConfig())["memory/recomputed"] == 0
    assert trainer.step(batch, GRPOConfig(activation_checkpointing=True))["memory/recomputed"] == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_freed_memory_goes_back_only_where_there_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def held_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

    blocks = [bytearray(100_000) for _ in range(2000)]
    del blocks[::2]  # leaves 100 MB of holes
    monkeypatch.setattr(activation_memory, "available_bytes", lambda device: 1_000_000)
    before = held_mb()
    ActivationPlan(estimate=100_000, recompute=False).settle()
    assert before - held_mb() < 20
    ActivationPlan(estimate=500_000, recompute=False).settle()
    assert before - held_mb() > 60


def test_the_estimate_grows_with_the_largest_row() -> None:
    packed = session().packed
    each = bytes_per_token(packed)
    short, long = (
        make_minibatches(long_batch(), packed.device, GRPOConfig(packed_sequence_length=budget), seed=0)[0].rows
        for budget in (1, 2048)
    )
    assert activation_bytes(packed, long, each) > 1.5 * activation_bytes(packed, short, each)
    assert recomputes("auto", packed, estimate=1 << 60)


def test_a_limit_on_the_container_counts(tmp_path: Path) -> None:
    names = activation_memory.CGROUPS[0]
    for name, text in zip(names, ("1000\n", "700\n", "anon 600\ninactive_file 100\n"), strict=True):
        (tmp_path / name).write_text(text)
    assert activation_memory._of_cgroup(names, tmp_path) == 400
    (tmp_path / names[0]).write_text("max\n")
    assert activation_memory._of_cgroup(names, tmp_path) is None
    assert (available_bytes(torch.device("cpu")) or 1) > 0
