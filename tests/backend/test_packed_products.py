"""The parts of a packed forward pass that have a gradient of their own, each against autograd of the plain formula."""

from __future__ import annotations

import pytest
import torch

from art_backend.attention import attend
from art_backend.attention_layout import lay_out
from art_backend.attention_products import attend_by_products
from art_backend.fused_layers import fuse_layers
from art_backend.logprobs import BLOCK, token_logprobs
from art_backend.packing import Row, pack
from art_backend.trie import build_trie
from tests.backend.packed_reference import SHAPE, long_batch, mixed_batch, tiny_model

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def row_of(batch: str) -> Row:
    (row,) = pack(build_trie({"long": long_batch, "mixed": mixed_batch}[batch]()), 2000)
    return row


def visible(row: Row) -> torch.Tensor:
    """Whether a token sees another (N, N): its ancestors and itself, from the segments' parents."""
    seen = torch.zeros(len(row), len(row), dtype=torch.bool)
    for segment in row.segments:
        own = slice(segment.start, segment.stop)
        seen[own, own] = torch.ones(len(segment), len(segment)).tril().bool()
        parent = segment.parent
        while parent is not None:
            above = row.segments[parent]
            seen[own, above.start : above.stop] = True
            parent = above.parent
    return seen


def states(row: Row, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(row), WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) / WIDTH**0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("batch", ["mixed", "long"])
@pytest.mark.parametrize("tile", [5, 128])
@pytest.mark.parametrize(
    ("function", "dtype", "tolerance"),
    [
        (attend_by_products, torch.float32, 1e-5),
        (attend, torch.float32, 1e-5),
        (attend, torch.bfloat16, 2e-2),
    ],
)
def test_attention_over_a_row_is_attention_under_its_mask(
    batch: str, tile: int, function: type, dtype: torch.dtype, tolerance: float
) -> None:
    row = row_of(batch)
    layout = lay_out(row, HEADS // KEY_HEADS, dtype, torch.device("cpu"), tile=tile)
    own, expected = states(row, dtype), [part.detach().float().requires_grad_() for part in states(row, dtype)]
    out, reference = function(*own, layout, None), plain(*expected, visible(row))
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(direction.to(dtype))
    reference.backward(direction)
    pairs = [(out, reference), *((a.grad, b.grad) for a, b in zip(own, expected, strict=True))]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() < tolerance


@pytest.mark.parametrize("temperatures", [None, (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_logprobs_and_entropy_are_those_of_a_softmax(
    temperatures: tuple[float, ...] | None, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Several targets of one state, the same one twice, a state without a target, more states than a block."""
    torch.manual_seed(0)
    count = BLOCK + 5
    head = torch.nn.Linear(WIDTH, 50, bias=bias).requires_grad_(False).to(dtype)
    index = torch.tensor([0, 0, 0, *range(2, count), count - 1])
    target = torch.randint(50, (len(index),))
    target[1] = target[0]
    temperature = None if temperatures is None else torch.tensor(temperatures).repeat(count)[:count]
    own = (3 * torch.randn(count, WIDTH)).to(dtype).requires_grad_()
    expected = own.detach().float().requires_grad_()
    exact = torch.nn.functional.linear(expected, head.weight.float(), head.bias.float() if bias else None)
    scaled = exact if temperature is None else exact / temperature[:, None]
    reference = scaled.log_softmax(-1)
    logprob, untempered, entropy = token_logprobs(own, head, index, target, temperature)
    weight = torch.randn(len(index))
    (logprob * weight).sum().backward()
    (reference[index, target] * weight).sum().backward()
    for ours, theirs in (
        (logprob, reference[index, target]),
        (untempered, exact.log_softmax(-1)[index, target]),
        (entropy, torch.distributions.Categorical(logits=scaled).entropy()),
        (own.grad, expected.grad),
    ):
        assert ours is not None
        assert theirs is not None
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() < tolerance
    assert not untempered.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fused_layers_are_the_layers(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    plain_model, model = tiny_model(kind), tiny_model(kind).to(dtype).requires_grad_(False)
    fuse_layers(model)
    places = [name for name, layer in model.named_modules() if "forward" in layer.__dict__]
    assert sum(name.endswith("norm") for name in places) == {"llama": 5, "qwen3": 9}[kind]
    assert sum(name.endswith("mlp") for name in places) == 2
    for name in places:
        layer, reference = model.get_submodule(name), plain_model.get_submodule(name)
        width = getattr(reference, "weight", torch.empty(SHAPE["hidden_size"])).shape[-1]
        own = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        expected = own.detach().float().requires_grad_()
        out, plain_out = layer(own), reference(expected)
        direction = torch.randn(plain_out.shape, generator=torch.Generator().manual_seed(3))
        out.backward(direction.to(dtype))
        plain_out.backward(direction)
        for ours, theirs in ((out, plain_out), (own.grad, expected.grad)):
            assert ours is not None
            assert theirs is not None
            assert ((ours.float() - theirs).norm() / theirs.norm()).item() < tolerance, name


def test_layers_of_another_formula_keep_it() -> None:
    model = tiny_model()
    norm = model.model.norm
    norm.__dict__["forward"] = lambda x: x * (1 + norm.weight)
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()  # half its input near 0, as SiLU
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(0.01)
    fuse_layers(model)
    assert "forward" not in model.model.layers[0].mlp.__dict__
    assert "forward" in model.model.layers[1].mlp.__dict__
    assert torch.equal(norm(torch.ones(1, 1, 32)), 2 * torch.ones(1, 1, 32))


def test_a_norm_that_is_trained_has_a_gradient() -> None:
    model = tiny_model()
    fuse_layers(model)
    model.model.norm(torch.ones(1, 2, 32)).sum().backward()
    assert model.model.norm.weight.grad is not None
