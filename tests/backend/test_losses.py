"""The loss and every gradient of packed rows are those of one sequence at a time (float32, 1e-5), however rows are cut."""

import random
from dataclasses import replace

import pytest
import torch

from art_backend.adapter_files import adapter_parameters, attach_adapter
from art_backend.attention import use_trie_attention
from art_backend.attention_layout import lay_out
from art_backend.config import AdapterConfig
from art_backend.importance import importance_ratio
from art_backend.losses import cispo, clipped
from art_backend.packed_model import CHUNK, Objective, PackedModel, Scores
from art_backend.packing import pack
from art_backend.protocols import TrainSequence
from art_backend.trie import build_trie
from art_core.errors import TrainingError
from tests.backend.packed_reference import (
    CONFIGS,
    VOCABULARY,
    assert_same_gradients,
    long_batch,
    mixed_batch,
    reference_loss,
    tiny_model,
)
from tests.backend.test_packing import prefix

LOW, HIGH = 0.8, 1.5
OBJECTIVES: dict[str, Objective] = {
    "cispo": lambda s: cispo(s.logprob, importance_ratio(s.logprob, s.sampled_logprob), s.advantage, (LOW, HIGH)),
    "ppo": lambda s: clipped(importance_ratio(s.logprob, s.sampled_logprob), s.advantage, (LOW, HIGH)),
    "sft": lambda s: -s.logprob,
}


def with_lora(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Attach an adapter whose B is not zero, so that all of it has a gradient."""
    parameters = adapter_parameters(attach_adapter(model, "tiny", AdapterConfig(r=4, alpha=8), seed=3))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for name, parameter in parameters.items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return parameters


def reference(batch: list[TrainSequence], kind: str, model: str = "llama") -> tuple[float, dict[str, torch.Tensor]]:
    plain = tiny_model(model)
    parameters = with_lora(plain)
    loss = reference_loss(plain, batch, kind, LOW, HIGH)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def packed(
    batch: list[TrainSequence], kind: str, budget: int, model: str = "llama", shuffle_rows: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    own = PackedModel(tiny_model(model))
    parameters = with_lora(own.model)
    trie = build_trie(batch)
    rows, losses = pack(trie, budget), []

    def mean(scores: Scores) -> torch.Tensor:
        losses.append(OBJECTIVES[kind](scores) / len(trie.predictions))
        return losses[-1]

    if shuffle_rows:
        random.Random(1).shuffle(rows)
    for row in rows:
        own.backward(row, mean)
    return torch.cat(losses).double().sum().item(), {
        name: p.grad.clone() for name, p in parameters.items() if p.grad is not None
    }


def assert_same(
    ours: tuple[float, dict[str, torch.Tensor]],
    expected: tuple[float, dict[str, torch.Tensor]],
    tolerance: float = 1e-5,
) -> None:
    assert ours[0] == pytest.approx(expected[0], abs=tolerance)
    assert min(gradient.abs().max() for gradient in expected[1].values()) > 1e-4, "each parameter must have a gradient"
    assert_same_gradients(ours[1], expected[1], tolerance)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("budget", [1, 40, 75, 10_000])
def test_loss_and_gradients_equal_one_sequence_at_a_time(kind: str, budget: int) -> None:
    assert_same(packed(mixed_batch(), kind, budget), reference(mixed_batch(), kind))


@pytest.mark.parametrize("model", CONFIGS)
def test_loss_and_gradients_for_each_kind_of_model(model: str) -> None:
    assert_same(packed(mixed_batch(), "cispo", 60, model), reference(mixed_batch(), "cispo", model))


@pytest.mark.parametrize("budget", [300, 600])
def test_loss_and_gradients_of_rows_longer_than_a_tile_and_a_chunk(budget: int) -> None:
    assert_same(packed(long_batch(), "cispo", budget), reference(long_batch(), "cispo"))


def test_the_order_of_sequences_and_rows_does_not_matter() -> None:
    shuffled = random.Random(4).sample(mixed_batch(), len(mixed_batch()))
    assert_same(packed(shuffled, "ppo", 40, shuffle_rows=True), packed(mixed_batch(), "ppo", 40), tolerance=1e-6)


def test_loss_01_packed_segments_have_the_logits_they_have_alone() -> None:
    """A and B with nothing in common; then A, B and C below one prefix, in tiles that cut through them; any order."""
    a, b = [3, 4, 5, 6], [7, 8, 9, 10, 11]
    shared, c = [12, 13, 14], [3, 7, 9]
    for batch in ([a, b], [b, a], [shared + a, shared + b, shared + c], [shared + c, shared + a, shared + b]):
        alone, in_row = tiny_model(), tiny_model()
        use_trie_attention(in_row)
        trie = build_trie([TrainSequence((*tokens, 1), (-1.0,), 1.0) for tokens in batch])
        (row,) = pack(trie, 1000)
        out = in_row(
            input_ids=torch.from_numpy(row.token_ids)[None],
            position_ids=torch.from_numpy(row.positions)[None],
            use_cache=False,
            trie=lay_out(row, torch.float32, torch.device("cpu"), tile=4),
        ).logits[0]
        assert {prefix(row, i) for i in range(len(row))} == {tuple(t[:i]) for t in batch for i in range(1, len(t) + 1)}
        for position in range(len(row)):
            expected = alone(input_ids=torch.tensor([prefix(row, position)])).logits[0, -1]
            assert (out[position] - expected).abs().max() < 1e-5


def test_loss_01_no_token_of_one_trajectory_is_predicted_from_another() -> None:
    """B's first token is context and must not be a target of A's last one; changing A changes nothing for B."""
    a, b = TrainSequence((3, 4, 5, 6), (-1.0, -1.0), 1.0), TrainSequence((7, 8, 9, 10, 11), (-1.0,) * 3, -1.0)
    trie = build_trie([a, b])
    assert sorted(trie.predictions.target.tolist()) == [5, 6, 9, 10, 11]
    model = PackedModel(tiny_model())

    def scores_of_b(other: TrainSequence) -> torch.Tensor:
        (row,) = pack(build_trie([other, b]), 100)
        scores = list(model.score(row))
        logprob = torch.cat([s.logprob for s in scores])
        return logprob[torch.cat([s.advantage for s in scores]) < 0]

    assert torch.equal(scores_of_b(a), scores_of_b(replace(a, token_ids=(3, 20, 5, 30))))


def test_loss_01_only_sampled_tokens_are_trained() -> None:
    """The gradient of the logits is zero everywhere but at the positions that predict a sampled token."""
    model = PackedModel(tiny_model())
    touched = []
    model.head.register_forward_hook(lambda _module, args, _out: touched.append(args[0]))
    batch = [TrainSequence((3, 4, 5, 6, 7), (-1.0, None, -1.0), 1.0)]
    parameters = with_lora(model.model)
    (row,) = pack(build_trie(batch), 100)
    model.backward(row, OBJECTIVES["sft"])
    assert [len(states) for states in touched] == [2], "logits at two positions only"
    assert any(p.grad is not None for p in parameters.values())
    assert model.head.weight.grad is None


def test_logits_exist_for_a_chunk_of_positions_at_a_time() -> None:
    model, sizes = PackedModel(tiny_model()), []
    model.head.register_forward_hook(lambda _module, args, _out: sizes.append(len(args[0])))
    with_lora(model.model)
    trie = build_trie(long_batch())
    (row,) = pack(trie, 1000)
    model.backward(row, OBJECTIVES["sft"])
    total = len(set(trie.predictions.at.tolist()))
    assert sizes == [min(CHUNK, total - first) for first in range(0, total, CHUNK)]
    assert len(sizes) > 1


def test_bfloat16_differs_from_float32_by_rounding_only() -> None:
    def gradient(dtype: torch.dtype) -> torch.Tensor:
        model = PackedModel(tiny_model().to(dtype))
        parameters = with_lora(model.model)
        assert {p.dtype for p in parameters.values()} == {torch.float32}
        (row,) = pack(build_trie(mixed_batch()), 1000)
        model.backward(row, OBJECTIVES["sft"])
        return torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])

    single, half = gradient(torch.float32), gradient(torch.bfloat16)
    assert torch.nn.functional.cosine_similarity(single, half, dim=0) > 0.99


def test_loss_06_the_first_on_policy_ratio_is_1_at_any_temperature() -> None:
    model = PackedModel(tiny_model())
    for temperature in (0.5, 1.0, 1.7):
        fresh = [replace(s, temperature=temperature) for s in mixed_batch()]
        plain, on_policy = tiny_model(), []
        for s in fresh:
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([s.token_ids])).logits[0] / temperature
            logprobs = logits.log_softmax(-1)
            at = range(s.prompt_length, len(s.token_ids))
            on_policy.append(replace(s, logprobs=tuple(logprobs[i - 1, s.token_ids[i]].item() for i in at)))
        (row,) = pack(build_trie(on_policy), 1000)
        scores = list(model.score(row))
        ratio = torch.cat([importance_ratio(s.logprob, s.sampled_logprob) for s in scores])
        assert (ratio - 1).abs().max() < 1e-4


def test_loss_06_the_worked_example() -> None:
    """Logits [2, 0, 0], temperature 0.5, token 0: which convention gives which ratio."""
    logits = torch.tensor([2.0, 0.0, 0.0])
    new, raw = (logits / 0.5).log_softmax(0)[:1], logits.log_softmax(0)[:1]
    assert importance_ratio(new, new).item() == pytest.approx(1.0, abs=1e-4)
    assert importance_ratio(new, raw).item() == pytest.approx(1.226, abs=1e-3)
    assert importance_ratio(new, raw / 0.5).item() == pytest.approx(1.558, abs=1e-3)


def test_a_model_that_ignores_the_row_is_refused() -> None:
    """One whose layers do not use the attention interface attends across branches: loading must fail, by name."""
    model = tiny_model()
    plain = type(model.model.layers[0].self_attn).forward

    def leaking(self, *args, **kwargs):
        self.config = type(self.config)(**{**self.config.to_dict(), "attn_implementation": "eager"})
        kwargs["attention_mask"] = torch.full((1, 1, *[kwargs["hidden_states"].shape[1]] * 2), -torch.inf).triu(1)
        return plain(self, *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.forward = leaking.__get__(layer.self_attn)
    with pytest.raises(TrainingError, match=r"model type 'llama'.*differ by"):
        PackedModel(model)


def test_sequences_longer_than_a_sliding_window_are_refused() -> None:
    model = tiny_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = 16
    own = PackedModel(model)
    (row,) = pack(build_trie([TrainSequence(tuple(range(3, 23)), (-1.0,), 1.0)]), 100)
    with pytest.raises(TrainingError, match="window of 16"):
        list(own.score(row))


def test_entropy_and_untempered_logprobs() -> None:
    model, plain = PackedModel(tiny_model()), tiny_model()
    (row,) = pack(build_trie([TrainSequence((3, 4, 5), (-1.0,), 1.0, temperature=0.5)]), 100)
    (scores,) = model.score(row)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[3, 4]])).logits[0, -1]
    probabilities = (logits / 0.5).softmax(0)
    assert scores.entropy.item() == pytest.approx(-(probabilities * probabilities.log()).sum().item(), abs=1e-5)
    assert scores.logprob.item() == pytest.approx(probabilities[5].log().item(), abs=1e-5)
    assert scores.untempered.item() == pytest.approx(logits.log_softmax(0)[5].item(), abs=1e-5)
    assert model.vocabulary == VOCABULARY
