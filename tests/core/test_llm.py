"""The structured call against a scripted endpoint over real HTTP (JUDGE-04, 05 and what stands around them)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.capture import capture, losses
from art_core.errors import ConfigError, MissingExtraError
from art_core.llm import EndpointError, ReplyError, StructuredLLM, Usage
from art_core.llm.formats import response_format
from art_core.llm.reading import Unreadable, read_value
from tests.core.judge_server import USAGE, JudgeServer, refusal
from tests.scripted_server import JSON, Reply

pytestmark = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
]
Q: Any = [{"role": "user", "content": "2+2"}]
_names = itertools.count()


class Number(BaseModel):
    number: float = Field(ge=0, le=10)


FOUR = Reply('{"number": 4}', usage=USAGE)


def llm(server: JudgeServer, model: str | None = None, **options: Any) -> StructuredLLM:
    """A model of its own name, so that no format is remembered from another test."""
    return StructuredLLM(
        model or f"judge-{next(_names)}", base_url=server.base_url, **{"first_wait": 0.01, "timeout": 5, **options}
    )


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer([FOUR]) as server:
        yield server


async def test_value_usage_and_totals(server: JudgeServer) -> None:
    model = llm(server, seed=3, temperature=0.5, max_tokens=50, top_p=0.9)
    answer = await model.ask(Q, Number)
    assert (answer.value.number, answer.attempts, answer.usage) == (4, 1, Usage(100, 10, 0.0, 1))
    assert model.usage == answer.usage
    sent = server.requests[0]
    assert (sent["seed"], sent["temperature"], sent["max_tokens"], sent["top_p"]) == (3, 0.5, 50, 0.9)
    assert sent["messages"] == Q
    schema = sent["response_format"]["json_schema"]
    assert schema["strict"]
    assert schema["schema"]["required"] == ["number"]
    assert schema["schema"]["additionalProperties"] is False


async def test_cost_is_counted_by_the_price_list() -> None:
    with JudgeServer([Reply('{"number": 1}', usage=USAGE, model="gpt-4o")]) as server:
        answer = await llm(server, "openai/gpt-4o").ask(Q, Number)
    assert answer.cost == pytest.approx(100 * 2.5e-6 + 10 * 1e-5)
    assert server.requests[0]["model"] == "gpt-4o"


async def test_a_model_name_with_a_slash_reaches_a_server_of_ones_own(server: JudgeServer, monkeypatch: Any) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    await llm(server, "Qwen/Qwen3-1.7B").ask(Q, Number)
    assert server.requests[0]["model"] == "Qwen/Qwen3-1.7B"


async def test_invalid_answer_is_corrected_once_with_the_problem_quoted() -> None:
    with JudgeServer([Reply('{"number": 17}', usage=USAGE), FOUR]) as server:
        answer = await llm(server).ask(Q, Number)
    assert (answer.value.number, answer.attempts) == (4, 2)
    assert answer.usage.prompt_tokens == 200
    said, complaint = server.requests[1]["messages"][1:]
    assert said == {"role": "assistant", "content": '{"number": 17}'}
    assert "number: Input should be less than or equal to 10 (got 17)" in complaint["content"]


async def test_usage_is_recorded_when_no_answer_is_valid() -> None:
    with JudgeServer([Reply("no idea", usage=USAGE)]) as server:
        model = llm(server)
        with pytest.raises(ReplyError, match="no JSON document") as caught:
            await model.ask(Q, Number)
    assert caught.value.usage == model.usage == Usage(200, 20, 0.0, 2)


async def test_judge_04_a_cut_off_reply_is_asked_for_again_with_more_tokens() -> None:
    cut = Reply('{"number": 9', reasoning="hm", finish_reason="length", usage=USAGE)
    empty = Reply("", reasoning="hm", finish_reason="length", usage=USAGE)
    for first in (cut, empty):
        with JudgeServer([first, FOUR]) as server:
            answer = await llm(server, max_tokens=64).ask(Q, Number)
        assert answer.value.number == 4
        assert [request["max_tokens"] for request in server.requests] == [64, 256]
        assert server.requests[0]["messages"] == server.requests[1]["messages"]
        with JudgeServer([first]) as server:
            with pytest.raises(ReplyError, match="cut off at 256 tokens"):
                await llm(server, max_tokens=64).ask(Q, Number)
            assert len(server.requests) == 2


@pytest.mark.parametrize("status", [401, 402, 404, 400])
async def test_judge_04_what_will_not_pass_is_not_repeated(status: int) -> None:
    with JudgeServer([refusal(status, "model not found")]) as server:
        with pytest.raises(EndpointError, match="model not found") as caught:
            await llm(server).ask(Q, Number)
        assert len(server.requests) == 1
    assert (caught.value.status, caught.value.retryable, caught.value.usage.requests) == (status, False, 1)


async def test_judge_04_an_empty_account_is_not_waited_for() -> None:
    with JudgeServer([refusal(429, "insufficient_quota")]) as server:
        with pytest.raises(EndpointError):
            await llm(server).ask(Q, Number)
        assert len(server.requests) == 1


async def test_a_missing_key_is_said_at_once(monkeypatch: Any) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EndpointError, match="no API key is set") as caught:
        await StructuredLLM("openai/o3").ask(Q, Number)
    assert (caught.value.status, caught.value.usage.requests) == (401, 1)


async def test_a_name_without_a_provider_or_a_url_is_told_what_is_missing() -> None:
    with pytest.raises(EndpointError, match=r"no provider is named: .* openai/critic, or give the URL") as caught:
        await StructuredLLM("critic").ask(Q, Number)
    assert caught.value.usage.requests == 1


async def test_judge_04_outages_are_waited_out() -> None:
    with JudgeServer([Reply(status=503), Reply(status=429, headers={"retry-after": "0.3"}), FOUR]) as server:
        started = time.monotonic()
        answer = await llm(server).ask(Q, Number)
        assert time.monotonic() - started >= 0.3
        assert (answer.attempts, len(server.requests)) == (3, 3)


async def test_judge_04_timeouts_and_dead_endpoints_are_bounded() -> None:
    with JudgeServer([Reply("x", delay=0.5)]) as server:
        with pytest.raises(EndpointError) as caught:
            await llm(server, timeout=0.1, max_retries=1).ask(Q, Number)
        assert (caught.value.status, len(server.requests)) == (408, 2)
        await asyncio.sleep(0.6)  # let the server's own tasks end
    with pytest.raises(EndpointError, match=r"check that the endpoint is up") as caught:
        await llm(server, max_retries=1).ask(Q, Number)
    assert caught.value.retryable


async def test_judge_04_a_question_ends_when_its_time_is_over_whatever_is_left_to_try() -> None:
    slow, busy = Reply("x", delay=0.5), Reply(status=429, headers={"retry-after": "30"})
    for replies, least in (([slow], 0.9), ([busy], 0.0)):
        with JudgeServer(replies) as server:
            started = time.monotonic()
            with pytest.raises(EndpointError, match=r"no valid answer within 1 s") as caught:
                await llm(server, timeout=0.4, max_retries=50, deadline=1).ask(Q, Number)
            assert least <= time.monotonic() - started < 3
            assert caught.value.usage.requests == len(server.requests) <= 3
            await asyncio.sleep(0.6)


async def test_waiting_for_ones_turn_is_not_the_endpoints_time() -> None:
    with JudgeServer([Reply('{"number": 4}', delay=0.4)]) as server:
        model = llm(server, max_concurrency=1, deadline=1)
        answers = await asyncio.gather(*[model.ask(Q, Number) for _ in range(4)])
    assert [answer.value.number for answer in answers] == [4] * 4


async def test_judge_04_a_refusal_is_final() -> None:
    class Refusing(Reply):
        def message(self) -> JSON:
            return {**super().message(), "content": None, "refusal": "I cannot judge that"}

    with JudgeServer([Refusing(usage=USAGE)]) as server:
        with pytest.raises(ReplyError, match="I cannot judge that") as caught:
            await llm(server).ask(Q, Number)
        assert (len(server.requests), caught.value.usage.prompt_tokens) == (1, 100)


@pytest.mark.parametrize("accepted", ["json_object", None])
async def test_judge_05_falls_back_and_remembers(accepted: str | None) -> None:
    def script(body: JSON) -> Reply:
        if (body.get("response_format") or {}).get("type") not in (accepted, None):
            return refusal(400, "This response_format type is unavailable")
        return FOUR

    with JudgeServer(script) as server:
        model = llm(server)
        assert (await model.ask(Q, Number)).value.number == 4
        first = len(server.requests)
        assert first == (2 if accepted else 3)
        assert (await llm(server, model.model).ask(Q, Number)).attempts == 1
        assert '"maximum": 10' in server.requests[-1]["messages"][-1]["content"]
        assert len(server.requests) == first + 1


async def test_judge_05_other_refusals_do_not_step_down() -> None:
    with JudgeServer([refusal(400, "model not found")]) as server:
        with pytest.raises(EndpointError, match="model not found"):
            await llm(server).ask(Q, Number)
        assert len(server.requests) == 1


async def test_cache_answers_the_same_question_without_a_request(server: JudgeServer, tmp_path: Any) -> None:
    first = await llm(server, "m", cache_dir=tmp_path, api_key="secret-1").ask(Q, Number)
    again = await llm(server, "m", cache_dir=tmp_path, api_key="secret-2").ask(Q, Number)
    assert (again.value, again.attempts, again.usage) == (first.value, 0, Usage())
    assert len(server.requests) == 1
    await llm(server, "m", cache_dir=tmp_path, seed=1).ask(Q, Number)
    await llm(server, "m", cache_dir=tmp_path).ask([{"role": "user", "content": "2+3"}], Number)
    assert len(server.requests) == 3
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 3
    assert not any(b"secret" in file.read_bytes() for file in files)
    for file in files:
        file.write_text("{torn")
    assert (await llm(server, "m", cache_dir=tmp_path).ask(Q, Number)).attempts == 1


async def test_invalid_answers_are_not_cached(tmp_path: Any) -> None:
    with JudgeServer([Reply("?"), Reply("?"), FOUR]) as server:
        model = llm(server, cache_dir=tmp_path)
        with pytest.raises(ReplyError):
            await model.ask(Q, Number)
        assert (await model.ask(Q, Number)).value.number == 4


async def test_limits_hold_over_all_callers() -> None:
    with JudgeServer([Reply('{"number": 4}', delay=0.1)]) as server:
        model = llm(server, max_concurrency=2)
        started = time.monotonic()
        await asyncio.gather(*[model.ask(Q, Number) for _ in range(6)])
        assert time.monotonic() - started >= 0.3
        paced = llm(server, requests_per_minute=600)
        started = time.monotonic()
        await asyncio.gather(*[paced.ask(Q, Number) for _ in range(4)])
        assert 0.3 <= time.monotonic() - started < 1.5


def test_one_object_serves_several_event_loops(server: JudgeServer) -> None:
    model = llm(server, max_concurrency=1)

    async def both() -> None:
        await asyncio.gather(model.ask(Q, Number), model.ask(Q, Number))

    asyncio.run(both())
    asyncio.run(both())
    assert model.usage.requests == 4


async def test_judge_calls_are_not_captured_into_a_rollout(server: JudgeServer) -> None:
    before = losses()
    with capture() as scope:
        await llm(server).ask(Q, Number)
    assert scope.trajectory.messages_and_choices == []
    assert losses() == before


def test_options_that_the_call_sets_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match="response_format"):
        StructuredLLM("openai/x", response_format={})
    with pytest.raises(ConfigError, match="max_concurrency=0"):
        StructuredLLM("openai/x", max_concurrency=0)


async def test_missing_litellm_names_the_extra(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(MissingExtraError, match=r"art-plugins\[judge\]"):
        await StructuredLLM("openai/x").ask(Q, Number)


@pytest.mark.parametrize(
    "text",
    [
        '{"number": 4}',
        '```json\n{"number": 4}\n```',
        'First {"number": 99}, no: {"number": 4}. Done',
        '<think>{"number": 9}</think>{"number": 4}',
        'The attempt said {"number": 1}; I say ```\n{"number": 4}\n```',
    ],
)
def test_answers_are_found_in_their_wrapping(text: str) -> None:
    assert read_value(text, Number).number == 4


@pytest.mark.parametrize("text", ["", "  ", "four", '{"number": NaN}', '{"number": 4', '{"n": 4}'])
def test_what_is_no_answer_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(Unreadable):
        read_value(text, Number)


@given(st.text(alphabet='{}[]"`:,\\ \nnumber4NaN<think>/', max_size=60))
def test_reading_never_fails_otherwise(text: str) -> None:
    with contextlib.suppress(Unreadable):
        assert 0 <= read_value(text, Number).number <= 10


@given(st.floats(0, 10), st.text(alphabet=st.characters(exclude_characters="{}[]`"), max_size=50))
def test_any_number_is_found_behind_any_remark(number: float, remark: str) -> None:
    assert read_value(f"{remark.replace('</think>', '')}\n{json.dumps({'number': number})}", Number).number == number


def test_a_schema_with_free_keys_is_not_called_strict() -> None:
    class Free(BaseModel):
        arguments: dict[str, Any]

    from art_core.llm.formats import Format

    assert response_format(Format.JSON_SCHEMA, Free)["response_format"]["json_schema"]["strict"] is False
