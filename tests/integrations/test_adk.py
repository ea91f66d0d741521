"""`ART` in an `LlmAgent`, against ADK's own `LiteLlm` on the same script: same run, and exactly the sampled turns."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.genai import types
from pydantic import BaseModel

from art_adk import ART, RolloutPlugin
from art_core import Model, TrainableModel
from art_core.calls import CallStatus, Extra, extra_field
from art_core.capture import capture
from art_core.capture.roles import current_role
from art_core.clients import MAX_RETRIES
from art_core.end_reason import EndReason
from art_core.errors import ConfigError
from tests.integrations.adk_agents import (
    PLAIN,
    SSE,
    look,
    numbered,
    roles,
    run,
    run_both,
    sampled_in,
    served_model,
    turns,
)
from tests.integrations.odd_ids import ODD_IDS, check_odd_ids, w
from tests.scripted_server import Reply, ScriptedServer, tool_call

SOON = {"retry-after-ms": "10"}
OSLO, ROME = tool_call("a", "look", '{"city": "Oslo"}'), tool_call("b", "look", '{"city": "Rome"}')
BROKEN = tool_call("a", "look", '{"city": "He said "hi""}')
DONE = Reply("Sunny.")
both_modes = pytest.mark.parametrize("config", [PLAIN, SSE], ids=["plain", "sse"])


def agent(model: Any, **options: Any) -> LlmAgent:
    return LlmAgent(name="watcher", model=model, instruction="Watch.", **{"tools": [look], **options})


SCRIPTS: dict[str, tuple[list[Reply], int, EndReason]] = {
    "answer": ([Reply("4")], 1, EndReason.FINISHED),
    "reasoning": ([Reply("4", reasoning="two and two")], 1, EndReason.FINISHED),
    "tool": ([Reply("Let me look.", [OSLO]), DONE], 2, EndReason.FINISHED),
    "parallel tools": ([Reply(None, [OSLO, ROME]), DONE], 2, EndReason.FINISHED),
    "tool twice": ([Reply(None, [OSLO]), Reply(None, [ROME]), DONE], 3, EndReason.FINISHED),
    "unknown tool": ([Reply(None, [tool_call("a", "nope", "{}")]), DONE], 2, EndReason.FINISHED),
    "wrong arguments": ([Reply(None, [tool_call("a", "look", '{"town": 1}')]), DONE], 2, EndReason.FINISHED),
    "arguments no object": ([Reply(None, [tool_call("a", "look", "[1]")]), DONE], 1, EndReason.INVALID_TOOL_CALL),
    "cut": ([Reply("So I", finish_reason="length")], 1, EndReason.LENGTH),
    "filtered": ([Reply("So I", finish_reason="content_filter")], 1, EndReason.MODEL_ERROR),
    "filtered later": ([Reply(None, [OSLO]), Reply("", finish_reason="content_filter")], 2, EndReason.MODEL_ERROR),
    "retries": ([Reply(status=429, headers=SOON), Reply(status=500, headers=SOON), DONE], 1, EndReason.FINISHED),
    "overflow": (
        [Reply(None, [OSLO]), Reply(status=400, code="context_length_exceeded")],
        1,
        EndReason.CONTEXT_OVERFLOW,
    ),
    "refused": ([Reply(status=400, code="nonsense")], 0, EndReason.ERROR),
}


@both_modes
@pytest.mark.parametrize("name", SCRIPTS)
async def test_runs_as_on_the_stock_model(name: str, config: RunConfig, tmp_path: Path):
    script, expected, reason = SCRIPTS[name]
    scope = await run_both(agent, script, config, tmp_path)
    assert len(turns(scope.trajectory)) == expected
    assert set(roles(scope.trajectory)) <= {"watcher"}
    assert scope.trajectory.metadata["end_reason"] == reason.value


class Answer(BaseModel):
    city: str
    sunny: bool


ANY = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
FORCED = types.GenerateContentConfig(
    tool_config=types.ToolConfig(function_calling_config=ANY), temperature=0.3, top_p=0.9
)
ANSWER = Reply('{"city": "Oslo", "sunny": true}')


@both_modes
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"generate_content_config": FORCED}, {"tool_choice": "required", "temperature": 0.3, "top_p": 0.9}),
        ({"output_schema": Answer, "tools": []}, {"response_format": None}),
        ({"output_schema": Answer}, {"response_format": None, "tools": None}),
    ],
    ids=["forced tools", "output schema", "output schema beside tools"],
)
async def test_options_go_over_the_wire(options: Any, asked: dict[str, Any], config: RunConfig, tmp_path: Path):
    script = [ANSWER] if options.get("tools") == [] else [Reply(None, [OSLO]), ANSWER]

    def make(model: Any) -> LlmAgent:
        return agent(model, **copy.copy(options))

    request = (await run_both(make, script, config, tmp_path)).calls[-1].request
    for name, value in asked.items():
        assert request[name] == value if value is not None else request[name], name


@both_modes
async def test_frm_01_invalid_arguments_end_the_run_and_are_kept(config: RunConfig, tmp_path: Path):
    trajectory = (await run_both(agent, [Reply(None, [BROKEN]), DONE], config, tmp_path)).trajectory
    assert trajectory.metadata["end_reason"] == "invalid_tool_call"
    assert trajectory.metrics["invalid_args"] == 1
    (choice,) = trajectory.choices()
    assert choice.message.tool_calls[0].function.arguments == BROKEN["function"]["arguments"]
    assert trajectory.messages()[-1]["tool_calls"], "what a judge reads shows the call"


@both_modes
async def test_frm_01_an_invalid_call_beside_a_valid_one_is_answered_with_an_error(config: RunConfig, tmp_path: Path):
    """Without a `RolloutPlugin` ADK does what it does on its own model: it makes the call that it can read, or, in a
    stream, none."""
    script = numbered([Reply("A", [OSLO, tool_call("b", "look", '{"city":')]), DONE])
    with ScriptedServer(script) as server, capture() as scope:
        made = agent(ART(served_model(server.base_url, tmp_path)))
        await run(made, config, RolloutPlugin())
    trajectory = scope.trajectory
    asked = server.requests[1]["messages"]
    results = {m["tool_call_id"]: m["content"] for m in asked if m["role"] == "tool"}
    assert "sunny in Oslo" in results["a"]
    assert "no JSON object" in results["b"]
    assert [call["id"] for m in asked for call in m.get("tool_calls", ())] == ["a", "b"]
    assert [m["content"] for m in asked if m["role"] == "assistant" and m.get("content")] == ["A"]
    assert turns(trajectory) == [sampled_in(reply) for reply in script]
    assert trajectory.choices()[0].message.tool_calls[1].function.arguments == '{"city":', "as it was sampled"
    assert trajectory.metadata["end_reason"] == "finished"
    assert (trajectory.metrics["invalid_args"], trajectory.metrics["tool_calls"]) == (1, 1)
    with ScriptedServer(script) as server, capture():
        await run(agent(ART(served_model(server.base_url, tmp_path))), config)
    answered = [m["tool_call_id"] for body in server.requests[1:] for m in body["messages"] if m["role"] == "tool"]
    assert answered == (["a"] if config is PLAIN else [])


async def test_frm_01_each_streamed_turn_of_a_rollout_is_read_by_itself(tmp_path: Path):
    script = numbered(
        [
            Reply(None, [OSLO]),
            Reply(None, [tool_call("c", "look", '{"city":'), ROME]),
            Reply(None, [tool_call("d", "look", '{"city": "Oslo"}'), tool_call("e", "look", "[1]")]),
            DONE,
        ]
    )
    with ScriptedServer(script) as server, capture() as scope:
        await run(agent(ART(served_model(server.base_url, tmp_path))), SSE, RolloutPlugin())
    results = {m["tool_call_id"]: m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"}
    assert {name: "no JSON object" in text for name, text in results.items()} == {
        "a": False, "b": False, "c": True, "d": False, "e": True,
    }  # fmt: skip
    assert len(turns(scope.trajectory)) == len(script)
    assert scope.trajectory.metrics["invalid_args"] == 2


async def test_frm_01_arguments_that_adk_repairs_stay_as_they_are(tmp_path: Path):
    script = [Reply(None, [OSLO, tool_call("b", "look", "{'city': 'Rome'}")]), DONE]
    trajectory = (await run_both(agent, script, PLAIN, tmp_path)).trajectory
    assert (trajectory.metrics["invalid_args"], trajectory.metrics["tool_calls"]) == (0, 2)


@both_modes
async def test_frm_03_tool_call_ids_that_are_not_unique(config: RunConfig, tmp_path: Path):
    script = numbered([*(Reply(None, calls) for calls in ODD_IDS), DONE])
    with ScriptedServer(script) as server, capture() as scope:
        await run(agent(ART(served_model(server.base_url, tmp_path)), tools=[w]), config)
    check_odd_ids(server.requests[-1]["messages"], scope.trajectory.messages())
    assert turns(scope.trajectory) == [sampled_in(reply) for reply in script]


async def test_cap_09_streaming_gives_the_same_two_turns(tmp_path: Path):
    look_up = Reply("Hello", [tool_call("a", "look", '{"city": "Oslo"}')])
    plain = (await run_both(agent, [look_up, Reply("done")], PLAIN, tmp_path)).trajectory
    streamed = (await run_both(agent, [look_up, Reply("done")], SSE, tmp_path)).trajectory
    assert streamed.messages() == plain.messages()
    assert [m["role"] for m in plain.messages()] == ["system", "user", "assistant", "tool", "assistant"]
    assert turns(streamed) == turns(plain)
    assert streamed.metrics["tool_calls"] == plain.metrics["tool_calls"] == 1


async def test_a_call_written_as_text_is_made_and_the_text_is_what_was_sampled(tmp_path: Path):
    script = numbered([Reply('{"name": "look", "arguments": {"city": "Oslo"}}'), DONE])
    with ScriptedServer(script) as server, capture() as scope:
        async for _ in responses_of(agent(ART(served_model(server.base_url, tmp_path)))):
            pass
    assert turns(scope.trajectory) == [sampled_in(reply) for reply in script]
    assert scope.trajectory.messages()[2]["content"] == script[0].content


async def responses_of(made: LlmAgent) -> Any:
    from google.adk.runners import InMemoryRunner

    runner = InMemoryRunner(agent=made, app_name="test")
    session = await runner.session_service.create_session(app_name="test", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text="The weather?")])
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=SSE):
        yield event


async def test_no_role_leaks_out_of_the_stream_and_a_stream_left_early_is_not_trained(tmp_path: Path):
    seen: list[str | None] = []

    def peek(city: str) -> str:
        seen.append(current_role())
        return city

    script = numbered(
        [
            Reply("Let me look.", [tool_call("a", "peek", '{"city": "Oslo"}')]),
            Reply("It is very sunny.", chunk_delay=0.2),
        ]
    )
    with ScriptedServer(script) as server, capture() as scope:
        model = ART(served_model(server.base_url, tmp_path))
        events = responses_of(agent(model, tools=[peek]))
        async for event in events:
            seen.append(current_role())
            if event.partial and "It is" in (event.content.parts[0].text or ""):
                break
        await events.aclose()
    assert len(seen) > 3
    assert set(seen) == {None}
    assert roles(scope.trajectory) == ["watcher", "watcher"]
    last = max(scope.trajectory.choices(), key=lambda choice: extra_field(choice, Extra.CALL_ID))
    assert extra_field(last, Extra.STATUS) == CallStatus.ABORTED


async def test_an_explicit_role_wins_and_a_request_without_an_agent_has_none(tmp_path: Path):
    with ScriptedServer(numbered([Reply("a"), Reply("b"), Reply("c")])) as server, capture() as scope:
        model = served_model(server.base_url, tmp_path)
        for made, labels in ((ART(model, role="writer"), "x"), (ART(model), "x"), (ART(model), None)):
            config = types.GenerateContentConfig(labels={"adk_agent_name": labels} if labels else None)
            contents = [types.Content(role="user", parts=[types.Part(text="hi")])]
            async for _ in made.generate_content_async(LlmRequest(contents=contents, config=config)):
                pass
    assert roles(scope.trajectory) == ["writer", "x", None]


def test_newest_version_on_any_event_loop_and_in_threads(tmp_path: Path):
    script = numbered([Reply(str(number)) for number in range(4)])
    with ScriptedServer(script) as server:
        model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
        made = agent(ART(model))  # before the model is served
        model.inference_base_url, model.inference_api_key = server.base_url, "key"
        original = copy.deepcopy(made)

        async def ask(version: int) -> None:
            model.served(version)
            async for _ in responses_of(original):
                pass

        async def in_thread(version: int) -> None:
            await asyncio.to_thread(asyncio.run, ask(version))

        with capture() as scope:
            for version, how in ((1, ask), (2, ask), (3, in_thread), (4, in_thread)):
                asyncio.run(how(version))
        assert [body["model"] for body in server.requests] == ["agent@1", "agent@2", "agent@3", "agent@4"]
        assert len(turns(scope.trajectory)) == 4
        assert model.openai_client().max_retries == MAX_RETRIES, "LiteLLM left its mark on the shared client"


async def test_a_prompted_model_is_asked_by_its_name_and_for_nothing_else(tmp_path: Path):
    with ScriptedServer([Reply("4")]) as server, capture() as scope:
        model = Model(
            name="big",
            project="test",
            inference_model_name="vendor/big",
            inference_base_url=server.base_url,
            inference_api_key="key",
            base_path=tmp_path,
        )
        async for _ in responses_of(agent(ART(model))):
            pass
    assert server.requests[0]["model"] == "vendor/big"
    assert "return_token_ids" not in server.requests[0]
    assert len(scope.calls) == 1


async def test_a_global_cache_of_litellm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import litellm
    from litellm.caching.caching import Cache

    monkeypatch.setattr(litellm, "cache", Cache())
    with ScriptedServer(numbered([Reply("a"), Reply("b")])) as server, capture() as scope:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[])
        for _ in range(2):
            async for _event in responses_of(made):
                await asyncio.sleep(0)
    assert len(turns(scope.trajectory)) == 2


def test_what_belongs_to_the_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="api_base, api_key: the model decides"):
        ART(served_model("http://x/v1", tmp_path), api_base="http://y", api_key="z")


@pytest.mark.slow
def test_imports_are_lazy_and_of_no_other_framework():
    code = """
    import os, sys
    os.environ.pop("LITELLM_LOCAL_MODEL_COST_MAP")
    import art_adk
    assert dir(art_adk)
    assert not {"google.adk", "litellm", "openai"} & sys.modules.keys()
    from art_adk import ART, RolloutPlugin, rollout
    assert not {"litellm", "langchain_core", "crewai", "torch", "art_backend"} & sys.modules.keys()
    assert "LITELLM_LOCAL_MODEL_COST_MAP" not in os.environ, "importing has no side effect"
    from art_core import TrainableModel
    ART(TrainableModel(name="a", project="p", base_model="x"))
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
