"""What names say: whether a tool only reads, what it is about, and which result fits which argument.

Servers mostly follow the same habit (verb first, then noun: `list_tables`, `describe_table(table_name)`), so comparing
words goes a long way without knowing the server. A guess that is wrong costs a failed probe. Only the guess that an
unannotated tool reads must be careful: any word of writing in its name forbids it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from mcp_rl.tools import Tool


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


READS = _set(
    "list get describe read search show query count find time fetch lookup look retrieve view check inspect select "
    "browse explain compare calculate compute convert add sum subtract multiply divide echo ping return info status "
    "stat stats tree head tail print format parse validate translate summarize weather current now"
)
WRITES = _set(
    "write create delete insert update append send remove set put post edit move rename copy upload drop alter modify "
    "execute exec kill stop start restart run reset clear patch save store publish deploy install push commit merge "
    "buy pay order book cancel close open trigger toggle register subscribe unsubscribe enable disable grant revoke "
    "truncate purge archive import invite reply upsert replace make mkdir rm"
)
MIXED = frozenset({"run", "execute"})
"""Words of doing that say nothing by themselves: `run_query` reads, `run_command` may do anything."""
ASKS = frozenset({"query", "search", "select", "lookup"})
GENERIC = _set("name id value key result text content data item entry row column line the a of to and list")
PATHS = frozenset({"path", "dir", "directory", "folder", "file", "filename", "filepath"})


@lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """The lower-case words of an identifier or phrase, in the singular: "listTables" -> ("list", "table")."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(_singular(word) for word in re.findall(r"[a-z]+|[0-9]+", spaced.lower()))


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("oes", "ches", "shes", "xes", "sses")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def reads(tool: Tool, allow_unannotated: bool = True) -> bool:
    """Whether `tool` may be called freely: annotated as reading, or unannotated but named and described like it."""
    if tool.destructive and not tool.read_only:
        return False
    if tool.read_only is not None or not allow_unannotated:
        return bool(tool.read_only)
    named = words(tool.name)
    writes = WRITES.intersection(named)
    if writes - MIXED or (writes and not ASKS.intersection(named)):
        return False
    first = words(" ".join(tool.description.split()[:1]))
    return bool(READS.intersection(named) or READS.intersection(first))


def noun(tool: Tool) -> str:
    """What the tool is about, in the plural: "tables" for list_tables; "results" when the name does not say."""
    return _noun(tool.name)


@lru_cache(maxsize=1024)
def _noun(name: str) -> str:
    parts = re.findall(r"[A-Za-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name))
    rest = [part.lower() for part in parts if not {*words(part)} & (READS | WRITES)]
    return _plural(" ".join(rest) or "result")


def _plural(phrase: str) -> str:
    if phrase.endswith("s"):
        return phrase
    return f"{phrase[:-1]}ies" if re.search(r"[^aeiou]y$", phrase) else f"{phrase}s"


def affinity(argument: str, description: str, keys: tuple[str, ...], about: str) -> float:
    """How well a value found under `keys` (outermost first) of a tool about `about` fits an argument: 0 to 1."""
    wanted = _meanings(argument)
    near = _meanings(keys[-1]) if keys else frozenset()
    if wanted == near:
        return 1.0
    strong = wanted - GENERIC or wanted
    around = _meanings(" ".join([*keys[:-1], about]))
    if (near - GENERIC) & strong:
        return 0.8
    if not near - GENERIC and around & strong:
        return 0.7
    if around & strong:
        return 0.4
    described = _meanings(description)
    return 0.3 if (near - GENERIC or (frozenset() if near else around)) & described else 0.0


@lru_cache(maxsize=4096)
def _meanings(name: str) -> frozenset[str]:
    """The words of a name, all words for places in a tree of files being one."""
    return frozenset("path" if word in PATHS else word for word in words(name))


def is_path(argument: str) -> bool:
    """Whether an argument names a place in a tree of files."""
    return bool(PATHS.intersection(words(argument)))
