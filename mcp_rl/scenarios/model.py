"""What a scenario is, and what generation needs from a server.

A scenario carries its own proof: the calls that solve it, the answers the server really gave, and the strings that only
those answers reveal. So it can be scored without a judge, and replayed as a worked example for the warm-up. Its id is a
hash of its content, hence stable across runs and machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field

from mcp_rl.tools import Caller, Tool

Kind = Literal["single", "chain2", "chain3"]
"""How many calls a scenario needs, one after the other."""
Split = Literal["train", "held_out"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MIX: tuple[Kind, ...] = ("single", "chain2", "single", "chain2", "single", "chain3")
"""Half of the scenarios need one call, a third two, a sixth three: a small model learns the short ones first."""


MAX_ARGUMENTS = 300
"""Characters of the arguments of a call in a scenario: a small model has to copy them."""


class Server(Caller, Protocol):
    """A connected server."""

    @property
    def tools(self) -> Sequence[Tool]: ...


class ExpectedCall(BaseModel):
    """One call that solves a part of the task, with exactly these arguments."""

    model_config = ConfigDict(extra="forbid")

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Scenario(BaseModel):
    """A task with its solution, verified against the real server wherever that may be done freely.

    `results` are the server's answers to `calls`, in order (none where the calls write, and were not made); `facts` are the
    strings that the final answer must contain (empty when the answers change from call to call); `answer` is a model
    answer that contains them.
    """

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1)
    task: str = Field(min_length=1)
    kind: Kind
    calls: list[ExpectedCall] = Field(min_length=1)
    results: list[str]
    facts: list[str]
    answer: str
    split: Split
    difficulty: int | None = Field(default=None, ge=1, le=5)
    """1 (easy) to 5 (hard) in the opinion of the generator that wrote the task; None: none wrote it."""

    @property
    def verified(self) -> bool:
        """Whether its calls were made on the server. Those of a generated task that writes are not."""
        return len(self.results) == len(self.calls)


def argument_key(arguments: dict[str, Any]) -> str:
    """Arguments as text, equal for equal arguments whatever the order of their keys."""
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=str)


def scenario_id(task: str, calls: Sequence[ExpectedCall]) -> str:
    """The first 12 hex digits of a hash over the task and its calls."""
    parts = [task, *(f"{call.tool} {argument_key(call.arguments)}" for call in calls)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
