"""CrewAI on `LLM`: what was sampled is captured exactly, and the crew does what it does on CrewAI's own OpenAI class."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from crewai import Agent, Crew, Memory, Process, Task
from crewai.flow.flow import Flow, listen, start
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.tools import tool
from pydantic import BaseModel

from art_core import Model, TrainableModel
from art_core.capture import CaptureScope, Loss, capture, losses
from art_core.errors import ConfigError
from art_crewai import LLM
from tests.integrations.crewai_crews import (
    BAD_CALLS,
    CITIES,
    Script,
    look,
    our_llm,
    plain,
    replies,
    roles,
    served_model,
    stock_llm,
    sunny,
    turns,
    weather_crew,
)
from tests.integrations.odd_ids import ODD_IDS, check_odd_ids, w
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call


class Weather(BaseModel):
    """An answer."""

    city: str
    sunny: bool


FORM = '{"city": "Oslo", "sunny": true}'
INPUTS = [{"city": city} for city in CITIES]


def both(answers: Any, tmp_path: Path, drive: Any, **options: Any) -> tuple[Any, CaptureScope, Script, list[JSON]]:
    """What `drive(llm)` gives on our LLM, which must be what it gives on CrewAI's own with the same replies; `answers()`
    makes the replies. Then the capture, the script, and the requests that arrived."""
    results = []
    for make in (lambda server: stock_llm(server, **options), lambda server: our_llm(server, tmp_path, **options)):
        script = Script(answers())
        with ScriptedServer(script) as server, capture() as scope:
            result = drive(make(server))
            results.append((asyncio.run(result) if asyncio.iscoroutine(result) else result, plain(server.requests)))
    (stock, asked), (ours, sent) = results
    key = lambda body: json.dumps(body, sort_keys=True)  # noqa: E731 - crews side by side send in any order
    assert ours == stock
    assert sorted(sent, key=key) == sorted(asked, key=key)
    return ours, scope, script, server.requests


async def outputs(kickoff: Any) -> list[str]:
    done = await kickoff
    return [output.raw for output in (done if isinstance(done, list) else [done])]


WAYS = {
    "kickoff": lambda crew: [crew.kickoff(INPUTS[0]).raw],
    "kickoff_async": lambda crew: outputs(crew.kickoff_async(INPUTS[0])),
    "akickoff": lambda crew: outputs(crew.akickoff(INPUTS[0])),
    "kickoff_for_each": lambda crew: [output.raw for output in crew.kickoff_for_each(INPUTS)],
    "kickoff_for_each_async": lambda crew: outputs(crew.kickoff_for_each_async(INPUTS)),
    "akickoff_for_each": lambda crew: outputs(crew.akickoff_for_each(INPUTS)),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("way", WAYS)
def test_every_kickoff(way: str, stream: bool, tmp_path: Path):
    raws, scope, script, requests = both(
        lambda: sunny, tmp_path, lambda llm: WAYS[way](weather_crew(llm)), stream=stream
    )
    cities = CITIES if "each" in way else CITIES[:1]
    assert raws == [f"It is sunny in {city}" for city in cities]
    made = turns(scope)
    assert sorted(made) == sorted(chain.from_iterable(script.sampled.values()))
    for city in cities:
        assert [ids for ids in made if ids in script.sampled[city]] == script.sampled[city]
        assert len(script.sampled[city]) == 2
    assert {body["model"] for body in requests} == {"agent@3"}
    assert set(roles(scope)) == {"researcher"}


def test_streaming_crew(tmp_path: Path):
    def drive(llm: Any) -> list[str]:
        crew = weather_crew(llm)
        crew.stream = True
        streamed = crew.kickoff(INPUTS[0])
        return ["".join(chunk.content for chunk in streamed), streamed.result.raw]

    _, scope, script, requests = both(lambda: sunny, tmp_path, drive)
    assert turns(scope) == script.sampled["Oslo"]
    assert all(body["stream"] for body in requests)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_text_beside_a_tool_call_is_kept_although_crewai_drops_it(stream: bool, tmp_path: Path):
    _, scope, _, requests = both(
        lambda: sunny, tmp_path, lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw, stream=stream
    )
    first, second = (call.choices()[0] for call in scope.calls)
    assert first.message.content == "Let me look."
    assert json.loads(first.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert second.message.content == "It is sunny in Oslo"
    assert [m["content"] for m in requests[1]["messages"] if m["role"] == "assistant"] == [None]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_parallel_tool_calls_are_one_turn(stream: bool, tmp_path: Path):
    calls = [tool_call("a", "look", '{"city": "Oslo"}'), tool_call("b", "look", '{"city": "Rome"}')]
    _, scope, script, requests = both(
        lambda: replies(Reply(None, calls), Reply("both sunny")),
        tmp_path,
        lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw,
        stream=stream,
    )
    assert turns(scope) == script.sampled["Oslo"]
    assert [call.function.arguments for call in scope.calls[0].choices()[0].message.tool_calls] == [
        '{"city": "Oslo"}',
        '{"city": "Rome"}',
    ]
    assert [m["content"] for m in requests[1]["messages"] if m["role"] == "tool"] == ["sunny in Oslo", "sunny in Rome"]


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_frm_01_frm_02_a_bad_tool_call_is_a_turn_as_it_was_sampled(kind: str, tmp_path: Path):
    bad = BAD_CALLS[kind]
    raw, scope, script, _ = both(
        lambda: replies(Reply(None, [bad]), Reply("I give up")),
        tmp_path,
        lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw,
    )
    assert raw == "I give up"
    assert turns(scope) == script.sampled["Oslo"]
    assert scope.calls[0].choices()[0].message.tool_calls[0].function.arguments == bad["function"]["arguments"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_frm_03_tool_call_ids_that_are_not_unique(stream: bool, tmp_path: Path):
    script = Script(replies(*(Reply(None, calls) for calls in ODD_IDS), Reply("sunny")))
    with ScriptedServer(script) as server, capture() as scope:
        crew = weather_crew(our_llm(server, tmp_path, stream=stream))
        crew.agents[0].tools = crew.tasks[0].tools = [tool(w)]
        assert crew.kickoff(INPUTS[0]).raw == "sunny"
    assert turns(scope) == script.sampled["Oslo"]
    check_odd_ids(server.requests[-1]["messages"], scope.trajectory.messages())


def without_tools(llm: Any, **task: Any) -> Crew:
    crew = weather_crew(llm, **task)
    crew.agents[0].tools = []
    crew.tasks[0].tools = []
    return crew


STRUCTURED = {
    "pydantic": lambda llm: without_tools(llm, output_pydantic=Weather).kickoff(INPUTS[0]).pydantic.model_dump(),
    "json": lambda llm: without_tools(llm, output_json=Weather).kickoff(INPUTS[0]).json_dict,
    "response_model": lambda llm: llm.call("Oslo?", response_model=Weather).model_dump(),
    "async response_model": lambda llm: dumped(llm.acall("Oslo?", response_model=Weather)),
}


async def dumped(answer: Any) -> Any:
    answer = await answer
    return answer.model_dump() if isinstance(answer, BaseModel) else answer


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("method", STRUCTURED)
def test_cap_01_structured_output_is_one_turn(method: str, stream: bool, tmp_path: Path):
    answer, scope, script, requests = both(lambda: lambda _: Reply(FORM), tmp_path, STRUCTURED[method], stream=stream)
    assert answer == {"city": "Oslo", "sunny": True}
    assert turns(scope) == script.sampled["Oslo"]
    assert len(requests) == 1


def test_cap_01_response_format_of_the_llm(tmp_path: Path):
    answer, scope, script, requests = both(
        lambda: lambda _: Reply(FORM), tmp_path, lambda llm: llm.call("Oslo?"), response_format=Weather
    )
    assert answer == Weather(city="Oslo", sunny=True)
    assert "response_format" in requests[0]
    assert turns(scope) == script.sampled["Oslo"]


CONVERSIONS = {
    "output_pydantic": (Reply(FORM), lambda out: out.pydantic.model_dump()),
    "output_json": (Reply(None, [tool_call("f", "Weather", FORM)]), lambda out: out.json_dict),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("field", CONVERSIONS)
def test_cap_06_a_conversion_behind_tools_is_captured(field: str, asynchronous: bool, tmp_path: Path):
    """CrewAI makes a client of its own for `output_json`."""
    form, read = CONVERSIONS[field]

    async def drive_async(llm: Any) -> Any:
        return read(await weather_crew(llm, **{field: Weather}).akickoff(INPUTS[0]))

    def drive(llm: Any) -> Any:
        return drive_async(llm) if asynchronous else read(weather_crew(llm, **{field: Weather}).kickoff(INPUTS[0]))

    before = losses().get(Loss.ORPHAN, 0)
    _, scope, script, requests = both(
        lambda: replies(Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')]), Reply("sunny, Oslo"), form),
        tmp_path,
        drive,
    )
    assert len(requests) == 3
    assert turns(scope) == script.sampled["Oslo"]
    assert roles(scope) == ["researcher"] * 3
    assert losses().get(Loss.ORPHAN, 0) == before


@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_retries_are_no_turns(status: int, stream: bool, tmp_path: Path):
    failure = Reply(status=status, headers={"retry-after-ms": "1"})
    call = Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')])
    raw, scope, script, _ = both(
        lambda: replies(failure, call, failure, Reply("sunny")),
        tmp_path,
        lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw,
        stream=stream,
    )
    assert raw == "sunny"
    assert turns(scope) == script.sampled["Oslo"]
    assert [failed.error for failed in scope.failed_calls] == [f"HTTP {status}"] * 2


def test_context_overflow_is_summarised_and_goes_on(tmp_path: Path):
    overflow = Reply(status=400, code="context_length_exceeded")
    call = Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')])
    raw, scope, script, requests = both(
        lambda: replies(call, overflow, Reply("<summary>it was sunny</summary>"), Reply("sunny")),
        tmp_path,
        lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw,
    )
    assert raw == "sunny"
    assert len(requests) == 4
    assert turns(scope) == sorted(chain.from_iterable(script.sampled.values()))
    assert roles(scope) == ["researcher"] * 3


def test_frm_02_c_max_iter_keeps_all_turns(tmp_path: Path):
    def drive(llm: Any) -> str:
        crew = weather_crew(llm)
        crew.agents[0].max_iter = 3
        return crew.kickoff(INPUTS[0]).raw

    def stubborn(body: JSON) -> Reply:
        return Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')]) if body.get("tools") else Reply("enough")

    raw, scope, script, _ = both(lambda: stubborn, tmp_path, drive)
    assert raw == "enough"
    assert turns(scope) == script.sampled["Oslo"]
    assert len(scope.calls) == 4, "three of the agent and the forced answer"
    assert roles(scope) == ["researcher"] * 4


def test_frm_04_b_an_empty_turn_that_is_retried_is_captured(tmp_path: Path):
    call = Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')])
    raw, scope, script, _ = both(
        lambda: replies(call, Reply(""), Reply("later")),
        tmp_path,
        lambda llm: weather_crew(llm).kickoff(INPUTS[0]).raw,
    )
    assert raw == "later"
    assert turns(scope) == script.sampled["Oslo"]
    assert [call.choices()[0].message.content for call in scope.calls] == [None, "", "later"]


def test_react_agents_send_their_stop_words(tmp_path: Path):
    """An LLM without function calling gets CrewAI's text protocol."""

    class TextLLM(LLM):
        def supports_function_calling(self) -> bool:
            return False

    script = Script(
        replies(
            Reply('Thought: look\nAction: look\nAction Input: {"city": "Oslo"}'),
            Reply("Thought: I now know the final answer\nFinal Answer: sunny"),
        )
    )
    with ScriptedServer(script) as server, capture() as scope:
        output = weather_crew(TextLLM(served_model(server, tmp_path))).kickoff(INPUTS[0])
    assert output.raw == "sunny"
    assert turns(scope) == script.sampled["Oslo"]
    assert [body["stop"] for body in server.requests] == [["\nObservation:"]] * 2
    assert "sunny in Oslo" in json.dumps(server.requests[1]["messages"])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_hierarchical_crew_names_each_agent(asynchronous: bool, tmp_path: Path):
    def drive(llm: Any) -> Any:
        agent = Agent(role="researcher", goal="know", backstory="a person", llm=llm, tools=[look])
        task = Task(description="The weather in Oslo?", expected_output="a sentence", agent=agent)
        crew = Crew(agents=[agent], tasks=[task], process=Process.hierarchical, manager_llm=llm)
        return outputs(crew.akickoff()) if asynchronous else [crew.kickoff().raw]

    work = json.dumps({"task": "Look at Oslo", "context": "Oslo", "coworker": "researcher"})
    _, scope, script, _ = both(
        lambda: replies(
            Reply(None, [tool_call("d", "delegate_work_to_coworker", work)]),
            Reply(None, [tool_call("a", "look", '{"city": "Oslo"}')]),
            Reply("sunny"),
            Reply("Oslo is sunny"),
        ),
        tmp_path,
        drive,
    )
    assert turns(scope) == script.sampled["Oslo"]
    assert roles(scope) == ["Crew Manager", "researcher", "researcher", "Crew Manager"]


@pytest.mark.slow  # the first flow of a process imports a vector store
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_flow_of_two_crews(asynchronous: bool, tmp_path: Path):
    def drive(llm: Any) -> Any:
        class Trip(Flow[Any]):
            @start()
            def north(self) -> str:
                return weather_crew(llm).kickoff({"city": "Oslo"}).raw

            @listen(north)
            async def south(self, before: str) -> str:
                return f"{before}; {(await weather_crew(llm).akickoff({'city': 'Rome'})).raw}"

        trip = Trip(suppress_flow_events=True)
        return trip.kickoff_async() if asynchronous else trip.kickoff()

    result, scope, script, _ = both(lambda: sunny, tmp_path, drive)
    assert result == "It is sunny in Oslo; It is sunny in Rome"
    assert turns(scope) == script.sampled["Oslo"] + script.sampled["Rome"]


@pytest.mark.slow  # imports a vector store
def test_the_calls_of_a_memory_belong_to_the_rollout(tmp_path: Path):
    """It makes them on threads of its own."""
    folders = iter(["stock", "ours"])
    analysis = {"suggested_scope": "/", "categories": [], "importance": 0.5, "extracted_metadata": {}}

    def drive(llm: Any) -> str:
        crew = weather_crew(llm)
        memory = Memory(
            llm=llm, embedder=lambda texts: [[0.5] * 8 for _ in texts], storage=str(tmp_path / next(folders))
        )
        return Crew(agents=crew.agents, tasks=crew.tasks, memory=memory).kickoff(INPUTS[0]).raw

    def answer(body: JSON) -> Reply:
        asked = body.get("response_format", {}).get("json_schema", {}).get("name")
        if asked == "ExtractedMemories":
            return Reply('{"memories": ["Oslo is sunny."]}')
        return Reply(json.dumps(analysis)) if asked == "MemoryAnalysis" else sunny(body)

    before = losses().get(Loss.ORPHAN, 0)
    _, scope, script, requests = both(lambda: answer, tmp_path, drive)
    assert len(requests) == 4
    assert turns(scope) == script.sampled["Oslo"]
    assert losses().get(Loss.ORPHAN, 0) == before


async def test_frm_04_c_cap_06_rollouts_do_not_mix(tmp_path: Path):
    """The same crew twice, then crews beside one another: in tasks, and in threads that inherit no context."""
    script = Script(sunny)

    async def in_task(llm: LLM, city: str) -> CaptureScope:
        with capture() as scope:
            await weather_crew(llm).akickoff({"city": city})
        return scope

    def in_thread(llm: LLM, scope: CaptureScope, city: str) -> None:
        with scope.activate():
            weather_crew(llm).kickoff({"city": city})

    with ScriptedServer(script) as server:
        llm = our_llm(server, tmp_path)
        crew = weather_crew(llm)
        twice = []
        for _ in range(2):
            with capture() as scope:
                await crew.akickoff({"city": "Oslo"})
            twice.append(scope)
        beside = await asyncio.gather(*[in_task(llm, city) for city in ("Rome", "Bern")])
        hopping = CaptureScope()
        thread = threading.Thread(target=in_thread, args=(llm, hopping, "Lima"))
        thread.start()
        await asyncio.to_thread(thread.join)
    assert turns(twice[0]) + turns(twice[1]) == script.sampled["Oslo"]
    assert [turns(scope) for scope in beside] == [script.sampled["Rome"], script.sampled["Bern"]]
    assert turns(hopping) == script.sampled["Lima"]


def test_cap_06_a_call_outside_any_rollout_is_counted(tmp_path: Path):
    before = losses().get(Loss.ORPHAN, 0)
    with ScriptedServer(Script(sunny)) as server:
        weather_crew(our_llm(server, tmp_path)).kickoff(INPUTS[0])
    assert losses()[Loss.ORPHAN] == before + 2


def test_the_newest_adapter_answers_and_an_llm_may_be_older_than_its_model(tmp_path: Path):
    model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
    crew = weather_crew(None)
    crew.agents[0].llm = LLM(model)
    for step in (0, 5):
        with ScriptedServer(Script(sunny)) as server, capture() as scope:  # the second is another endpoint
            model.inference_base_url, model.inference_api_key, model._clients = server.base_url, "key", None
            model.served(step)
            crew.kickoff(INPUTS[0])
            assert {body["model"] for body in server.requests} == {f"agent@{step}"}
        assert scope.trajectory.final_policy_version == step


def test_options(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, capture() as scope:
        llm = our_llm(server, tmp_path, role="Überprüfer", default_headers={"x-mine": "1"}, max_retries=7, timeout=5.0,
                      temperature=0.5, max_tokens=9, extra_body={"top_k": 3}, context_window=1000)  # fmt: skip
        weather_crew(llm).kickoff(INPUTS[0])
        client = llm._get_sync_client()
        assert (client.max_retries, client.timeout) == (7, 5.0)
    assert roles(scope) == ["Überprüfer"] * 2, "an explicit role wins"
    assert all(headers["x-mine"] == "1" and "x-art-role" not in headers for headers in server.headers)
    asked = {name: server.requests[0][name] for name in ("temperature", "max_tokens", "top_k")}
    assert asked == {"temperature": 0.5, "max_tokens": 9, "top_k": 3}
    assert llm.get_context_window_size() == 850
    assert llm.supports_function_calling()
    assert llm.supports_stop_words()
    with pytest.raises(ConfigError, match="api_key, base_url: the model says where"):
        our_llm(server, tmp_path, base_url="http://elsewhere", api_key="k")


def test_a_name_with_o1_is_not_taken_for_openais_o1(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, capture():
        model = served_model(server, tmp_path)
        model.name = "solo1"
        weather_crew(LLM(model)).kickoff(INPUTS[0])
    assert server.requests[0]["messages"][0]["role"] == "system"
    assert server.requests[0]["tools"]


def test_a_prompted_model_is_asked_by_the_name_that_its_endpoint_knows(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, capture() as scope:
        model = Model(
            name="big", project="test", inference_model_name="gpt-4o", inference_base_url=server.base_url,
            inference_api_key="k", base_path=tmp_path,
        )  # fmt: skip
        llm = LLM(model)
        weather_crew(llm).kickoff(INPUTS[0])
    assert {body["model"] for body in server.requests} == {"gpt-4o"}
    assert "return_token_ids" not in server.requests[0]
    assert llm.get_context_window_size() > 100_000
    assert len(scope.calls) == 2


PRIVATE = (
    "_build_sync_client",
    "_build_async_client",
    "_get_sync_client",
    "_get_async_client",
    "_prepare_completion_params",
)


@pytest.mark.parametrize("name", PRIVATE)
def test_crewai_still_has_the_methods_that_llm_overrides(name: str):
    assert callable(getattr(OpenAICompletion, name, None)), (
        f"CrewAI renamed OpenAICompletion.{name}: find where its OpenAI client (or request) is made now, and override "
        "that in art_crewai.llm.LLM; otherwise calls go to OpenAI and are not captured."
    )


def test_crewai_still_makes_a_client_for_conversions():
    from crewai.utilities.internal_instructor import InternalInstructor

    assert callable(getattr(InternalInstructor, "_create_instructor_client", None)), (
        "CrewAI renamed InternalInstructor._create_instructor_client: `output_json` conversions need our client another way."
    )
