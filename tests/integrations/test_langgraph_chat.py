"""ChatART as an object: its options, copies, versions, and what importing the package costs."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField
from langchain_openai import ChatOpenAI

import art_langgraph
from art_core import Model, TrainableModel
from art_core.capture import capture
from art_core.errors import ConfigError
from art_langgraph import ChatART, init_chat_model, wrap_rollout
from tests.integrations.langgraph_script import Script, captured, roles, served_model
from tests.scripted_server import Reply, ScriptedServer, tool_call

PACKAGE = Path(art_langgraph.__file__).parent


def test_it_always_samples_from_the_newest_version(tmp_path: Path):
    with ScriptedServer(Script([Reply("4")])) as server, capture():
        model = served_model(server, tmp_path)
        llm = ChatART(model, temperature=0.5, max_tokens=9, model_kwargs={"seed": 1})
        bound = llm.bind(stop=["x"])
        llm.invoke("2+2")
        model.served(4)
        bound.invoke("2+2")
        list(bound.stream("2+2"))
        llm.bind(model=model.get_inference_name(3)).invoke("2+2")
    assert [body["model"] for body in server.requests] == ["agent@3", "agent@4", "agent@4", "agent@3"]
    assert {body["temperature"] for body in server.requests} == {0.5}
    assert {(body["max_completion_tokens"], body["seed"]) for body in server.requests} == {(9, 1)}


async def test_copies_share_the_clients_and_are_captured(tmp_path: Path):
    script = Script([Reply("4")])
    with ScriptedServer(script) as server, capture() as scope:
        llm = ChatART(served_model(server, tmp_path), model_kwargs={"user": "u"})
        deep = copy.deepcopy({"llm": llm, "again": llm})
        assert deep["llm"] is deep["again"]
        assert deep["llm"].model_kwargs is not llm.model_kwargs
        configurable = llm.configurable_fields(
            temperature=ConfigurableField("temperature"),
            model_name=ConfigurableField("model"),
            role=ConfigurableField("r"),
        )
        settings: Any = {"configurable": {"temperature": 0.75, "model": "agent@1", "r": "judge"}}
        copies = [copy.copy(llm), deep["llm"], llm.model_copy(update={"temperature": 0.1}), configurable]
        copies.append(configurable.with_config(settings))
        for each in copies:
            assert (await each.ainvoke("2+2")).content == each.invoke("2+2").content == "4"
    assert captured_without_version(scope) == script.sampled
    assert [body.get("temperature") for body in server.requests[-6:]] == [0.1, 0.1, None, None, 0.75, 0.75]
    assert [body["model"] for body in server.requests[-3:]] == ["agent@3", "agent@1", "agent@1"]
    assert roles(scope)[-3:] == [None, "judge", "judge"]


def captured_without_version(scope: Any) -> Any:
    return [(tuple(c.prompt_token_ids), tuple(c.token_ids)) for call in scope.calls for c in call.choices()]


def test_what_cannot_be_done_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unserved: TrainableModel[Any] = TrainableModel(name="agent", project="p", base_model="x", base_path=tmp_path)
    with pytest.raises(ConfigError, match="agent is not served yet"):
        ChatART(unserved)
    for wrong in (None, "gpt-4.1"):
        with pytest.raises(ConfigError, match=r"write ChatART\(model\)"):
            ChatART(wrong)  # type: ignore[arg-type]
    with ScriptedServer([Reply("4")]) as server:
        model = served_model(server, tmp_path)
        llm = ChatART(model)
        for options in ({"base_url": "http://x"}, {"api_key": "x"}, {"use_responses_api": True}, {"cache": True}):
            with pytest.raises(ConfigError, match=f"{next(iter(options))}: agent itself decides"):
                ChatART(model, **options)
        with pytest.raises(ConfigError, match="cannot be pickled: make one where it is used"):
            pickle.dumps(llm)
        monkeypatch.setenv("OPENAI_PROXY", "http://127.0.0.1:9")
        assert ChatART(model=model).invoke("2+2").content == "4"
    assert "'key'" not in repr(llm)
    assert isinstance(llm, ChatOpenAI)


def test_frm_01_arguments_that_are_nested_too_deep_to_read_are_an_invalid_call(tmp_path: Path):
    deep = "[" * 100_000
    calls = [tool_call("a", "w", deep), tool_call("b", "w", "{}")]
    with ScriptedServer([Reply(None, calls)]) as server:
        message = ChatART(served_model(server, tmp_path)).invoke("2+2")
    assert [(call["id"], call["args"]) for call in message.invalid_tool_calls] == [("a", deep)]
    assert [call["id"] for call in message.tool_calls] == ["b"]


def test_public_surface():
    assert art_langgraph.__all__ == ["ChatART", "init_chat_model", "wrap_rollout"]
    assert all(getattr(art_langgraph, name).__doc__ for name in art_langgraph.__all__)
    assert list(inspect.signature(init_chat_model).parameters) == ["model_name", "options"]
    assert list(inspect.signature(wrap_rollout).parameters) == ["model", "fn"]
    with pytest.raises(AttributeError, match="no attribute 'Chat'"):
        art_langgraph.Chat  # noqa: B018


def test_importing_it_imports_no_framework_and_a_missing_one_is_named():
    code = """
import sys, art_langgraph
heavy = {"langchain_openai", "langchain_core", "langgraph", "openai", "torch", "art_backend", "crewai", "google.adk"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
sys.modules["langchain_openai"] = None
try:
    art_langgraph.ChatART
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingExtraError art_langgraph needs an extra")
    assert "art-plugins[langgraph]" in done.stdout


def test_the_package_is_small_and_knows_no_other_framework():
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    assert sum(len(source.splitlines()) for source in sources) < 250
    for source in sources:
        assert not any(
            f"import {name}" in source or f"from {name}" in source for name in ("crewai", "google", "art_backend")
        )


def test_a_prompted_model_uses_its_own_endpoint(tmp_path: Path):
    with ScriptedServer([Reply("4")]) as server, capture() as scope:
        model: Model[Any] = Model(
            name="m", project="p", base_path=tmp_path, inference_base_url=server.base_url, inference_api_key="k"
        )
        assert ChatART(model).invoke("2+2").content == "4"
    assert server.headers[0]["authorization"] == "Bearer k"
    assert len(scope.calls) == 1


async def test_two_event_loops_and_threads_share_one_model(tmp_path: Path):
    import asyncio

    script = Script([Reply("4")])
    with ScriptedServer(script) as server, capture() as scope:
        llm = ChatART(served_model(server, tmp_path))
        await llm.ainvoke("2+2")
        await asyncio.to_thread(lambda: asyncio.run(llm.ainvoke("2+2")))  # type: ignore[arg-type]
        await llm.ainvoke("2+2")
    assert captured(scope) == script.sampled
