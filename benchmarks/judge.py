"""What a group costs a judge, and whether judging survives a bad endpoint.

    python -m benchmarks.judge [--groups 100] [--in-flight 16] [--failures 0.2] [--seed 0]

1. Prompt size, in tokens counted as characters / 4, of one group of 8 trajectories x 20 turns (a tool call and its result
   each) as RULER shows it, against sending each trajectory in full (all its messages as JSON, tools once). Two groups: one
   whose siblings read from the same 12 pages, one in which no two results are alike. `*_uncut`: without the budget, what
   is saved without losing a character.
2. `groups` groups of 4, `in-flight` requests at a time, against a judge on loopback that fails `failures` of all requests:
   429, 500, and answers that come after the client's timeout, a third each.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

from art_core.judging import judge_summary, ruler_score_group
from art_core.judging.candidate import Candidate
from art_core.judging.prompt import judge_messages
from art_core.judging.rubric import DEFAULT_RUBRIC
from art_core.llm import StructuredLLM
from art_core.llm.wire import load_litellm
from art_core.types import Trajectory, TrajectoryGroup
from tests.core.judge_server import JudgeServer, by_text
from tests.scripted_server import JSON, Reply, tool_call

TRAJECTORIES, TURNS, PAGES, BUDGET = 8, 20, 12, 60_000
TIMEOUT = 1.0
WORDS = (
    "invoice",
    "total",
    "customer",
    "march",
    "ledger",
    "refund",
    "open",
    "paid",
    "region",
    "owner",
    "note",
    "draft",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.title()} documents of the archive.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
    for name in ("search", "read")
]


def text(generator: random.Random, words: int) -> str:
    """Random prose."""
    return " ".join(generator.choice(WORDS) + str(generator.randrange(1000)) for _ in range(words))


def big_group(generator: random.Random, *, shared: bool) -> TrajectoryGroup:
    """One task, 8 attempts of 20 turns; results of about 1.5 kB."""
    start = [{"role": "system", "content": text(generator, 150)}, {"role": "user", "content": text(generator, 30)}]
    pages = [text(generator, 170) for _ in range(PAGES)]

    def attempt() -> Trajectory:
        messages: list[Any] = list(start)
        for turn in range(TURNS):
            page = generator.randrange(PAGES)
            call = tool_call(f"call_{turn}", generator.choice(("search", "read")), json.dumps({"key": f"page {page}"}))
            result = pages[page] if shared else text(generator, 170)
            messages.append({"role": "assistant", "content": text(generator, 12), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return Trajectory(messages_and_choices=[*messages, {"role": "assistant", "content": text(generator, 25)}])

    return TrajectoryGroup([attempt() for _ in range(TRAJECTORIES)])


def tokens_in_full(group: TrajectoryGroup) -> float:
    """Each trajectory's messages as JSON."""
    return sum(len(json.dumps(trajectory.messages())) for trajectory in group) / 4 + len(json.dumps(TOOLS)) / 4


def tokens_shown(group: TrajectoryGroup, budget: int) -> float:
    """What RULER sends, its instructions and rubric included."""
    candidates = [(f"{number:010x}", Candidate.of_trajectory(trajectory)) for number, trajectory in enumerate(group)]
    return sum(len(message["content"]) for message in judge_messages(candidates, TOOLS, DEFAULT_RUBRIC, budget)) / 4


def sizes(seed: int) -> dict[str, float]:
    """Part 1."""
    figures: dict[str, float] = {}
    for name, shared in (("shared_pages", True), ("own_pages", False)):
        group = big_group(random.Random(seed), shared=shared)
        full = tokens_in_full(group)
        figures[f"{name}_tokens_in_full"] = round(full)
        figures[f"{name}_tokens"] = round(tokens_shown(group, BUDGET))
        figures[f"{name}_ratio"] = round(full / tokens_shown(group, BUDGET), 2)
        figures[f"{name}_ratio_uncut"] = round(full / tokens_shown(group, 1 << 40), 2)
    return figures


async def outage(groups: int, in_flight: int, failures: float, seed: int) -> dict[str, Any]:
    """Part 2."""
    generator = random.Random(seed)
    injected = {"429": 0, "500": 0, "timeout": 0}

    def script(body: JSON) -> Reply:
        if generator.random() >= failures:
            return by_text(body)
        kind = generator.choice(list(injected))
        injected[kind] += 1
        return Reply("", delay=1.5 * TIMEOUT) if kind == "timeout" else Reply(status=int(kind))

    with JudgeServer(script) as server:
        judge = StructuredLLM(
            "judge", base_url=server.base_url, timeout=TIMEOUT, max_concurrency=in_flight, first_wait=0.1
        )
        made = [
            TrajectoryGroup(
                [
                    Trajectory(messages_and_choices=[{"role": "assistant", "content": f"group {number} 0.{place}"}])
                    for place in range(1, 5)
                ]
            )
            for number in range(groups)
        ]
        await load_litellm()  # ten seconds that are not the endpoint's
        started = time.perf_counter()
        scored = await asyncio.gather(*[ruler_score_group(group, judge) for group in made])
        seconds = time.perf_counter() - started
        await asyncio.sleep(2 * TIMEOUT)  # let the late answers end before the server does
    summary = judge_summary(scored)
    right = all([t.reward for t in group] == [0.1, 0.2, 0.3, 0.4] for group in scored)
    return {
        "failed_groups": summary.groups - summary.judged,
        "all_scores_right": right,
        "requests": judge.usage.requests,
        "injected": injected,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run both parts and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--failures", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trouble = asyncio.run(outage(options.groups, options.in_flight, options.failures, options.seed))
    print(json.dumps({"benchmark": "judge", **vars(options), **sizes(options.seed), **trouble}))


if __name__ == "__main__":
    main()
