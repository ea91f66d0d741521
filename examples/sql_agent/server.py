"""A small read-only SQL server: a company's departments, employees and projects.

    python server.py                        over standard input and output
    python server.py --http --port 8000     over Streamable HTTP, at http://127.0.0.1:8000/mcp

The data lives in memory and is the same at each start. SQLite itself forbids writing (`query_only` and an authorizer),
answers have at most 20 rows, and a query that runs too long is interrupted: a language model may send anything. Answers
are short, since small models read them.
"""

from __future__ import annotations

import argparse
import math
import sqlite3
import time
from typing import Annotated, Any

from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from pydantic import Field

MAX_ROWS = 20
MAX_SECONDS = 2.0
MAX_BYTES = 1_000_000

DEPARTMENTS = [
    # name, city, budget
    ("Sales", "Berlin", 420000),
    ("Marketing", "Paris", 310000),
    ("Engineering", "Zurich", 980000),
    ("Support", "Lisbon", 190000),
    ("Finance", "Berlin", 270000),
    ("Legal", "Vienna", 150000),
    ("Research", "Zurich", 640000),
    ("Design", "Paris", 230000),
]
EMPLOYEES = [
    # name, department, title, salary, hired
    ("Ada Novak", "Engineering", "Engineer", 92000, 2018),
    ("Ben Okafor", "Sales", "Account Manager", 61000, 2020),
    ("Carla Rossi", "Marketing", "Analyst", 58000, 2019),
    ("David Kim", "Engineering", "Architect", 118000, 2015),
    ("Elena Petrova", "Research", "Scientist", 105000, 2017),
    ("Felix Braun", "Support", "Agent", 41000, 2022),
    ("Grace Mbeki", "Finance", "Controller", 83000, 2016),
    ("Hugo Martin", "Design", "Designer", 56000, 2021),
    ("Ines Costa", "Support", "Team Lead", 54000, 2018),
    ("Jonas Weber", "Sales", "Director", 97000, 2014),
    ("Keiko Tanaka", "Research", "Scientist", 109000, 2016),
    ("Liam Walsh", "Legal", "Counsel", 88000, 2019),
    ("Mara Lindt", "Engineering", "Engineer", 87000, 2021),
    ("Nils Berg", "Engineering", "Engineer", 79000, 2023),
    ("Olga Sokolova", "Finance", "Accountant", 59000, 2020),
    ("Pedro Alves", "Support", "Agent", 39000, 2023),
    ("Quinn Taylor", "Marketing", "Director", 91000, 2015),
    ("Rosa Garcia", "Sales", "Account Manager", 63000, 2019),
    ("Samir Haddad", "Engineering", "Team Lead", 112000, 2016),
    ("Tara Singh", "Design", "Director", 86000, 2017),
    ("Umar Farouk", "Research", "Engineer", 94000, 2020),
    ("Vera Hansen", "Legal", "Assistant", 47000, 2022),
    ("Wei Chen", "Sales", "Analyst", 57000, 2021),
    ("Yara Santos", "Marketing", "Writer", 49000, 2022),
]
PROJECTS = [
    # name, department, status, cost
    ("Atlas", "Engineering", "active", 240000),
    ("Beacon", "Marketing", "done", 45000),
    ("Comet", "Research", "active", 180000),
    ("Delta", "Sales", "planned", 30000),
    ("Ember", "Design", "done", 52000),
    ("Falcon", "Engineering", "done", 310000),
    ("Glacier", "Research", "planned", 95000),
    ("Harbor", "Support", "active", 27000),
    ("Indigo", "Finance", "active", 61000),
    ("Jasmine", "Legal", "planned", 18000),
    ("Kepler", "Engineering", "planned", 125000),
    ("Lagoon", "Marketing", "active", 73000),
]
SCHEMA = """
CREATE TABLE departments (id INTEGER PRIMARY KEY, name TEXT, city TEXT, budget INTEGER);
CREATE TABLE employees (id INTEGER PRIMARY KEY, name TEXT, department TEXT, title TEXT, salary INTEGER, hired INTEGER);
CREATE TABLE projects (id INTEGER PRIMARY KEY, name TEXT, department TEXT, status TEXT, cost INTEGER);
CREATE VIEW active_projects AS SELECT name, department, cost FROM projects WHERE status = 'active';
CREATE VIEW analysts AS SELECT name, department, hired FROM employees WHERE title = 'Analyst';
CREATE VIEW cities AS SELECT city, COUNT(*) AS departments, SUM(budget) AS budget FROM departments GROUP BY city;
CREATE VIEW directors AS SELECT name, department, salary, hired FROM employees WHERE title = 'Director';
CREATE VIEW engineers AS SELECT id, name, title, salary FROM employees WHERE department = 'Engineering';
CREATE VIEW finished_projects AS SELECT id, name, cost FROM projects WHERE status = 'done';
CREATE VIEW newcomers AS SELECT name, title, department, salary, hired FROM employees WHERE hired >= 2022;
CREATE VIEW sales_team AS SELECT name, salary FROM employees WHERE department = 'Sales';
CREATE VIEW titles AS SELECT title, COUNT(*) AS people FROM employees GROUP BY title;
"""
QUERIES = [
    "SELECT COUNT(*) FROM employees",
    "SELECT name FROM departments",
    "SELECT budget FROM departments WHERE name = 'Sales'",
    "SELECT salary FROM employees WHERE name = 'Ada Novak'",
    "SELECT name FROM projects WHERE status = 'active'",
    "SELECT name FROM employees ORDER BY salary DESC LIMIT 1",
    "SELECT COUNT(*) FROM cities",
]
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def build_database() -> bytes:
    """The company's data as the bytes of a SQLite database."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    connection.executemany("INSERT INTO departments (name, city, budget) VALUES (?, ?, ?)", DEPARTMENTS)
    connection.executemany(
        "INSERT INTO employees (name, department, title, salary, hired) VALUES (?, ?, ?, ?, ?)", EMPLOYEES
    )
    connection.executemany("INSERT INTO projects (name, department, status, cost) VALUES (?, ?, ?, ?)", PROJECTS)
    connection.commit()
    image = connection.serialize()
    connection.close()
    return image


class Database:
    """Read-only access to a SQLite database; each query has a copy of its own, so calls may run side by side."""

    def __init__(self, image: bytes) -> None:
        self.image = image

    def query(self, sql: str) -> tuple[list[str], list[list[Any]]]:
        """Column names and at most 21 rows (one too many tells that there are more). Raises ToolError."""
        deadline = time.monotonic() + MAX_SECONDS
        connection = sqlite3.connect(":memory:")
        connection.deserialize(self.image)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise ToolError("Write one SELECT statement.")
            rows = [[plain(value) for value in row] for row in cursor.fetchmany(MAX_ROWS + 1)]
            return [column[0] for column in cursor.description], rows
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise ToolError(explain(str(error))) from error
        finally:
            connection.close()

    def tables(self) -> list[str]:
        """Names of the tables and views."""
        return [
            row[0]
            for row in self.query("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') ORDER BY name")[1]
        ]


def plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def explain(message: str) -> str:
    """What SQLite said, for a reader who cannot see our limits."""
    if any(word in message for word in ("not authorized", "authorization denied", "prohibited")):
        return "Only SELECT is allowed: the data is read-only."
    if "interrupted" in message:
        return f"The query took longer than {MAX_SECONDS:g} s."
    return f"SQL error: {message}"


def build_server(database: Database) -> FastMCP[Any]:
    """The MCP server over `database`."""
    server: FastMCP[Any] = FastMCP("company", version="1.0")
    read_only = {"readOnlyHint": True, "openWorldHint": False}

    @server.tool(annotations=read_only)
    def list_tables() -> dict[str, Any]:
        """List the tables."""
        return {"tables": database.tables()}

    @server.tool(annotations=read_only)
    def describe_table(
        table_name: Annotated[str, Field(description="Name of a table.", examples=["employees", "departments"])],
    ) -> dict[str, Any]:
        """Show the columns and the number of rows of a table."""
        if table_name not in database.tables():
            raise ToolError(f"There is no table {table_name!r}.")
        columns, _ = database.query(f'SELECT * FROM "{table_name}" LIMIT 1')
        rows = database.query(f'SELECT COUNT(*) FROM "{table_name}"')[1]
        return {"table": table_name, "columns": columns, "row_count": rows[0][0]}

    @server.tool(annotations=read_only)
    def run_query(
        sql: Annotated[str, Field(description="One SQLite SELECT statement.", examples=QUERIES)],
    ) -> dict[str, Any]:
        """Run a read-only SQL query."""
        columns, rows = database.query(sql)
        answer = {"columns": columns, "rows": rows[:MAX_ROWS]}
        return answer if len(rows) <= MAX_ROWS else {**answer, "more": True}

    return server


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="A small read-only SQL server for MCP.")
    parser.add_argument("--http", action="store_true", help="serve Streamable HTTP instead of stdio")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    server = build_server(Database(build_database()))
    if options.http:
        server.run(transport="http", host="127.0.0.1", port=options.port, show_banner=False)
    else:
        server.run(show_banner=False)


if __name__ == "__main__":
    main()
