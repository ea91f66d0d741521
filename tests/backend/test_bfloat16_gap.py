"""What bfloat16 costs on the default model: packed rows may be as far from float32 as Transformers and PEFT are, no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from art_backend.adapter_files import adapter_parameters, linear_names
from art_backend.base_model import load_model, resolve
from art_backend.config import AdapterConfig
from art_backend.packed_model import PackedModel, Scores
from art_backend.packing import pack
from art_backend.protocols import TrainSequence
from art_backend.session import Session
from art_backend.trie import build_trie
from tests.backend.policy_session import gradients

MODEL, SHAPE = "smollm2-135m", AdapterConfig()
Result = tuple[torch.Tensor, torch.Tensor]
"""Logprobs, and the gradient of their sum weighted by advantage, as one vector."""


def batch(seed: int) -> list[TrainSequence]:
    """Three replies of 32 tokens to a prompt of 128, all random."""
    draw = torch.Generator().manual_seed(seed)
    prompt, *replies = torch.randint(1000, 40000, (7, 32), generator=draw).split([4, 1, 1, 1])
    start = tuple(prompt.flatten().tolist())
    return [
        TrainSequence(start + tuple(reply[0].tolist()), (-9.0,) * 32, advantage)
        for reply, advantage in zip(replies, (1.0, -1.0, 0.5), strict=True)
    ]


def move(parameters: dict[str, torch.Tensor]) -> None:
    """Give the adapter weights that change what the model computes."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(parameters):
            parameters[name].copy_(torch.randn(parameters[name].shape, generator=draw) * 0.01)


def result(logprobs: torch.Tensor, parameters: dict[str, torch.Tensor]) -> Result:
    found = gradients(parameters)
    return logprobs.double(), torch.cat([found[name].flatten() for name in sorted(found)]).double()


def packed(sequences: list[TrainSequence], dtype: torch.dtype) -> Result:
    session = Session.attach(PackedModel(load_model(resolve(MODEL), dtype).eval()), MODEL, SHAPE, seed=0)
    move(session.parameters)
    trie = build_trie(sequences)
    (row,) = pack(trie, 1024)
    logprobs = torch.empty(len(trie.predictions))

    def objective(scores: Scores) -> torch.Tensor:
        logprobs[scores.entry] = scores.logprob.detach()
        return scores.logprob * scores.advantage

    session.packed.backward(row, objective)
    return result(logprobs, session.parameters)


def plain(sequences: list[TrainSequence], dtype: torch.dtype) -> Result:
    model = load_model(resolve(MODEL), dtype).eval()
    lora = LoraConfig(r=SHAPE.r, lora_alpha=SHAPE.alpha, target_modules=linear_names(model))
    adapter: Any = get_peft_model(model, lora).eval()
    parameters = adapter_parameters(adapter)
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    move(parameters)
    found = []
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = adapter(input_ids=ids[None], use_cache=False).logits[0]
        start = sequence.prompt_length
        logprobs = logits[start - 1 : -1].float().log_softmax(-1).gather(-1, ids[start:, None])[:, 0]
        (logprobs * sequence.advantage).sum().backward()
        found.append(logprobs.detach())
    return result(torch.cat(found), parameters)


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_elsewhere() -> None:
    """Over several batches: a single one may be ill-conditioned. With seed 0 the gradient's error is a quarter of it on both
    sides, most of it in the first layer's values (in float32, weights moved by 0.2% move it by 6 to 11%, else by 3%)."""
    ours, theirs = torch.zeros(2), torch.zeros(2)
    for seed in (1, 2, 3):
        sequences = batch(seed)
        exact, reference = packed(sequences, torch.float32), plain(sequences, torch.float32)
        assert (exact[0].sort().values - reference[0].sort().values).abs().max() < 1e-4
        assert (exact[1] - reference[1]).norm() < 1e-4 * reference[1].norm()
        ours += gap(packed(sequences, torch.bfloat16), exact)
        theirs += gap(plain(sequences, torch.bfloat16), reference)
    assert (ours < 1.3 * theirs).all(), (ours, theirs)


def gap(rounded: Result, exact: Result) -> torch.Tensor:
    """How far the logprobs are off, in nats a token on average, and how far the gradient is (2)."""
    return torch.stack([(rounded[0] - exact[0]).abs().mean(), (rounded[1] - exact[1]).norm()]).float()
