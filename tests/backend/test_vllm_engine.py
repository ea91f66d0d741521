"""Everything around vLLM with a scripted server under its name: processes, restarts, names, leases, errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError

import art_core as art
from art_backend import AdapterConfig, LocalBackend
from art_backend.vllm import VLLMEngine, VLLMOptions, find_interpreter
from art_backend.vllm.command import rank_for
from art_backend.vllm.interpreter import VARIABLE
from art_backend.vllm.waiting import phase
from art_core.errors import ConfigError, EngineError

FAKE = Path(__file__).parent / "vllm_fake"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """The scripted server in place of vLLM; the function sets its faults."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM_ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("FAKE_VLLM_DEAD", str(tmp_path / "dead"))
    return lambda names: monkeypatch.setenv("FAKE_VLLM", names)


def make(base: Path, tmp_path: Path, **options: Any) -> VLLMEngine:
    settings: dict[str, Any] = {"python": sys.executable, "log_file": tmp_path / "vllm.log", "max_model_len": 512}
    return VLLMEngine(str(base), **(settings | options))


@asynccontextmanager
async def running(base: Path, tmp_path: Path, **options: Any) -> AsyncIterator[tuple[VLLMEngine, AsyncOpenAI]]:
    engine = make(base, tmp_path, **options)
    await engine.start()
    try:
        async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=4) as client:
            yield engine, client
    finally:
        await engine.close()


def adapter(folder: Path, r: int = 4) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": r}))
    return folder


async def say(client: AsyncOpenAI, text: str, model: str = "agent", **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model=model, messages=messages, **options)


def processes(engine: VLLMEngine) -> list[psutil.Process]:
    server = engine._running()._server
    assert server is not None
    return [process for process in psutil.process_iter() if _group(process.pid) == server.group]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


async def until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
            await asyncio.sleep(0.1)


def gone(found: list[psutil.Process], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in found):
            return True
        time.sleep(0.1)
    return False


async def test_srv_01_each_step_has_its_name_and_leases(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@0", None)
        assert (await say(client, "x")).model == "agent@0"
        await engine.publish("agent@1", adapter(tmp_path / "a1"))
        await engine.publish("agent@1", tmp_path / "a1")
        assert (await say(client, "x")).model == "agent@1"
        with pytest.raises(EngineError, match="served already with other weights"):
            await engine.publish("agent@1", adapter(tmp_path / "other"))
        old = asyncio.ensure_future(say(client, "wait 1.5"))
        await asyncio.sleep(0.5)
        await engine.publish("agent@2", adapter(tmp_path / "a2"))
        assert (await say(client, "x")).model == "agent@2"
        retiring = asyncio.ensure_future(engine.retire("agent@1"))
        await asyncio.sleep(0.3)
        assert not retiring.done()
        with pytest.raises(NotFoundError, match="served: agent@0, agent@2"):
            await say(client, "x", "agent@1")
        await retiring
        assert old.done()
        assert (await old).model == "agent@1"
        log = (tmp_path / "vllm.log").read_text()
        assert log.index("loaded agent@1") < log.index("loaded agent@2") < log.index("unloaded agent@1")
        assert (await say(client, "x", "agent@0")).model == "agent@0"


async def test_rollout_urls_keys_streams_and_tools(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@3", None)
        stream = await say(client, "one two three", stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["one", "two", "three"]
        assert {chunk.model for chunk in chunks} == {"agent@3"}
        text = 'So <tool_call>{"name": "f", "arguments": {"a":1}}</tool_call>'
        reply = await say(client, text, tools=tools)
        assert reply.choices[0].message.content == "So "
        assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'
        assert reply.choices[0].finish_reason == "tool_calls"
        parts = [chunk async for chunk in await say(client, text, tools=tools, stream=True)]
        assert parts[0].choices[0].delta.tool_calls[0].function.arguments == '{"a":1}'
        assert (await say(client, text)).choices[0].message.content == text
        seen = json.loads((await say(client, "seen", tools=tools, max_tokens=9999)).choices[0].message.content)
        assert (seen["model"], seen["tool_choice"], seen["max_tokens"]) == ("art-base-model", "none", 512)
        with pytest.raises(BadRequestError) as caught:
            await say(client, "x" * 1001)
        assert caught.value.code == "context_length_exceeded"
        root = engine.base_url.removesuffix("/v1")
        async with AsyncOpenAI(base_url=f"{root}/rollouts/r1/v1", api_key=engine.api_key) as rollout:
            assert (await say(rollout, "x")).model == "agent@3"
        async with httpx.AsyncClient(base_url=root) as stranger:
            for path in ("/v1/chat/completions", "/art/names", "/metrics", "/v1/load_lora_adapter"):
                assert (await stranger.post(path, json={})).status_code == 401


@pytest.mark.parametrize(
    ("parser", "text", "fix"),
    [
        (None, '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "tool_call_parser='mistral'"),
        ("mistral", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "leave tool_call_parser out"),
    ],
)
async def test_a_tool_parser_that_does_not_fit_is_reported_once(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    parser: str | None, text: str, fix: str,
) -> None:  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    async with running(tiny_llama, tmp_path, tool_call_parser=parser) as (engine, client):
        await engine.publish("agent@1", None)
        for _ in range(6):
            assert not (await say(client, text, tools=tools)).choices[0].message.tool_calls
        await until(lambda: any(fix in record.getMessage() for record in caplog.records))
        await asyncio.sleep(2.5)
        assert sum("does not fit" in record.getMessage() for record in caplog.records) == 1


async def test_a_killed_server_is_replaced_and_requests_are_answered(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@1", adapter(tmp_path / "a1"))
        url, old = engine.base_url, processes(engine)
        assert len(old) == 3
        asking = [asyncio.ensure_future(say(client, "wait 1")) for _ in range(8)]
        await asyncio.sleep(0.5)
        os.kill(old[1].pid, signal.SIGKILL)
        late = [asyncio.ensure_future(say(client, "x")) for _ in range(8)]
        answers = await asyncio.wait_for(asyncio.gather(*asking, *late), 60)
        assert {answer.model for answer in answers} == {"agent@1"}
        assert (engine.restarts, engine.base_url) == (1, url)
        assert gone(old)


async def test_a_guard_that_is_killed_takes_the_server_along(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@1", None)
        old = processes(engine)
        os.kill(old[0].pid, signal.SIGKILL)
        assert (await say(client, "x")).model == "agent@1"
        assert gone(old)


async def test_requests_to_a_server_whose_engine_died_wait_for_the_next_one(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    """Such a server answers 500 to whoever asks again; a client would give up long before the next one has loaded."""
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@1", None)
        impatient = client.with_options(max_retries=2)  # one for the lost connection, one for the wait
        asking = asyncio.ensure_future(say(impatient, "break"))
        assert (await asking).model == "agent@1"
        assert engine.restarts == 1
        assert (await say(impatient, "x")).model == "agent@1"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "stuck", "dead"])
async def test_a_hanging_server_is_replaced(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path, how: str
) -> None:
    async with running(tiny_llama, tmp_path, hang_timeout=2.0) as (engine, client):
        await engine.publish("agent@1", None)
        if how == "stopped":  # does not answer at all; its last breath must not be waited for
            os.kill(processes(engine)[1].pid, signal.SIGSTOP)
        elif how == "stuck":  # answers, but computes nothing
            hanging = asyncio.ensure_future(say(client, "hang", timeout=60))
        else:  # says itself that its engine died
            (tmp_path / "dead").touch()
        await until(lambda: engine.restarts == 1)
        (tmp_path / "dead").unlink(missing_ok=True)
        if how == "stuck":
            hanging.cancel()
        assert (await say(client, "x")).model == "agent@1"
        assert engine.restarts == 1


@pytest.mark.parametrize("fault", ["die_on_load", "engine_dies_on_load"])
@pytest.mark.timeout(60)
async def test_a_server_that_dies_while_it_swaps_serves_the_new_adapter_afterwards(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path, fault: str
) -> None:
    """Also where the engine dies behind an HTTP server that lives on, and never answers the order to load."""
    faults(fault)
    async with running(tiny_llama, tmp_path) as (engine, client):
        await engine.publish("agent@0", None)
        await engine.publish("agent@1", adapter(tmp_path / "a1"))
        assert engine.restarts == 1
        assert [(await say(client, "x", name)).model for name in ("agent", "agent@0")] == ["agent@1", "agent@0"]


async def test_a_server_that_cannot_come_back_is_an_error_not_a_wait(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    async with running(tiny_llama, tmp_path) as (engine, _):
        server = engine._running()._server
        assert server is not None

        def no_room() -> Any:
            raise EngineError("no room")

        engine._running()._spawn = no_room
        os.killpg(server.group, signal.SIGKILL)
        await until(lambda: engine.restarts == 1)
        with pytest.raises(EngineError, match="could not be started again: no room"):
            await engine.publish("agent@1", None)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_token_ids", "return_token_ids"),
        ("no_logprobs", "logprobs"),
        ("other_model", "serves /elsewhere instead"),
        ("no_start", "the weights are made of cheese"),
    ],
)
async def test_srv_03_what_is_missing_is_said_at_the_start(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path, fault: str, words: str
) -> None:
    faults(fault)
    engine = make(tiny_llama, tmp_path)
    with pytest.raises(EngineError, match=words):
        await engine.start()
    with pytest.raises(EngineError, match="not running"):
        await engine.publish("agent@0", None)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("no_lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), ("refuse", r"max_lora_rank 16.*--max-lora-rank")],
)
async def test_srv_03_a_refused_adapter_is_not_published(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path, fault: str, words: str
) -> None:
    faults(fault)
    async with running(tiny_llama, tmp_path, max_adapters=1) as (engine, client):
        await engine.publish("agent@0", None)
        with pytest.raises(EngineError, match=words):
            await engine.publish("agent@1", adapter(tmp_path / "a1"))
        assert (await say(client, "x")).model == "agent@0"
        assert engine.restarts == 0
        with pytest.raises(EngineError, match=r"rank 64, the engine takes 16.*max_lora_rank=64"):
            await engine.publish("agent@1", adapter(tmp_path / "a64", r=64))
        with pytest.raises(EngineError, match="no PEFT adapter"):
            await engine.publish("agent@1", tmp_path)


async def test_no_more_adapters_than_said(faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path) -> None:
    async with running(tiny_llama, tmp_path, max_adapters=1) as (engine, _):
        await engine.publish("agent@1", adapter(tmp_path / "a1"))
        with pytest.raises(EngineError, match="retire one"):
            await engine.publish("agent@2", adapter(tmp_path / "a2"))
        await engine.retire("agent@1")
        await engine.publish("agent@2", tmp_path / "a2")


PARENT = """
import asyncio, sys
from art_backend.vllm import VLLMEngine
async def main():
    engine = VLLMEngine(sys.argv[1], python=sys.executable, log_file=sys.argv[2], max_model_len=512)
    await engine.start()
    print(engine._running()._server.group, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_parent_killed_with_9_leaves_no_orphan(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_llama), str(tmp_path / "vllm.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        children = [process for process in psutil.process_iter() if _group(process.pid) == group]
        assert len(children) == 3
        parent.kill()
    assert gone(children)


def test_which_python_has_vllm(faults: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    found = find_interpreter()
    assert found is not None
    assert (found.version, found.cpu_build, found.origin) == ("0.99+cpu", True, "this environment")
    private = tmp_path / "art-plugins" / "vllm"
    (private / "bin").mkdir(parents=True)
    (private / "bin" / "python").symlink_to(sys.executable)
    assert find_interpreter() == found  # not made to the end
    (private / "complete").touch()
    again = find_interpreter()
    assert again is not None
    assert again.origin == "private environment"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=r"has no vLLM.*art vllm install"):
        find_interpreter()
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert find_interpreter() is None


def test_mistakes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1000"):
        VLLMEngine("x", max_lora_rank=1000)
    with pytest.raises(ConfigError, match="max_batch_size"):
        VLLMEngine("x", max_batch_size=0)
    assert [rank_for(r) for r in (1, 4, 16, 17, 512)] == [1, 8, 16, 32, 512]


async def test_the_engines_own_arguments_stay_its_own(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--port in extra_args"):
        await make(tiny_llama, tmp_path, extra_args=("--port=1",)).start()


def test_an_engine_says_what_it_waits_for() -> None:
    assert phase([]) == "importing"
    assert phase(["INFO Loading weights took 3 s"]) == "loading weights"
    assert phase(["Loading weights", "GPU KV cache size: 5"]) == "making its cache"


async def test_stand_in_gives_up_holding(monkeypatch: pytest.MonkeyPatch) -> None:
    from art_backend.vllm import standin

    monkeypatch.setattr(standin, "HOLD_SECONDS", 0.3)
    held = standin.StandIn("127.0.0.1")
    held.open()
    try:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{held.port}/v1", api_key="x", max_retries=1) as client:
            started = time.monotonic()
            with pytest.raises(InternalServerError, match="restarts"):
                await say(client, "x" * 200_000)
            assert time.monotonic() - started > 0.6
    finally:
        held.release()
    with pytest.raises(EngineError, match="cannot listen"):
        standin.StandIn("192.0.2.1")


async def test_a_run_is_resumed_with_an_adapter_of_higher_rank_than_that_of_new_ones(
    faults: Callable[[str], None], tiny_llama: Path, tmp_path: Path
) -> None:
    def agent() -> art.TrainableModel:
        return art.TrainableModel(name="agent", project="p", base_model=str(tiny_llama), base_path=tmp_path)

    async with LocalBackend(engine="transformers", adapter=AdapterConfig(r=32, alpha=32)) as wide:
        await agent().register(wide)
    options = VLLMOptions(python=sys.executable, log_file=tmp_path / "vllm.log")
    async with LocalBackend(engine=options, adapter=AdapterConfig(r=4, alpha=8)) as local:
        await agent().register(local)
