"""The `mcp-rl` command. Thin on purpose: it parses options, calls one function, prints one result.

Heavy imports stay inside the commands, so that `--help` answers at once and works without any extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mcp_rl.shell import AsJson, Engine, Trainer, main_of, print_json, run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a small model to use the tools of an MCP server. No labels, no reward code, no GPU needed. "
    r"Extras: \[mcp] to talk to servers, \[local] to train on this machine: pip install 'art-plugins\[mcp,local]'.",
)

Server = Annotated[
    str,
    typer.Option(
        help="The MCP server: a URL, a .py file, a command line in quotes, or mcp.json#name.", show_default=False
    ),
]
Tools = Annotated[list[str] | None, typer.Option("--tools", help="Use only this tool (repeat for more).")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude-tools", help="Leave out this tool (repeat for more).")]
Destructive = Annotated[
    bool, typer.Option("--allow-destructive", help="Also use tools that the server marks as destructive.")
]
HeldOut = Annotated[float, typer.Option(help="Share of the scenarios made that is kept for evaluation.")]
Seed = Annotated[int, typer.Option(help="Fixes scenarios, sampling and training.")]
Generator = Annotated[
    str | None,
    typer.Option(
        help="Let this model write the scenarios (litellm's name, e.g. openai/gpt-4.1-mini).", show_default=False
    ),
]
GeneratorURL = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible server that has the generator.", show_default=False)
]
Isolate = Annotated[bool, typer.Option("--isolate", help="Start a fresh stdio server for each rollout.")]


def main() -> None:
    """Entry point: an expected failure is one sentence and exit code 2."""
    main_of(app)


def _server(spec: str, tools: list[str] | None, exclude: list[str] | None, destructive: bool) -> Any:
    from mcp_rl.config import require_mcp

    require_mcp()
    from mcp_rl.client import MCPServer

    return MCPServer(spec, tools=tools or None, exclude=exclude or (), allow_destructive=destructive)


@app.command()
def inspect(
    server: Server,
    tools: Tools = None,
    exclude_tools: Exclude = None,
    allow_destructive: Destructive = False,
    as_json: AsJson = False,
) -> None:
    """Show what a server offers, and what training would use."""
    from mcp_rl.inspect import as_dict, show

    async def work() -> dict[str, Any]:
        async with _server(server, tools, exclude_tools, allow_destructive) as connected:
            return as_dict(connected)

    found = run(work())
    print_json(found) if as_json else show(found)


@app.command()
def scenarios(
    server: Server,
    num: Annotated[int, typer.Option(min=1, help="How many, train and held-out together.")] = 24,
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")] = Path("scenarios.jsonl"),
    held_out: HeldOut = 1 / 3,
    seed: Seed = 0,
    generator: Generator = None,
    generator_url: GeneratorURL = None,
    tools: Tools = None,
    exclude_tools: Exclude = None,
    allow_destructive: Destructive = False,
    as_json: AsJson = False,
) -> None:
    """Write self-checking tasks from a server's tool schemas; without --generator no LLM and no key."""
    from mcp_rl.scenarios import save
    from mcp_rl.scenarios.make import make_scenarios

    target = _server(server, tools, exclude_tools, allow_destructive)
    made = run(make_scenarios(target, out, num, seed, held_out, generator, generator_url))
    save(out, made)
    if as_json:
        print_json([scenario.model_dump(mode="json") for scenario in made])
        return
    for scenario in made:
        level = f" {scenario.difficulty}/5" if scenario.difficulty else ""
        typer.echo(f"[{scenario.split:<8} {scenario.kind}{level}] {scenario.task}")
    held_out = sum(scenario.split == "held_out" for scenario in made)
    typer.echo(f"{len(made)} scenarios in {out}: {len(made) - held_out} to train on, {held_out} held out.")


@app.command()
def train(
    server: Server,
    model: Annotated[str, typer.Option(help="smollm2-135m, a Hugging Face id, or a model folder.")] = "smollm2-135m",
    steps: Annotated[int, typer.Option(min=0, help="GRPO steps.")] = 16,
    output: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/mcp-rl"),
    scenarios: Annotated[Path | None, typer.Option(help="A file of `mcp-rl scenarios`; default: make them.")] = None,
    num_scenarios: Annotated[int, typer.Option(min=2, help="How many to make.")] = 48,
    generator: Generator = None,
    generator_url: GeneratorURL = None,
    held_out: HeldOut = 1 / 3,
    max_calls: Annotated[int, typer.Option(min=1, max=3, help="Most calls that a scenario made needs.")] = 3,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in --output, or set it aside and start anew.")
    ] = True,
    seed: Seed = 0,
    scenarios_per_step: Annotated[int, typer.Option(min=1, help="Scenarios a step.")] = 4,
    group_size: Annotated[int, typer.Option(min=2, help="Attempts at each scenario of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Of GRPO (AdamW).")] = 2e-4,
    lora_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Adapt only the last N layers: faster, with less memory.", show_default="all"),
    ] = None,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Supervised steps before GRPO.")] = 6,
    warmup_learning_rate: Annotated[float, typer.Option(help="Of the warm-up (AdamW).")] = 1e-3,
    eval_samples: Annotated[int, typer.Option(min=1, help="Attempts a held-out scenario, at each evaluation.")] = 4,
    max_turns: Annotated[int, typer.Option(min=1, help="Model turns a rollout.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens a turn.")] = 96,
    judge: Annotated[
        str | None,
        typer.Option(help="Reward by RULER: this model compares the attempts. `local`: the run's own base model."),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that has the judge.", show_default=False)
    ] = None,
    judge_weight: Annotated[
        float, typer.Option(help="The judge's share of the reward; the rest is the verifiable reward.")
    ] = 1.0,
    judge_votes: Annotated[int, typer.Option(min=1, help="Verdicts a group, each in another order.")] = 1,
    judge_rubric: Annotated[
        Path | None, typer.Option(help="A text file that says what the judge looks for.", show_default=False)
    ] = None,
    engine: Engine = "auto",
    trainer: Trainer = "auto",
    tools: Tools = None,
    exclude_tools: Exclude = None,
    allow_destructive: Destructive = False,
    isolate: Isolate = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a server's tools, and show on held-out tasks whether it got better."""
    given = {name: value for name, value in locals().items() if name != "as_json"}
    from mcp_rl.config import TrainConfig, read_options, read_rubric
    from mcp_rl.console import Display
    from mcp_rl.train import train as run_training

    given |= {"tools": tuple(tools) if tools else None, "exclude_tools": tuple(exclude_tools or ())}
    config = read_options(TrainConfig, given | {"judge_rubric": read_rubric(judge_rubric)})
    summary = run(run_training(config, Display(quiet=as_json)))
    if as_json:
        print_json(summary.model_dump(mode="json"))


@app.command(name="eval")
def evaluate(
    server: Server,
    model: Annotated[
        str, typer.Option(help="A run folder, with @STEP for an earlier policy version; or a base model.")
    ],
    scenarios: Annotated[Path, typer.Option(help="A file of `mcp-rl scenarios`; its held-out ones are used.")],
    samples: Annotated[int, typer.Option(min=1, help="Attempts a scenario at temperature 1.")] = 4,
    engine: Engine = "auto",
    seed: Seed = 0,
    tools: Tools = None,
    exclude_tools: Exclude = None,
    allow_destructive: Destructive = False,
    isolate: Isolate = False,
    as_json: AsJson = False,
) -> None:
    """Score a model, trained or not, on held-out scenarios."""
    from mcp_rl.config import read_options
    from mcp_rl.console import Display
    from mcp_rl.evaluate_model import EvalConfig, evaluate_model

    given = {"model": model, "scenarios": scenarios, "samples": samples, "engine": engine, "seed": seed}
    config = read_options(EvalConfig, {**given, "isolate": isolate})
    target = _server(server, tools, exclude_tools, allow_destructive)
    record = run(evaluate_model(target, config, Display(quiet=as_json)))
    if as_json:
        print_json(record.model_dump(mode="json"))
        return
    typer.echo(
        f"reward {record.reward:.3f} ± {record.reward_ci:.3f}   greedy {record.greedy_reward:.3f}   "
        f"solved {record.success:.0%}   {len(record.rollouts)} rollouts"
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")], as_json: AsJson = False
) -> None:
    """Write DIR/report.html again from what the run recorded."""
    from mcp_rl.report import build_report

    path = build_report(folder)
    print_json({"report": str(path)}) if as_json else typer.echo(f"Report: {path}")
