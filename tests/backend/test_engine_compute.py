"""The decode loop against plain forward passes: whatever shares a cache with whatever, the numbers are the model's own."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.engine import admission, decoder
from art_backend.engine.decoder import Decoder
from art_backend.engine.lora import load_adapter
from art_backend.engine.registry import Served
from art_backend.engine.rows import Finish, Row
from art_backend.engine.scheduler import Scheduler
from art_core.errors import EngineError
from tests.backend.engine_models import assert_exact, make_row, save_adapter, sharp_llama, start_scheduler, wait


@pytest.fixture(scope="module")
def model() -> Any:
    return sharp_llama()


@pytest.fixture
def scheduler(model: Any) -> Iterator[Scheduler]:
    scheduler = start_scheduler(model)
    yield scheduler
    scheduler.close()


def tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 97) for _ in range(count)]


def run(scheduler: Scheduler, rows: list[Row]) -> list[Row]:
    scheduler.submit(rows)
    wait(rows)
    return rows


def test_different_prompts_more_than_slots(model: Any, scheduler: Scheduler) -> None:
    rows = run(scheduler, [make_row(tokens(i, 5 + 7 * i % 60), 6, temperature=0) for i in range(19)])
    for row in rows:
        assert_exact(model, row)


def test_greedy_equals_generate(model: Any, scheduler: Scheduler) -> None:
    (row,) = run(scheduler, [make_row(tokens(1, 30), 20, temperature=0)])
    expected = model.generate(torch.tensor([row.prompt]), max_new_tokens=20, do_sample=False)[0]
    assert row.tokens == expected.tolist()


def test_shared_prefix_is_computed_once(model: Any, scheduler: Scheduler) -> None:
    system = tokens(0, 100)
    rows = run(scheduler, [make_row(system + tokens(i, 10), 8) for i in range(1, 5)])
    for row in rows:
        assert_exact(model, row)
    # 100 shared tokens, 4 x 10 own ones. A row that was admitted alone first has its prefix copied, not recomputed.
    assert scheduler.stats.tokens_prefilled <= 100 + 4 * 10
    assert scheduler.stats.tokens_prefilled + scheduler.stats.tokens_reused >= 4 * 110


def test_siblings_prefill_one_prompt(model: Any, scheduler: Scheduler) -> None:
    prompt = tokens(0, 90)
    rows = run(scheduler, [make_row(prompt, 8) for _ in range(8)])
    for row in rows:
        assert_exact(model, row)
    assert scheduler.stats.tokens_prefilled <= 90 + 8


def test_next_turn_continues_its_own_slot(model: Any, scheduler: Scheduler) -> None:
    prompts = [tokens(0, 40) + tokens(i, 5) for i in range(1, 5)]
    for turn in range(4):
        before = scheduler.stats.tokens_prefilled
        rows = run(scheduler, [make_row(prompt, 5) for prompt in prompts])
        for row in rows:
            assert_exact(model, row)
        if turn:
            assert scheduler.stats.tokens_prefilled - before <= 4 * (1 + 6)
        prompts = [row.tokens + tokens(100 * turn + i, 6) for i, row in enumerate(rows)]


def test_prefix_grows_and_shrinks_under_running_rows(model: Any, scheduler: Scheduler) -> None:
    system = tokens(0, 120)
    rows = [make_row(system + tokens(1, 60), 120)]
    scheduler.submit(rows)
    for prompt in (system + tokens(1, 60), system + tokens(1, 60) + tokens(2, 5), system + tokens(3, 9), tokens(4, 12)):
        time.sleep(0.03)  # joins while the others are being decoded
        rows.append(make_row(prompt, 60))
        scheduler.submit(rows[-1:])
    wait(rows)
    for row in rows:
        assert_exact(model, row)


def test_a_replaced_prefix_takes_its_sequences_with_it(model: Any, scheduler: Scheduler) -> None:
    one, other = tokens(0, 100), tokens(9, 100)
    first = run(scheduler, [make_row(one + tokens(i, 5), 4) for i in range(4)])
    run(scheduler, [make_row(other + tokens(i, 5), 4) for i in range(4)])
    (row,) = run(scheduler, [make_row(first[0].tokens + tokens(5, 5), 4)])
    assert_exact(model, row)


def test_few_tokens_in_common_with_the_prefix(model: Any, scheduler: Scheduler) -> None:
    """Too few to share; they are copied out of the prefix."""
    system = tokens(0, 100)
    run(scheduler, [make_row(system + tokens(i, 5), 4) for i in range(4)])
    before = scheduler.stats.tokens_prefilled
    (row,) = run(scheduler, [make_row(system[:20] + tokens(7, 30), 4)])
    assert_exact(model, row)
    assert scheduler.stats.tokens_prefilled - before == 30


@pytest.mark.parametrize("private_again", [0, 64, 8192])
def test_random_traffic(model: Any, monkeypatch: pytest.MonkeyPatch, private_again: int) -> None:
    monkeypatch.setattr(admission, "MAX_PRIVATE_AGAIN", private_again)
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 50)
    scheduler = start_scheduler(model, size=6)
    generator = random.Random(private_again)
    roots = [tokens(i, 20 + 40 * i) for i in range(4)]
    rows: list[Row] = []
    for number in range(120):
        finished = [row for row in rows if row.finish in (Finish.STOP, Finish.LENGTH) and len(row.tokens) < 400]
        if finished and generator.random() < 0.5:
            prompt = generator.choice(finished).tokens + tokens(number, generator.randrange(1, 12))
        else:
            prompt = generator.choice(roots) + tokens(generator.randrange(6), generator.randrange(1, 50))
        temperature = generator.choice([0, 0.7, 1.0])
        row = make_row(prompt, generator.randrange(1, 24), temperature=temperature, top_p=generator.choice([1.0, 0.8]))
        rows.append(row)
        scheduler.submit([row])
        if generator.random() < 0.2:
            time.sleep(0.02)
        if generator.random() < 0.05:
            generator.choice(rows).cancelled = True
    wait(rows)
    scheduler.close()
    for row in rows:
        if row.finish in (Finish.STOP, Finish.LENGTH):
            assert_exact(model, row)
    assert sum(row.finish in (Finish.STOP, Finish.LENGTH) for row in rows) > 100


def test_srv_01_adapters_take_turns_exactly(model: Any, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one", "two")}
    references = {
        "base": model,
        "one": save_adapter(model, folders["one"], seed=1),
        "two": save_adapter(model, folders["two"], seed=2, use_rslora=True, target_modules=["q_proj", "down_proj"]),
    }
    served = {name: Served(name, load_adapter(folder)) for name, folder in folders.items()} | {
        "base": Served("base", None)
    }
    scheduler = start_scheduler(model)
    prompt = tokens(0, 50)
    names = ["one", "two", "base", "one", "one", "base", "two", "one"]
    rows = run(scheduler, [make_row(prompt, 12, served[name], temperature=0) for name in names])
    scheduler.close()
    for name, row in zip(names, rows, strict=True):
        assert_exact(references[name], row)
    assert len({tuple(row.tokens) for row in rows}) == 3


def test_base_weights_are_restored_exactly(model: Any, tmp_path: Path) -> None:
    save_adapter(model, tmp_path / "one", seed=1)
    scheduler = start_scheduler(model)
    adapter = Served("one", load_adapter(tmp_path / "one"))
    run(scheduler, [make_row(tokens(0, 5), 2, adapter)])
    run(scheduler, [make_row(tokens(0, 5), 2)])
    weights = scheduler._decoder.model.state_dict()
    scheduler.close()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_no_adapter_waits_for_ever(model: Any, tmp_path: Path) -> None:
    """A stream of requests for one adapter does not hold up those for another."""
    save_adapter(model, tmp_path / "one", seed=1)
    scheduler = start_scheduler(model)
    adapter = Served("one", load_adapter(tmp_path / "one"))
    busy = [make_row(tokens(i, 5), 40) for i in range(4)]
    scheduler.submit(busy)
    other = make_row(tokens(0, 5), 2, adapter)
    scheduler.submit([other])
    later = [make_row(tokens(i, 5), 40) for i in range(12)]
    scheduler.submit(later)
    wait([other])
    assert sum(row.finish is None for row in later) >= 8
    wait(later)
    scheduler.close()


def test_seed_does_not_depend_on_the_batch(model: Any, scheduler: Scheduler) -> None:
    alone = run(scheduler, [make_row(tokens(0, 20), 16, seed=7)])[0]
    crowd = run(
        scheduler, [make_row(tokens(i, 20), 16, seed=i) for i in (3, 4)] + [make_row(tokens(0, 20), 16, seed=7)]
    )
    other = run(scheduler, [make_row(tokens(0, 20), 16, seed=8)])[0]
    assert crowd[-1].tokens == alone.tokens != other.tokens


def test_a_failed_step_fails_its_requests_only(
    model: Any, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = scheduler._decoder.prefill
    scheduler._decoder.prefill = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    (failed,) = run(scheduler, [make_row(tokens(0, 20))])
    scheduler._decoder.prefill = prefill  # type: ignore[method-assign]
    assert failed.finish is Finish.FAILED
    assert "ZeroDivisionError" in str(failed.error)
    (row,) = run(scheduler, [make_row(tokens(0, 20))])
    assert_exact(model, row)


def test_diverged_weights_are_an_error_not_a_token(model: Any) -> None:
    scheduler = start_scheduler(model)
    with torch.no_grad():
        scheduler._decoder.model.model.norm.weight.fill_(float("nan"))
    (row,) = run(scheduler, [make_row(tokens(0, 20))])
    scheduler.close()
    assert row.finish is Finish.FAILED
    assert "not numbers" in str(row.error)


def test_closing_fails_what_is_running(model: Any) -> None:
    scheduler = start_scheduler(model)
    rows = [make_row(tokens(i, 20), 400) for i in range(9)]
    scheduler.submit(rows)
    scheduler.close()
    scheduler.submit(late := [make_row(tokens(0, 5))])
    assert all(row.finish is Finish.FAILED for row in (*rows, *late))


def test_other_architectures(model: Any) -> None:
    """Query/key norms, biases and a head size of its own need nothing special."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    for made in (Qwen2ForCausalLM(Qwen2Config(**shape)), Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))):
        reference = made.eval().requires_grad_(False)
        scheduler = start_scheduler(reference)
        for row in run(scheduler, [make_row(tokens(0, 40) + tokens(i, 5), 6) for i in range(3)]):
            assert_exact(reference, row)
        scheduler.close()


def test_a_model_that_the_cache_cannot_represent_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=16)).eval()
    with torch.inference_mode():
        with pytest.raises(EngineError, match="window of 16 tokens"):
            Decoder(window, 4, 64)
        Decoder(window, 4, 16)
        capped = Gemma2ForCausalLM(Gemma2Config(**shape, **heads, head_dim=8, sliding_window=4096)).eval()
        with pytest.raises(EngineError, match="soft caps"):
            Decoder(capped, 4, 64)
