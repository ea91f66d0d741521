"""Graphs under ChatART: who made each call, what survives an interrupt or an odd reply (FRM-03)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, interrupt

from art_core.capture import capture, current_role, role
from art_langgraph import ChatART
from art_langgraph.chat import role_of
from tests.integrations.langgraph_script import (
    Script,
    after_tools,
    captured,
    plain,
    roles,
    served_model,
    stock_model,
    turns,
    w,
    weather,
)
from tests.integrations.odd_ids import ODD_IDS, check_odd_ids
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

ASK = {"messages": [("user", "weather in Oslo?")]}


def by_tools(body: JSON) -> Reply:
    """Whoever has tools calls the first one, then answers."""
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        function = body["tools"][0]["function"]
        (argument,) = function["parameters"]["properties"]
        return Reply(None, [tool_call("c", function["name"], f'{{"{argument}": "Oslo"}}')])
    return Reply("fine")


def pipeline(llm: ChatOpenAI, researcher: Any = None) -> Any:
    """A graph of a sub-agent and a plain node."""

    def writer(state: MessagesState) -> Any:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([("researcher", researcher or create_agent(llm, [w])), ("writer", writer)])
    graph.add_edge(START, "researcher")
    return graph.compile()


def nested(llm: ChatOpenAI) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("team", pipeline(llm))
    graph.add_edge(START, "team")
    return graph.compile()


def supervisor(llm: ChatOpenAI, name: str | None) -> Any:
    expert = create_agent(llm, [w], name="expert" if name else None)

    async def consult(question: str) -> str:
        """Ask an expert."""
        return str((await expert.ainvoke({"messages": [("user", question)]}))["messages"][-1].content)

    return create_agent(llm, [consult], name=name)


ROLES: dict[str, tuple[Any, list[str]]] = {
    "agent": (lambda llm: create_agent(llm, [w]), ["model"] * 2),
    "named agent": (lambda llm: create_agent(llm, [w], name="Ada"), ["Ada"] * 2),
    "react agent": (lambda llm: create_react_agent(llm, [w]), ["agent"] * 2),
    "pipeline": (pipeline, ["researcher", "researcher", "writer"]),
    "named agent in a pipeline": (
        lambda llm: pipeline(llm, create_agent(llm, [w], name="Ünal & Co")),
        ["Ünal & Co", "Ünal & Co", "writer"],
    ),
    "react agent in a pipeline": (
        lambda llm: pipeline(llm, create_react_agent(llm, [w])),
        ["researcher", "researcher", "writer"],
    ),
    "nested": (nested, ["team/researcher", "team/researcher", "team/writer"]),
    "agent as a tool": (lambda llm: supervisor(llm, "boss"), ["boss", "expert", "expert", "boss"]),
    "unnamed agent as a tool": (lambda llm: supervisor(llm, None), ["model", "tools", "tools", "model"]),
}


@pytest.mark.filterwarnings("ignore:.*create_react_agent")
@pytest.mark.parametrize("kind", ROLES)
async def test_each_call_has_the_role_of_the_agent_or_node_that_made_it(kind: str, tmp_path: Path):
    make, expected = ROLES[kind]
    script = Script(by_tools)
    with ScriptedServer(script) as server:
        llm = ChatART(served_model(server, tmp_path))
        with capture() as scope:
            await make(llm).ainvoke(ASK)
            async for _ in make(llm).astream(ASK, stream_mode="messages", subgraphs=True):
                assert current_role() is None
        assert roles(scope) == expected * 2, "also when LangGraph turns a call into a stream"
        assert captured(scope) == script.sampled
        with capture() as scope:
            await make(llm.model_copy(update={"role": "judge"})).ainvoke(ASK)
        assert roles(scope) == ["judge"] * len(expected), "a role given wins"


def test_outside_a_graph_the_role_is_that_of_the_running_code(tmp_path: Path):
    with ScriptedServer(Script([Reply("4")])) as server, capture() as scope:
        llm = ChatART(served_model(server, tmp_path))
        llm.invoke("2+2")
        with role("planner"):
            stream = llm.stream("2+2")
            next(stream)
        list(stream)
        list(llm.stream("2+2", extra_headers={"x-art-role": "by hand"}))
        ChatART(llm.art_model, role="judge").with_structured_output(
            {"title": "T", "type": "object"}, method="json_mode"
        )
        ChatART(llm.art_model, role="judge").batch(["a", "b"])
    assert roles(scope) == [None, "planner", "by hand", "judge", "judge"]


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [("a:1|1|model:2", "a"), ("agent:1", "agent"), ("a:1|b:2|c:3", "a/b/c"), ("", None), ("tools:1|agent:2", "tools")],
)
def test_role_of_a_checkpoint_namespace(namespace: str, expected: str | None):
    assert role_of({"langgraph_checkpoint_ns": namespace}) == expected


async def test_interrupt_and_resume_runs_the_node_again_and_both_calls_are_captured(tmp_path: Path):
    """LangGraph repeats an interrupted node from its start: the model was really asked twice."""

    def build(llm: ChatOpenAI) -> Any:
        def draft(state: MessagesState) -> Any:
            text = llm.invoke(state["messages"])
            return {"messages": [text, ("user", interrupt("publish?"))]}

        graph = StateGraph(MessagesState)
        graph.add_sequence([("draft", draft), ("end", lambda state: {"messages": [llm.invoke(state["messages"])]})])
        graph.add_edge(START, "draft")
        return graph.compile(checkpointer=InMemorySaver())

    async def use(llm: ChatOpenAI) -> Any:
        config: Any = {"configurable": {"thread_id": "1"}}
        graph = build(llm)
        first = await graph.ainvoke(ASK, config)
        assert first["__interrupt__"][0].value == "publish?"
        return plain(await graph.ainvoke(Command(resume="yes"), config))

    replies = [Reply("one"), Reply("two"), Reply("three")]
    with ScriptedServer(Script(replies)) as server:
        expected = await use(stock_model(server))
    script = Script(replies)
    with ScriptedServer(script) as server, capture() as scope:
        assert await use(ChatART(served_model(server, tmp_path))) == expected
    assert captured(scope) == script.sampled
    assert len(script.sampled) == 3
    assert roles(scope) == ["draft", "draft", "end"]


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
def test_frm_03_tool_call_ids_that_are_not_unique(streamed: bool, tmp_path: Path):
    """One id in two turns, twice in one turn, an empty one, none: each result stands behind its own call."""
    script = Script([*(Reply(None, calls) for calls in ODD_IDS), Reply("done")])
    with ScriptedServer(script) as server, capture() as scope:
        graph = create_agent(ChatART(served_model(server, tmp_path)), [w])
        if streamed:
            assert list(graph.stream(ASK, stream_mode="messages"))
        else:
            graph.invoke(ASK)
    check_odd_ids(server.requests[-1]["messages"], scope.trajectory.messages())
    assert captured(scope) == script.sampled


async def test_rollouts_side_by_side_keep_their_turns_apart(tmp_path: Path):
    """One model object, one graph, sub-agents and parallel tools: every turn is in the rollout whose city it is about."""

    def answer(body: JSON) -> Reply:
        city = body["messages"][0]["content"]
        return after_tools(weather(city, f"{city} 2"))(body)

    with ScriptedServer(Script(answer)) as server:
        graph = pipeline(ChatART(served_model(server, tmp_path)))

        async def rollout(number: int) -> Any:
            question = {"messages": [("user", f"city {number}")]}
            with capture() as scope:
                if number % 2:
                    await asyncio.to_thread(graph.invoke, question)
                else:
                    await graph.ainvoke(question)
            return scope

        scopes = await asyncio.gather(*map(rollout, range(24)))
    for number, scope in enumerate(scopes):
        assert roles(scope) == ["researcher", "researcher", "writer"]
        assert len(captured(scope)) == 3
        said = [history.messages()[0]["content"] for history in scope.trajectory.histories()]
        assert said == [f"city {number}"] * 2
    everything = [turn for scope in scopes for turn in turns(scope.trajectory)]
    assert len(set(everything)) == len(everything) == 72
