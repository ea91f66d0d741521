"""Everything ChatOpenAI does, done by ChatART on the same script: the same results, and every sampled turn captured."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Send
from pydantic import BaseModel

from art_core.capture import capture
from art_langgraph import ChatART
from tests.integrations.langgraph_script import (
    SOON,
    Script,
    add,
    after_tools,
    asked,
    captured,
    plain,
    served_model,
    stock_model,
    w,
    weather,
)
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

Use = Callable[[ChatOpenAI], Awaitable[Any]]
ASK = {"messages": [("user", "weather in Oslo and Bern?")]}


class Ans(BaseModel):
    """An answer."""

    n: int


def text(body: JSON) -> Reply:
    return Reply(f"answer to {body['messages'][-1]['content']}", reasoning="hm")


def structured(body: JSON) -> Reply:
    return Reply(None, [tool_call("c", "Ans", '{"n": 4}')]) if body.get("tools") else Reply('{"n": 4}')


async def results(stream: Any) -> list[Any]:
    return [part async for part in stream]


def ordinary() -> dict[str, tuple[Any, Use]]:
    """name -> script and use."""

    async def invoke(llm: ChatOpenAI) -> Any:
        return llm.invoke("2+2", temperature=0.3, stop=["x"])

    async def ainvoke(llm: ChatOpenAI) -> Any:
        return await llm.ainvoke([("system", "be brief"), ("user", "2+2")])

    async def stream(llm: ChatOpenAI) -> Any:
        return list(llm.stream("2+2"))

    async def astream(llm: ChatOpenAI) -> Any:
        return await results(llm.astream("2+2"))

    async def usage(llm: ChatOpenAI) -> Any:
        return list(llm.stream("2+2", stream_usage=True))

    async def batch(llm: ChatOpenAI) -> Any:
        return [*llm.batch(["a", "b", "c"]), *await llm.abatch(["d", "e", "f"])]

    async def lcel(llm: ChatOpenAI) -> Any:
        chain = ChatPromptTemplate.from_messages([("user", "{q}")]) | llm.bind(max_tokens=5) | StrOutputParser()
        return [chain.invoke({"q": "1"}), await chain.ainvoke({"q": "2"}), *chain.stream({"q": "3"})]

    async def parallel(llm: ChatOpenAI) -> Any:
        both = RunnableParallel(a=RunnableLambda(str.upper) | llm, b=llm, c=RunnableLambda(llm.invoke))
        return [both.invoke("x"), await both.ainvoke("y")]

    async def events(llm: ChatOpenAI) -> Any:
        return [event["event"] async for event in llm.astream_events("2+2", version="v2")]

    uses = (invoke, ainvoke, stream, astream, usage, batch, lcel, parallel, events)
    return {use.__name__: (text, use) for use in uses}


def tools() -> dict[str, tuple[Any, Use]]:
    def binding(reply: Reply, **options: Any) -> tuple[Any, Use]:
        async def use(llm: ChatOpenAI) -> Any:
            bound = llm.bind_tools([w, add], **options)
            return [bound.invoke("?"), await bound.ainvoke("?"), *bound.stream("?"), *await results(bound.astream("?"))]

        return [reply], use

    odd = Reply(
        None, [tool_call("a", "w", '{"city":'), tool_call("b", "w", '{"city": "Oslo"}'), tool_call("c", "w", "")]
    )
    return {
        "tools_auto": binding(weather("Oslo", text="let me see")),
        "tools_forced": binding(weather("Oslo"), tool_choice="w"),
        "tools_any": binding(weather("Oslo"), tool_choice="any", parallel_tool_calls=False),
        "tools_strict": binding(weather("Oslo"), strict=True),
        "tools_parallel": binding(weather("Oslo", "Bern")),
        "tools_malformed": binding(odd),
    }


def structures() -> dict[str, tuple[Any, Use]]:
    """CAP-01 a and b, and what else there is."""

    def method(name: Any, schema: Any, raw: bool) -> Use:
        async def use(llm: ChatOpenAI) -> Any:
            shaped = llm.with_structured_output(schema, method=name, include_raw=raw)
            streamed = list(shaped.stream("2+2"))
            if raw:  # `parsed` and `parsing_error` come from branches that run side by side
                streamed.sort(key=list)
            return [shaped.invoke("2+2"), await shaped.ainvoke("2+2"), *streamed]

        return use

    return {
        f"cap_01_{name}_{kind}{'_raw' * raw}": (structured, method(name, schema, raw))
        for name in ("json_schema", "function_calling", "json_mode")
        for kind, schema in (("model", Ans), ("dict", {"title": "Ans", **Ans.model_json_schema()}))
        for raw in (False, True)
    }


def failures() -> dict[str, tuple[Any, Use]]:
    async def invoke(llm: ChatOpenAI) -> Any:
        return [llm.invoke("2+2"), *llm.stream("2+2")]

    async def ainvoke(llm: ChatOpenAI) -> Any:
        return [await llm.ainvoke("2+2"), *await results(llm.astream("2+2"))]

    async def with_retry(llm: ChatOpenAI) -> Any:
        retried = llm.with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
        return [retried.invoke("2+2"), await retried.ainvoke("2+2")]

    async def with_fallbacks(llm: ChatOpenAI) -> Any:
        return llm.bind(model="agent").with_fallbacks([llm.bind(max_tokens=9)]).invoke("2+2")

    async def overflow(llm: ChatOpenAI) -> Any:
        raised = []
        for call in (llm.invoke, llm.bind_tools([w]).invoke, lambda q: list(llm.stream(q))):
            with pytest.raises(Exception, match="scripted failure") as caught:
                call("2+2")
            raised.append(caught.value)
        return raised

    busy, broken = Reply(status=429, headers=SOON), Reply(status=500, headers=SOON)
    long, bad = Reply(status=400, code="context_length_exceeded"), Reply(status=400)
    return {
        "retries": ([busy, broken, Reply("4"), Reply(status=503, headers=SOON), Reply("5")], invoke),
        "retries_async": ([busy, broken, Reply("4"), Reply(status=503, headers=SOON), Reply("5")], ainvoke),
        "with_retry": ([bad, bad, Reply("4"), bad, Reply("5")], with_retry),
        "with_fallbacks": ([bad, Reply("4")], with_fallbacks),
        "context_overflow": ([long], overflow),
    }


def graphs() -> dict[str, tuple[Any, Use]]:
    def agent(make: Callable[[ChatOpenAI], Any]) -> Use:
        async def use(llm: ChatOpenAI) -> Any:
            graph = make(llm)
            modes: Any = ["messages", "values"]
            return [
                graph.invoke(ASK),
                await graph.ainvoke(ASK),
                [part for mode, part in graph.stream(ASK, stream_mode=modes) if mode == "values"][-1],
                [part async for mode, part in graph.astream(ASK, stream_mode=modes) if mode == "values"][-1],
            ]

        return use

    def plain_graph(llm: ChatOpenAI) -> Any:
        bound = llm.bind_tools([w])
        graph = StateGraph(MessagesState)
        graph.add_node("think", lambda state: {"messages": [bound.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode([w]))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", tools_condition)
        graph.add_edge("tools", "think")
        return graph.compile()

    def summarising(llm: ChatOpenAI) -> Any:
        def think(state: MessagesState) -> Any:
            from langchain_core.messages import trim_messages

            kept = trim_messages(state["messages"], max_tokens=2, token_counter=len, strategy="last")
            return {"messages": [llm.invoke([("system", f"round {len(state['messages'])}"), *kept])]}

        graph = StateGraph(MessagesState)
        for name in "abc":
            graph.add_node(name, think)
        for start, end in ((START, "a"), ("a", "b"), ("b", "c"), ("c", END)):
            graph.add_edge(start, end)
        return graph.compile()

    plans = after_tools(weather("Oslo", "Bern", text="let me see"), weather("Lima"))
    return {
        "create_agent": (plans, agent(lambda llm: create_agent(llm, [w], system_prompt="be brief"))),
        "create_react_agent": (plans, agent(lambda llm: create_react_agent(llm, [w]))),
        "state_graph": (plans, agent(plain_graph)),
        "trimmed_history": (text, agent(summarising)),
        "agent_structured": (structured, agent(lambda llm: create_agent(llm, [], response_format=Ans))),
        "send": (text, parallel_nodes),
        "tool_threads": (text, llm_in_tools),
    }


async def parallel_nodes(llm: ChatOpenAI) -> Any:
    class State(TypedDict):
        topics: list[str]
        jokes: Annotated[list[str], operator.add]

    graph = StateGraph(State)
    graph.add_node("plan", lambda state: {})
    graph.add_node("joke", lambda topic: {"jokes": [llm.invoke(topic).content]})  # type: ignore[arg-type]
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda state: [Send("joke", topic) for topic in state["topics"]], ["joke"])
    compiled: Any = graph.compile()
    topics = {"topics": [f"t{number}" for number in range(8)], "jokes": []}
    return [compiled.invoke(topics), await compiled.ainvoke(topics)]


async def llm_in_tools(llm: ChatOpenAI) -> Any:
    """Tools of a parallel turn run in threads and ask the model themselves."""

    def ask(question: str) -> str:
        """Ask somebody."""
        return str(llm.invoke(question).content)

    calls = [
        {"name": "ask", "args": {"question": f"q{number}"}, "id": f"c{number}", "type": "tool_call"}
        for number in range(6)
    ]
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([ask]))
    graph.add_edge(START, "tools")
    turn = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    compiled: Any = graph.compile()
    return [compiled.invoke(turn), await compiled.ainvoke(turn)]


MATRIX = {**ordinary(), **tools(), **structures(), **failures(), **graphs()}
UNORDERED = {"batch", "parallel", "send", "tool_threads"}


@pytest.mark.filterwarnings("ignore:.*create_react_agent")
@pytest.mark.parametrize("name", MATRIX)
async def test_results_are_those_of_chat_openai_and_every_turn_is_captured(name: str, tmp_path: Path):
    answer, use = MATRIX[name]
    with ScriptedServer(Script(answer)) as server:
        expected, expected_requests = plain(await use(stock_model(server))), asked(server)
    script = Script(answer)
    with ScriptedServer(script) as server:
        llm = ChatART(served_model(server, tmp_path))
        with capture() as scope:
            got = plain(await use(llm))
        assert asked(server) == expected_requests
        assert {body["model"] for body in server.requests} == {"agent@3"}
        assert not any(header.startswith("x-art") for headers in server.headers for header in headers)
    if name not in UNORDERED:  # else which question got which ids is chance
        assert got == expected
        assert captured(scope) == script.sampled
    assert sorted(captured(scope)) == sorted(script.sampled)
    assert len(scope.failed_calls) == len(server.requests) - len(script.sampled)


async def test_cap_02_what_langchain_drops_is_captured(tmp_path: Path):
    with ScriptedServer([Reply("4", [], "add", [5, 2], [-0.5, -0.1], [1, 2])]) as server, capture() as scope:
        message = ChatART(served_model(server, tmp_path)).invoke("2+2")
    assert message.additional_kwargs == {"refusal": None}
    (choice,) = scope.trajectory.choices()
    assert (choice.token_ids, choice.prompt_token_ids, choice.message.reasoning_content) == ([5, 2], [1, 2], "add")
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -0.1]


async def test_cap_04_a_stream_that_is_left_early_is_flagged(tmp_path: Path):
    with ScriptedServer(Script([Reply("a long answer", chunk_delay=0.02)])) as server:
        llm = ChatART(served_model(server, tmp_path))
        with capture() as scope:
            for chunk in llm.stream("2+2"):
                if chunk.content:
                    break
            stream = llm.astream("2+2")
            async for chunk in stream:
                if chunk.content:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            whole = llm.invoke("2+2")
    assert whole.content == "a long answer"
    statuses = [(choice.status, choice.message.content) for call in scope.calls for choice in call.choices()]
    assert [status for status, _ in statuses] == ["aborted", "aborted", "complete"]
    assert all(content and "a long answer".startswith(content) for _, content in statuses)


def test_cap_06_the_rollouts_own_thread_pool_needs_its_context(tmp_path: Path):
    with ScriptedServer(Script(text)) as server:
        llm = ChatART(served_model(server, tmp_path))

        def in_scope(question: str) -> Any:
            with scope.activate():
                return llm.invoke(question)

        with capture() as scope, ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(in_scope, ["a", "b", "c"]))
    assert [answer.content for answer in answers] == ["answer to a", "answer to b", "answer to c"]
    assert len(captured(scope)) == 3
