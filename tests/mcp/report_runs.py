"""Run folders as training leaves them, made by hand, and a reader of the page: for tests of the report."""

import json
import random
import statistics
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

from pydantic import BaseModel

from mcp_rl.records import EvalRecord, Phase, RolloutRecord, Stage, StepRecord, Summary
from mcp_rl.report import build_report
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios.files import save
from mcp_rl.scenarios.model import ExpectedCall, Scenario
from mcp_rl.tools import Tool

TOOLS = ["list_tables", "describe_table", "run_query"]


class Options(BaseModel):
    """As much of the training options as the report needs."""

    server: str = "examples/sql_agent/server.py"
    model: str = "smollm2-135m"
    seed: int = 7
    steps: int = 16
    warmup_steps: int = 4
    group_size: int = 8
    scenarios_per_step: int = 4
    learning_rate: float = 2e-4
    temperature: float = 1.0


def make_scenarios(count=24):
    tables = ["orders", "customers", "invoices", "parts", "suppliers", "shipments"]
    made = []
    for number in range(count):
        table, kind = tables[number % len(tables)], ("single", "single", "chain2", "chain3")[number % 4]
        calls = [
            ExpectedCall(tool="describe_table", arguments={"table": table}),
            ExpectedCall(tool="run_query", arguments={"sql": f"SELECT count(*) FROM {table}", "limit": number}),
            ExpectedCall(tool="list_tables"),
        ][: {"single": 1, "chain2": 2, "chain3": 3}[kind]]
        if number % 4 == 1:
            calls = [ExpectedCall(tool="list_tables")]
        made.append(
            Scenario(
                id=f"{number:012x}",
                task=f"How many columns does the table {table} have, and what is number {number} of them called?",
                kind=kind,
                calls=calls,
                results=["id, name, total" for _ in calls],
                facts=["total"],
                answer="total",
                split="held_out" if number % 2 else "train",
            )
        )
    return made


def make_rollout(scenario, sample, temperature, reward, *, text="The third column is called total.", result=None):
    call = scenario.calls[0]
    arguments = json.dumps(call.arguments)
    function = {"name": call.tool if reward > 0.2 else "get_tables", "arguments": arguments}
    shown = result or '{"columns":["id","name","total"],"rows":[[1,"Ann",12.5],[2,"Bob",7.0]]}'
    messages = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": scenario.task},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "tool_call_id": "call_0",
            "content": shown if reward > 0.2 else "Error: there is no such tool",
        },
        {"role": "assistant", "content": text},
    ]
    return RolloutRecord(
        scenario_id=scenario.id,
        kind=scenario.kind,
        tools=[call.tool for call in scenario.calls],
        task=scenario.task,
        temperature=temperature,
        sample=sample,
        reward=reward,
        solved=reward > 0.8,
        parts={"calls": reward * 0.6, "answer": reward * 0.4},
        messages=messages,
        end_reason="answered",
        completion_tokens=40 + sample,
    )


def make_eval(stage, step, scenarios, level, rng, samples=4, **changes):
    rollouts = []
    for scenario in scenarios:
        own = min(1.0, max(0.0, rng.gauss(level, 0.15)))
        for sample in range(samples + 1):
            temperature = 0.0 if sample == samples else 1.0
            reward = round(min(1.0, max(0.0, rng.gauss(own, 0.1))), 3)
            rollouts.append(make_rollout(scenario, sample, temperature, reward, **changes))
    return summarise(stage, step, rollouts)


def summarise(stage, step, rollouts):
    sampled, greedy = [r for r in rollouts if r.temperature > 0], [r for r in rollouts if r.temperature == 0]
    return EvalRecord(
        stage=stage,
        step=step,
        reward=statistics.fmean(r.reward for r in sampled),
        reward_ci=0.04,
        greedy_reward=statistics.fmean(r.reward for r in greedy),
        success=statistics.fmean(r.solved for r in sampled),
        greedy_success=statistics.fmean(r.solved for r in greedy),
        seconds=21.5,
        rollouts=rollouts,
    )


def make_step(number, rng, **changes):
    values = {
        "step": number,
        "reward": min(1.0, 0.4 + 0.025 * number + rng.uniform(-0.07, 0.07)),
        "reward_std": 0.22,
        "success": 0.3,
        "seconds": 30.25,
        "rollout_seconds": 21.0,
        "train_seconds": 9.0,
        "tokens_sampled": 2_345,
        "tokens_trained": 1_876,
        "tokens_computed": 6_543,
    }
    return StepRecord(**{**values, **changes})


def make_server(calls=0):
    return SimpleNamespace(
        name="sql-agent",
        version="1.2.0",
        transport="stdio",
        tools=[
            Tool(name, f"What {name} does.", {"type": "object", "properties": {}}, read_only=True) for name in TOOLS
        ],
        left_out={"drop_table": "marked as destructive"},
        calls=dict.fromkeys(TOOLS, calls),
        errors={"run_query": calls // 4},
    )


def make_run(folder, *, seed=3, levels=(0.14, 0.44, 0.76), steps=16, warmup=True, finished=True, **changes):
    """A run folder as the training loop leaves it, written through the same records."""
    rng, run, scenarios = random.Random(seed), RunFolder(folder), make_scenarios()
    run.write_config(Options(warmup_steps=4 if warmup else 0))
    save(run.scenarios, scenarios)
    held_out = [scenario for scenario in scenarios if scenario.split == "held_out"]
    evals = [make_eval(Stage.BASE, 0, held_out, levels[0], rng, **changes)]
    if warmup:
        run.write_steps([StepRecord(step=1, phase=Phase.WARMUP, seconds=18.0, metrics={"sft/optimizer_steps": 4.0})])
        evals.append(make_eval(Stage.BEFORE, 1, held_out, levels[1], rng, **changes))
    if finished:
        evals.append(make_eval(Stage.AFTER, 17, held_out, levels[2], rng, **changes))
    for record in evals:
        run.write_eval(record)
    run.write_steps([make_step(number, rng) for number in range(1, steps + 1)])
    run.write_tools(make_server(412))
    if finished:
        run.write_summary(make_summary(run, evals[0], evals[-2], evals[-1]))
    return run


def make_summary(run, base, before, after):
    stages = {"base": base, "before": before, "after": after}
    return Summary(
        **{f"eval_{name}": record.reward for name, record in stages.items()},
        **{f"greedy_{name}": record.greedy_reward for name, record in stages.items()},
        **{f"success_{name}": record.success for name, record in stages.items()},
        steps=16,
        seconds=580.0,
        checkpoint="checkpoints/0017",
        report=str(run.report),
        peak_memory_gb=2.31,
        seed=7,
    )


VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(HTMLParser):
    """Parses a page; fails on tags that do not balance, collects ids, references and visible text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.references, self.words = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._attributes(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self._attributes(attrs)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def _attributes(self, attrs):
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "action", "data", "srcset", "poster"):
                self.references.append(value)


def read_page(folder):
    html = build_report(Path(folder)).read_text(encoding="utf-8")
    return html, Page(html)
