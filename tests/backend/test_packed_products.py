"""The parts of a packed forward pass that have a gradient of their own, each against autograd of the plain formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from art_backend.adapter_files import linear_names
from art_backend.attention import attend, use_trie_attention
from art_backend.attention_layout import LANES, lay_out
from art_backend.attention_products import attend_by_products
from art_backend.fused_layers import fuse_layers
from art_backend.fused_lora import fuse_lora
from art_backend.logprobs import BLOCK, token_logprobs
from art_backend.packed_model import PackedModel
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.recompute import KeptBytes
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
    """Query, and key and value as one."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(KEY_HEADS, len(row), HEADS // KEY_HEADS, WIDTH), (2, KEY_HEADS, len(row), WIDTH)]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def plain(query: torch.Tensor, states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    key, value = states
    scores = torch.einsum("hngd,hkd->hgnk", query, key) / WIDTH**0.5
    return torch.einsum("hgnk,hkd->nhgd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


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
    layout = lay_out(row, dtype, torch.device("cpu"), tile=tile)
    own, expected = states(row, dtype), [part.detach().float().requires_grad_() for part in states(row, dtype)]
    out, reference = function(*own, layout, WIDTH**-0.5), plain(*expected, visible(row))
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


def test_masks_do_not_grow_with_the_square_of_a_row() -> None:
    masks = []
    for length in (1000, 4000):
        (row,) = pack(build_trie([TrainSequence((1,) * length, (-1.0,), 1.0)]), 8000)
        layout = lay_out(row, torch.float32, torch.device("cpu"))
        masks.append(sum(tile.bias.numel() for tile in layout.tiles) / len(row))
    assert masks[1] == pytest.approx(masks[0], rel=0.05)


def group(branches: int, prompt: int, reply: int) -> Row:
    sequences = [TrainSequence((1,) * prompt + (2 + i,) * (reply + 1), (-1.0,) * reply, 1.0) for i in range(branches)]
    (row,) = pack(build_trie(sequences), 8000)
    return row


def test_tiles_end_where_branches_end() -> None:
    """Replies of 95 tokens get a tile each and two of 60 share one: no query is multiplied with the keys of a third."""
    for reply, of_a_tile in ((95, 1), (60, 2)):
        tiles = lay_out(group(6, 256, reply), torch.bfloat16, torch.device("cpu")).tiles
        sizes = [tile.stop - tile.start for tile in tiles]
        assert sizes == [128, 128] + [of_a_tile * reply] * (6 // of_a_tile)


@pytest.mark.parametrize("reply", [60, 95, 300])
def test_the_keys_of_a_tile_and_those_with_a_mask_fill_vectors(reply: int) -> None:
    for tile in lay_out(group(6, 250, reply), torch.bfloat16, torch.device("cpu")).tiles:
        keys = [key for part in tile.keys for key in range(part.start, part.stop)]
        assert len(keys) == len(set(keys)) == tile.common + tile.bias.shape[1]
        assert len(keys) % LANES == tile.common % LANES == 0


def test_the_last_layer_goes_on_only_where_something_is_predicted() -> None:
    packed = PackedModel(tiny_model().requires_grad_(False))
    row, rows = row_of("mixed"), []
    hook = packed.model.model.norm.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    list(packed.score(row))
    hook.remove()
    assert rows == [len(set(row.predictions.at.tolist()))]
    assert rows[0] < len(row)


def with_adapter(kind: str, dtype: torch.dtype) -> Any:
    """A PEFT model of `dtype` with a float32 adapter; the adapter and biases change what it computes."""
    model = tiny_model(kind)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=linear_names(model))).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.normal_(std=0.2)
    adapted.to(dtype)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return adapted


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_fused_layers_are_the_layers(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output and all gradients of a decoder layer on a branching row, against Transformers and PEFT in float32."""
    row = row_of("mixed")
    plain_model, model = with_adapter(kind, torch.float32), with_adapter(kind, dtype)
    use_trie_attention(model)
    fuse_layers(model.base_model.model)
    fuse_lora(model)
    mask = torch.zeros(len(row), len(row)).masked_fill_(~visible(row), -torch.inf)[None, None]
    ids = torch.from_numpy(row.positions)[None]
    start = torch.randn(1, len(row), SHAPE["hidden_size"], generator=torch.Generator().manual_seed(2))
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(3))
    results = []
    for each, options in ((model, {"trie": lay_out(row, dtype, torch.device("cpu"))}), (plain_model, {})):
        decoder = each.get_base_model().get_decoder()
        x = start.to(each.dtype).requires_grad_()
        positions = decoder.rotary_emb(x, position_ids=ids)
        out = decoder.layers[0](x, attention_mask=None if options else mask, position_embeddings=positions, **options)
        out.backward(direction.to(out.dtype))
        grads = {n: p.grad for n, p in each.named_parameters() if "layers.0" in n and p.requires_grad}
        assert len(grads) == 14
        results.append({"out": out, "x": x.grad} | grads)
    assert isinstance(model.get_base_model().get_decoder().layers[0].__dict__["forward"], partial)
    for name, expected in results[1].items():
        ours = results[0][name]
        assert ours is not None
        assert expected is not None
        assert ((ours.float() - expected).norm() / expected.norm()).item() < tolerance, name


def test_a_fused_layer_keeps_less() -> None:
    """Of a layer on 60 tokens: what each half reads, what attention sees and gives, gate, up and the low-rank products."""
    model = with_adapter("llama", torch.bfloat16)
    use_trie_attention(model)
    fuse_layers(model.base_model.model)
    fuse_lora(model)
    row, decoder = row_of("mixed"), model.get_base_model().get_decoder()
    x = torch.randn(1, len(row), SHAPE["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    positions = decoder.rotary_emb(x, position_ids=torch.from_numpy(row.positions)[None])
    layout = lay_out(row, torch.bfloat16, torch.device("cpu"))
    kept = KeptBytes(model)
    with kept:
        decoder.layers[0](x, attention_mask=None, position_embeddings=positions, trie=layout)
    width, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    low, norms = 7 * 4, 2 * 2
    assert kept.total <= 2 * len(row) * (5 * width + 2 * inner + low + norms) * 1.1


def test_layers_of_another_formula_keep_it() -> None:
    model = tiny_model()
    norm = model.model.norm
    norm.__dict__["forward"] = lambda x: x * (1 + norm.weight)
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()  # half its input near 0, as SiLU
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(0.01)
    use_trie_attention(model)
    fuse_layers(model)
    assert "forward" not in model.model.layers[0].__dict__
    assert "forward" in model.model.layers[1].__dict__
    assert torch.equal(norm(torch.ones(1, 1, 32)), 2 * torch.ones(1, 1, 32))


def test_a_norm_that_is_trained_has_a_gradient() -> None:
    model = tiny_model()
    packed = PackedModel(model)
    packed.backward(row_of("mixed"), lambda scores: scores.logprob)
    for norm in (model.model.norm, model.model.layers[0].input_layernorm, model.model.layers[1].self_attn.q_proj):
        assert norm.weight.grad is not None
