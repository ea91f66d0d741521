"""MCP-02, MCP-04 (5), MCP-06 and the safety filters, against real servers over memory, stdio, HTTP and SSE."""

import asyncio
import contextlib
import json
import logging
import random
import shlex
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from fastmcp import FastMCP
from fastmcp.utilities.tests import run_server_async

from art_core.errors import ConfigError, ServerError
from mcp_rl.client import MCPServer
from mcp_rl.target import Transport, parse_target

# Streams and sockets that the SDK and the in-process test servers leave to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

SERVERS = Path(__file__).parent / "servers"
ECHO = {"name": "echo", "inputSchema": {"type": "object"}}


def named(*names):
    return [{**ECHO, "name": name} for name in names]


def raw(**script):
    return shlex.join([sys.executable, str(SERVERS / "raw.py"), json.dumps(script)])


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def boom() -> str:
    raise ValueError("kaput")


def adder():
    server = FastMCP("adder", version="3")
    server.tool(add)
    server.tool(boom)
    return server


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def answering(head, body=b""):
    """An HTTP server that gives every request the same answer."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head + length.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


@contextlib.asynccontextmanager
async def slow_http(port, transport="http"):
    """`slow_http.py` as a process; the process is what the context gives."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVERS / "slow_http.py"), str(port), transport, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def children():
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


async def test_memory_server():
    async with MCPServer(adder()) as server:
        assert (server.name, server.version, server.transport) == ("adder", "3", "memory")
        assert [tool.name for tool in server.tools] == ["add", "boom"]
        assert (await server.call("add", {"a": 1, "b": 2})).text == "3"
        failed = await server.call("boom", {})
        assert failed.is_error
        assert "kaput" in failed.text
        unknown = await server.call("ad", {})
        assert unknown.is_error
        assert unknown.text == "There is no tool 'ad'. The tools are: add, boom."
    assert server.calls == {"add": 1, "boom": 1}
    assert server.errors == {"boom": 1}


async def test_calls_of_one_session_run_side_by_side():
    async with MCPServer(raw(tools=named("sleep"))) as server, server.session() as session:
        started = time.perf_counter()
        results = await asyncio.gather(*(session.call("sleep", {"seconds": 0.3}) for _ in range(10)))
        assert {result.text for result in results} == {"slept 0.3"}
        assert time.perf_counter() - started < 1.5


async def test_isolated_sessions_have_their_own_process():
    async with MCPServer(raw(tools=named("count", "pid"))) as server:
        async with server.session() as one, server.session() as two, server.session(isolate=True) as alone:
            assert [(await session.call("count", {})).text for session in (one, two, alone)] == ["1", "2", "1"]
            pid = int((await alone.call("pid", {})).text)
        assert not psutil.pid_exists(pid)
    assert server.calls == {"count": 3, "pid": 1}


async def test_mcp_04_5_declared_output_without_structured_content(caplog):
    tools = [{**ECHO, "outputSchema": {"type": "object", "required": ["x"]}}]
    async with MCPServer(raw(tools=tools, results={"echo": {"content": [{"type": "text", "text": "hi"}]}})) as server:
        for _ in range(2):
            result = await server.call("echo", {})
            assert (result.text, result.is_error) == ("hi", False)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "tool 'echo' declares structured output but sent none; its text is used"
    ]


async def test_mcp_04_structured_content_that_breaks_its_schema_is_passed_on():
    tools = [{**ECHO, "outputSchema": {"type": "object", "required": ["x"]}}]
    results = {"echo": {"content": [], "structuredContent": {"y": 1}}}
    async with MCPServer(raw(tools=tools, results=results)) as server:
        assert (await server.call("echo", {})).text == '{"y":1}'


async def test_protocol_error_of_a_tool_is_a_result():
    async with MCPServer(raw(tools=named("refuse"))) as server:
        result = await server.call("refuse", {})
        assert (result.text, result.is_error) == ("no such luck", True)
        assert server.errors == {"refuse": 1}


async def test_malformed_reply_is_an_error_of_the_tool():
    results = {"echo": {"content": [{"type": "nonsense"}]}}
    async with MCPServer(raw(tools=named("echo", "pid"), results=results)) as server:
        pid = (await server.call("pid", {})).text
        assert (await server.call("echo", {})).is_error
        assert (await server.call("pid", {})).text == pid


@pytest.mark.parametrize("script", [{}, {"tools": []}])
async def test_mcp_06_a_f_no_tools(script):
    with pytest.raises(ServerError, match="the server offers no tools"):
        await MCPServer(raw(**script)).__aenter__()
    assert children() == []


async def test_mcp_06_b_trailing_slash():
    async with run_server_async(adder()) as url:
        for address in (url, url + "/"):
            async with MCPServer(address) as server:
                assert server.transport == "http"
                assert (await server.call("add", {"a": 1, "b": 2})).text == "3"


async def test_mcp_06_c_output_that_is_not_mcp(caplog, capfd):
    spec = raw(tools=named("chatter"), banner="Server starting", stderr="noise")
    async with MCPServer(spec) as server:
        for _ in range(3):
            assert (await server.call("chatter", {})).text == "still here"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "'Server starting'" in warnings[0]
    out, err = capfd.readouterr()
    assert "noise" not in out + err
    assert "Traceback" not in out + err


async def refusal(spec, connect_timeout=5):
    """The message of the ServerError on entering, which must come in time (ending a process may take 2 s more)."""
    started = time.perf_counter()
    with pytest.raises(ServerError) as caught:
        await MCPServer(spec, connect_timeout=connect_timeout).__aenter__()
    assert time.perf_counter() - started < connect_timeout + 2.5
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


async def test_mcp_06_d_closed_port():
    url = f"http://127.0.0.1:{free_port()}/mcp"
    message = await refusal(url)
    assert url in message
    assert "cannot connect" in message


async def test_mcp_06_e_unauthorized():
    async with answering(b"HTTP/1.1 401 Unauthorized\r\n") as url:
        message = await refusal(url)
    assert url in message
    assert "401" in message
    assert "ART_MCP_TOKEN" in message


async def test_mcp_06_g_html_page():
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n", b"<html></html>") as url:
        message = await refusal(url)
    assert url in message
    assert "text/html" in message


async def test_mcp_06_h_sse():
    async with run_server_async(adder(), transport="sse", path="/sse") as url, MCPServer(url) as server:
        assert server.transport == "sse"
        assert (await server.call("add", {"a": 1, "b": 2})).text == "3"


async def test_mcp_06_stdio_server_that_dies_says_why():
    message = await refusal(raw(die=True, stderr="API_KEY is not set"))
    assert "API_KEY is not set" in message
    assert children() == []


async def test_mcp_06_silent_process():
    message = await refusal("sleep 100", connect_timeout=1)
    assert "no answer within 1 s" in message
    assert children() == []


async def test_token_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("ART_MCP_TOKEN", "s3cret")
    target = parse_target("https://user:pw@example.invalid/mcp?key=s3cret")
    assert target.headers == {"Authorization": "Bearer s3cret"}
    assert target.label == "https://example.invalid/mcp"


async def test_crash_fails_the_call_at_once_and_the_next_reconnects():
    async with MCPServer(raw(tools=named("crash", "pid"))) as server:
        first = (await server.call("pid", {})).text
        started = time.perf_counter()
        with pytest.raises(ServerError, match="during a call of 'crash'"):
            await server.call("crash", {})
        assert time.perf_counter() - started < 5
        second = (await server.call("pid", {})).text
        assert second != first
    assert server.errors == {"crash": 1}
    assert children() == []


async def test_process_killed_between_calls():
    async with MCPServer(raw(tools=named("pid"))) as server:
        pid = int((await server.call("pid", {})).text)
        psutil.Process(pid).kill()
        await asyncio.sleep(0.3)
        with contextlib.suppress(ServerError):
            await server.call("pid", {})
        assert int((await server.call("pid", {})).text) != pid


async def test_hanging_call_fails_alone():
    async with MCPServer(raw(tools=named("sleep", "echo")), call_timeout=1) as server:
        neighbour = asyncio.create_task(server.call("sleep", {"seconds": 0.8}))
        with pytest.raises(ServerError, match="within 1 s"):
            await server.call("sleep", {"seconds": 60})
        assert (await neighbour).text == "slept 0.8"
        assert (await server.call("echo", {"a": 1})).text == '{"a": 1}'
    assert children() == []


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_http_server_lost_during_a_call_and_back(transport):
    port = free_port()
    path = "mcp" if transport == "http" else "sse"
    async with contextlib.AsyncExitStack() as stack:
        async with slow_http(port, transport) as process:
            server = MCPServer(f"http://127.0.0.1:{port}/{path}", call_timeout=30, connect_timeout=10)
            await stack.enter_async_context(server)
            assert (await server.call("sleep", {"seconds": 0})).text == "slept 0.0"
            call = asyncio.create_task(server.call("sleep", {"seconds": 20}))
            await asyncio.sleep(0.5)
            process.kill()
            started = time.perf_counter()
            with pytest.raises(ServerError):
                await call
            assert time.perf_counter() - started < 10
        with pytest.raises(ServerError, match="cannot connect"):
            await server.call("sleep", {"seconds": 0})
        async with slow_http(port, transport):
            assert (await server.call("sleep", {"seconds": 0})).text == "slept 0.0"


@pytest.mark.slow
async def test_http_server_restarted_between_calls():
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        async with slow_http(port):
            server = MCPServer(f"http://127.0.0.1:{port}/mcp", call_timeout=30)
            await stack.enter_async_context(server)
        async with slow_http(port):
            with contextlib.suppress(ServerError):
                await server.call("sleep", {"seconds": 0})
            assert (await server.call("sleep", {"seconds": 0})).text == "slept 0.0"


async def churn(url, rounds):
    """MCP-02: eight sessions, one cancelled, one raising, closed in random order."""
    chance = random.Random(rounds)
    stdio = raw(tools=named("echo", "sleep"))

    async def rollout(index, spec, tool, arguments, leave):
        async with MCPServer(spec) as server, server.session() as session:
            if index == 3:
                await session.call("sleep", {"seconds": 60})
            result = await session.call(tool, arguments)
            if index == 5:
                raise LookupError("own error")
            await asyncio.sleep(leave)
            return result.text

    for _ in range(rounds):
        tasks = [
            asyncio.create_task(rollout(i, stdio, "echo", {"i": i}, chance.random() / 5))
            if i % 2
            else asyncio.create_task(rollout(i, url, "add", {"a": i, "b": 0}, chance.random() / 5))
            for i in range(8)
        ]
        await asyncio.sleep(chance.random())
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[3], asyncio.CancelledError)
        assert isinstance(results[5], LookupError)
        assert [results[i] for i in (0, 2, 4, 6)] == ["0", "2", "4", "6"]
        assert [results[i] for i in (1, 7)] == ['{"i": 1}', '{"i": 7}']


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_mcp_02_sessions_opened_and_closed_in_any_order(rounds):
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    async with run_server_async(adder()) as url:
        await churn(url, rounds)
    assert children() == []
    assert unretrieved == []


async def test_mcp_02_closed_by_another_task_than_the_one_that_opened():
    server = MCPServer(raw(tools=[ECHO]))
    await asyncio.create_task(server.__aenter__())
    assert (await asyncio.create_task(server.call("echo", {"a": 1}))).text == '{"a": 1}'
    await asyncio.create_task(server.__aexit__(None, None, None))
    assert children() == []


async def test_cancelled_while_connecting():
    task = asyncio.create_task(MCPServer("sleep 100").__aenter__())
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == []


HINTED = [
    {**ECHO, "name": "plain"},
    {**ECHO, "name": "read", "annotations": {"readOnlyHint": True}},
    {**ECHO, "name": "odd", "annotations": {"readOnlyHint": True, "destructiveHint": True}},
    {**ECHO, "name": "delete", "description": None, "annotations": {"destructiveHint": True}},
]


async def test_destructive_tools_are_left_out_unless_allowed():
    async with MCPServer(raw(tools=HINTED)) as server:
        assert [tool.name for tool in server.tools] == ["plain", "read", "odd"]
        assert server.left_out == {"delete": "marked as destructive"}
        assert server.tools[0].read_only is None
        assert server.tools[1].read_only is True
        assert (await server.call("delete", {})).is_error
        assert server.calls == {}
    async with MCPServer(raw(tools=HINTED), allow_destructive=True) as server:
        assert server.tools[3].description == ""
        assert not (await server.call("delete", {})).is_error


async def test_filters():
    async with MCPServer(raw(tools=HINTED), tools=["plain", "read"], exclude=["read"]) as server:
        assert [tool.name for tool in server.tools] == ["plain"]
        assert server.left_out["read"] == "excluded"
    with pytest.raises(ConfigError, match=r"no tool 'raed': did you mean read\?"):
        await MCPServer(raw(tools=HINTED), exclude=["raed"]).__aenter__()
    with pytest.raises(ConfigError, match="it has delete, odd, plain, read"):
        await MCPServer(raw(tools=HINTED), tools=["xyzzy"]).__aenter__()
    with pytest.raises(ConfigError, match=r"left out .*delete: marked as destructive"):
        await MCPServer(raw(tools=HINTED), tools=["delete"]).__aenter__()
    assert children() == []


async def test_tool_listed_twice(caplog):
    async with MCPServer(raw(tools=[ECHO, {**ECHO, "description": "again"}])) as server:
        assert [(tool.name, tool.description) for tool in server.tools] == [("echo", "")]
    assert "lists it twice" in caplog.text


def test_config_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.delenv("ART_MCP_TOKEN", raising=False)
    entries = {
        "files": {"command": sys.executable, "args": ["-c", "pass"], "env": {"KEY": "${MY_KEY}"}},
        "web": {"url": "https://example.invalid/api", "headers": {"X-Key": "Bearer ${env:MY_KEY}"}},
        "old": {"url": "https://example.invalid/api", "type": "sse"},
        "broken": {"args": []},
        "unset": {"url": "https://example.invalid/${NOT_SET_ANYWHERE}"},
    }
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": entries}))
    files = parse_target(f"{file}#files")
    assert (files.command, files.env) == ((sys.executable, "-c", "pass"), {"KEY": "k"})
    assert parse_target("web", config=file).headers == {"X-Key": "Bearer k"}
    assert parse_target("old", file).transport is Transport.SSE
    for spec, problem in [
        (f"{file}#file", "did you mean files"),
        (f"{file}", "has no server ''"),
        (f"{file}#broken", "needs a 'url' or a 'command'"),
        (f"{file}#unset", "NOT_SET_ANYWHERE"),
        (f"{tmp_path}/none.json", "No such file"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            parse_target(spec)
    file.write_text(json.dumps({"servers": {"web": entries["web"]}}))
    assert parse_target(str(file)).url == "https://example.invalid/api"
    file.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse_target(str(file))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "No MCP server given"),
        ("  ", "No MCP server given"),
        ("nowhere.py", "does not exist"),
        ("no-such-command-anywhere --flag", "no command on the PATH"),
        ("ws://example.invalid/mcp", "ws:// is not supported"),
        ("'unclosed", "Cannot read the server command"),
    ],
)
def test_bad_spec_is_one_sentence(spec, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        MCPServer(spec)
    assert "\n" not in str(caught.value)


def test_python_file_runs_under_this_interpreter(tmp_path):
    script = tmp_path / "my server.py"
    script.write_text("")
    assert parse_target(str(script)).command == (sys.executable, str(script))
    assert parse_target(f"{shlex.quote(str(script))} --flag").command == (sys.executable, str(script), "--flag")
