"""The example server: read-only by SQLite's own means, short answers, quick to start."""

import asyncio
import importlib.util
import json
import shlex
import socket
import sys
import time
from pathlib import Path

import pytest

from mcp_rl.client import MCPServer

SCRIPT = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"


def load():
    spec = importlib.util.spec_from_file_location("sql_agent_server", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sql_agent = load()


@pytest.fixture
async def server():
    async with MCPServer(sql_agent.build_server(sql_agent.Database(sql_agent.build_database()))) as server:
        yield server


async def answer(server, name, **arguments):
    result = await server.call(name, arguments)
    assert not result.is_error, result.text
    assert json.loads(result.text) == result.structured
    return result.structured


async def refusal(server, sql):
    result = await server.call("run_query", {"sql": sql})
    assert result.is_error
    return result.text


async def test_tools_are_described_and_read_only(server):
    assert server.name == "company"
    assert [tool.name for tool in server.tools] == ["list_tables", "describe_table", "run_query"]
    assert all(tool.read_only and tool.description for tool in server.tools)
    properties = server.tools[2].input_schema["properties"]
    assert properties["sql"]["examples"] == sql_agent.QUERIES
    assert server.tools[1].input_schema["properties"]["table_name"]["description"]


async def test_answers(server):
    tables = (await answer(server, "list_tables"))["tables"]
    assert {"departments", "employees", "projects", "newcomers"} <= set(tables)
    assert tables == sorted(tables)
    assert await answer(server, "describe_table", table_name="projects") == {
        "table": "projects",
        "columns": ["id", "name", "department", "status", "cost"],
        "row_count": 12,
    }
    counted = await answer(server, "run_query", sql="SELECT COUNT(*) FROM employees")
    assert counted == {"columns": ["COUNT(*)"], "rows": [[24]]}


async def test_example_queries_find_something(server):
    for query in sql_agent.QUERIES:
        assert (await answer(server, "run_query", sql=query))["rows"]


async def test_at_most_twenty_rows(server):
    many = await answer(server, "run_query", sql="SELECT name FROM employees")
    assert (len(many["rows"]), many["more"]) == (20, True)
    assert "more" not in await answer(server, "run_query", sql="SELECT name FROM employees LIMIT 20")


async def test_unknown_table(server):
    result = await server.call("describe_table", {"table_name": "x; DROP TABLE employees"})
    assert (result.is_error, result.text) == (True, "There is no table 'x; DROP TABLE employees'.")


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM employees",
        "UPDATE employees SET salary = 0",
        "INSERT INTO projects (name) VALUES ('x')",
        "DROP TABLE employees",
        "CREATE TABLE x (a)",
        "PRAGMA query_only = OFF",
        "ATTACH 'x.db' AS x",
        "VACUUM INTO 'x.db'",
        "SELECT load_extension('x')",
        "BEGIN",
    ],
)
async def test_writing_is_refused(server, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert await refusal(server, sql) == "Only SELECT is allowed: the data is read-only."
    total = sum(salary for _, _, _, salary, _ in sql_agent.EMPLOYEES)
    assert (await answer(server, "run_query", sql="SELECT SUM(salary) FROM employees"))["rows"] == [[total]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELEC 1", 'SQL error: near "SELEC": syntax error'),
        ("SELECT pay FROM employees", "SQL error: no such column: pay"),
        ("SELECT * FROM staff", "SQL error: no such table: staff"),
        ("SELECT 1; SELECT 2", "SQL error: You can only execute one statement at a time."),
        ("", "Write one SELECT statement."),
        ("SELECT zeroblob(100000000)", "SQL error: string or blob too big"),
    ],
)
async def test_bad_queries_are_explained(server, sql, problem):
    assert await refusal(server, sql) == problem


async def test_odd_values_are_json(server):
    row = (await answer(server, "run_query", sql="SELECT x'00ff', 9e999, NULL"))["rows"]
    assert row == [["00ff", "inf", None]]


async def test_endless_query_is_stopped_and_blocks_nobody(server):
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT SUM(x) FROM c"
    started = time.perf_counter()
    slow = asyncio.create_task(refusal(server, endless))
    await asyncio.sleep(0.2)
    await answer(server, "list_tables")
    assert time.perf_counter() - started < 1.9
    assert await slow == "The query took longer than 2 s."


async def test_over_stdio():
    async with MCPServer(str(SCRIPT)) as server:
        assert server.transport == "stdio"
        results = await asyncio.gather(
            *(answer(server, "run_query", sql=f"SELECT name FROM employees WHERE id = {i}") for i in range(1, 9))
        )
    assert [result["rows"][0][0] for result in results] == [row[0] for row in sql_agent.EMPLOYEES[:8]]


@pytest.mark.slow
async def test_over_http():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *shlex.split(f"{sys.executable} {SCRIPT} --http --port {port}"), stderr=asyncio.subprocess.PIPE
    )
    try:
        while b"running on" not in (line := await process.stderr.readline()):
            assert line
        async with MCPServer(f"http://127.0.0.1:{port}/mcp") as server:
            assert (await answer(server, "list_tables"))["tables"]
    finally:
        process.terminate()
        await process.communicate()
