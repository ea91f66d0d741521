"""What a group costs a judge, and whether judging survives a bad endpoint.

    python -m benchmarks.judge [--groups 100] [--in-flight 16] [--failures 0.2] [--seed 0]

1. Prompt tokens (GPT-4o's tokenizer) of one group of 8 attempts x 20 turns, a tool call and its result each, as RULER sends
   it, instructions and rubric included, against sending each attempt in full: all its messages as JSON, the tools once.
   How much attempts at one task have in common differs, so there are three groups. `typical`: a third of the calls are
   searches whose words and hits are the attempt's own; the others read pages, the popular ones more often (the n-th of 40
   with a probability as 1/n), as siblings sampled from one policy do. `alike`: the same with 12 pages and no searches.
   `strangers`: no two results are the same. `*_uncut`: without a budget, so what is saved without losing a character;
   `*_longest_result`: characters to which the budget cut the longest tool result.
2. `groups` groups of 4, `in-flight` requests at a time, against a judge on loopback that fails `failures` of all requests:
   429, 500, and answers that come after the client's timeout, a third each.

Prints one JSON line. The texts are random words, not recorded runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

from art_core.judging import judge_summary, ruler_score_group
from art_core.judging.candidate import Candidate
from art_core.judging.cutting import texts
from art_core.judging.prompt import judge_messages
from art_core.judging.rubric import DEFAULT_RUBRIC
from art_core.llm import StructuredLLM
from art_core.llm.wire import complete
from art_core.types import Trajectory, TrajectoryGroup
from tests.core.judge_server import JudgeServer, by_text
from tests.scripted_server import JSON, Reply, tool_call

TRAJECTORIES, TURNS, BUDGET = 8, 20, 60_000
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


Turn = tuple[str, str, str]
"""Tool, its argument, its result."""


def turns(generator: random.Random, kind: str) -> Callable[[], Turn]:
    """Draws the turns of a `kind` of group. Results have about 1.5 kB, hits of a search a third of that."""
    count = 12 if kind == "alike" else 40
    pages = [text(generator, 170) for _ in range(count)]
    weights = [1.0 if kind == "alike" else 1 / (1 + place) for place in range(count)]

    def draw() -> Turn:
        if kind == "typical" and generator.random() < 1 / 3:
            return "search", text(generator, 4), text(generator, 60)
        page = generator.choices(range(count), weights)[0]
        return "read", f"page {page}", text(generator, 170) if kind == "strangers" else pages[page]

    return draw


def big_group(seed: int, kind: str) -> TrajectoryGroup:
    """One task, 8 attempts of 20 turns."""
    generator = random.Random(seed)
    start = [{"role": "system", "content": text(generator, 150)}, {"role": "user", "content": text(generator, 30)}]
    draw = turns(generator, kind)

    def attempt() -> Trajectory:
        messages: list[Any] = list(start)
        for number in range(TURNS):
            tool, key, result = draw()
            call = tool_call(f"call_{number}", tool, json.dumps({"key": key}))
            messages.append({"role": "assistant", "content": text(generator, 12), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return Trajectory(messages_and_choices=[*messages, {"role": "assistant", "content": text(generator, 25)}])

    return TrajectoryGroup([attempt() for _ in range(TRAJECTORIES)])


def tokens(text: str) -> int:
    """By a tokenizer that litellm brings along."""
    import litellm

    return len(litellm.encode(model="gpt-4o", text=text))


def tokens_in_full(group: TrajectoryGroup) -> int:
    """Each trajectory's messages as JSON."""
    return sum(tokens(json.dumps(trajectory.messages())) for trajectory in group) + tokens(json.dumps(TOOLS))


def shown(group: TrajectoryGroup, budget: int) -> list[str]:
    """What RULER sends, its instructions and rubric included."""
    candidates = [(f"{number:010x}", Candidate.of_trajectory(trajectory)) for number, trajectory in enumerate(group)]
    return [message["content"] for message in judge_messages(candidates, TOOLS, DEFAULT_RUBRIC, budget)]


def longest(prompt: str) -> int:
    """Characters of the longest tool result in a prompt: where the budget cuts. One that several attempts share is in the
    table of shared texts."""
    lines = [json.loads(line) for line in prompt.split("\n") if line.startswith("{")]
    return max(
        len(text) for text in texts([line for line in lines if "shared_text" in line or line.get("role") == "tool"])
    )


def sizes(seed: int) -> dict[str, float]:
    """Part 1."""
    figures: dict[str, float] = {}
    for kind in ("typical", "alike", "strangers"):
        group = big_group(seed, kind)
        full, prompt = tokens_in_full(group), shown(group, BUDGET)
        sent, uncut = (sum(map(tokens, parts)) for parts in (prompt, shown(group, 1 << 40)))
        figures |= {f"{kind}_tokens_in_full": full, f"{kind}_tokens": sent, f"{kind}_ratio": round(full / sent, 2)}
        figures |= {f"{kind}_ratio_uncut": round(full / uncut, 2), f"{kind}_longest_result": longest(prompt[1])}
    return figures


async def warm_up(server: JudgeServer) -> None:
    """Load what the first request loads: seconds that are not the endpoint's."""
    script, server._script = server._script, [Reply("ok")]
    await complete({"model": "judge", "base_url": server.base_url, "messages": [{"role": "user", "content": "Hi"}]}, 60)
    server._script = script


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
        await warm_up(server)
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
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its price list is fetched
    trouble = asyncio.run(outage(options.groups, options.in_flight, options.failures, options.seed))
    print(json.dumps({"benchmark": "judge", **vars(options), **sizes(options.seed), **trouble}))


if __name__ == "__main__":
    main()
