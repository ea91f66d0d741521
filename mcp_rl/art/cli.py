"""The `art` command: what is not about one MCP server. Thin, like `mcp-rl`: options in, one call, one result out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcp_rl.shell import AsJson, Engine, Trainer, main_of, print_json, run

if TYPE_CHECKING:
    from mcp_rl.art.judge_check import JudgeCheck

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train an agent from one sentence, check a judge, look at this machine. "
    r"Extras: \[judge] to ask models, \[local] to train on this machine: pip install 'art-plugins\[judge,local,mcp]'.",
)
vllm = typer.Typer(no_args_is_help=True, help="The vLLM engine.")
app.add_typer(vllm, name="vllm")

Judge = Annotated[str, typer.Option(help="The judge: litellm's name, e.g. openai/gpt-4.1-mini.", show_default=False)]
JudgeURL = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible server that has the judge.", show_default=False)
]


def main() -> None:
    """Entry point: an expected failure is one sentence and exit code 2."""
    main_of(app)


@app.command(name="judge-check")
def judge_check(
    file: Annotated[
        Path, typer.Argument(help='JSON lines: {"attempts": [{"messages": [...], "label": 0.5}, ...]}.', metavar="FILE")
    ],
    judge: Judge,
    judge_url: JudgeURL = None,
    votes: Annotated[int, typer.Option(min=1, help="Verdicts a group, each in another order.")] = 4,
    rubric: Annotated[
        Path | None, typer.Option(help="A text file that says what the judge looks for.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a judge on labelled groups: rank correlation, position bias, self-consistency, cost."""
    from mcp_rl.art.judge_check import judge_check as check
    from mcp_rl.art.judge_check import read_groups
    from mcp_rl.art.show import show_check
    from mcp_rl.config import read_rubric
    from mcp_rl.judging import judge_llm
    from mcp_rl.preflight import preflight

    groups, text = read_groups(file), read_rubric(rubric)

    async def work() -> JudgeCheck:
        await preflight(f"--judge {judge}", judge, judge_url)
        return await check(groups, judge_llm(judge, judge_url), votes=votes, rubric=text)

    found = run(work())
    print_json(found.as_dict()) if as_json else show_check(found)


@app.command()
def auto(
    task: Annotated[str, typer.Argument(help="What the agent is for, in a sentence.", show_default=False)],
    judge: Annotated[str, typer.Option(help="The judge: litellm's name, or `local`.", show_default=False)],
    generator: Annotated[
        str, typer.Option(help="Writes prompt, inputs and rubric: litellm's name.", show_default=False)
    ],
    tools: Annotated[
        str | None, typer.Option(help="An MCP server whose tools the agent uses.", show_default=False)
    ] = None,
    judge_url: JudgeURL = None,
    generator_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that has the generator.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="smollm2-135m, a Hugging Face id, or a model folder.")] = "smollm2-135m",
    output: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/auto"),
    steps: Annotated[int, typer.Option(min=0, help="GRPO steps.")] = 16,
    num_inputs: Annotated[int, typer.Option(min=2, help="Inputs (with tools: scenarios) to write.")] = 48,
    held_out: Annotated[float, typer.Option(help="Share of them that is kept for evaluation.")] = 1 / 4,
    scenarios_per_step: Annotated[int, typer.Option(min=1, help="Inputs a step.")] = 4,
    group_size: Annotated[int, typer.Option(min=2, help="Attempts at each input of a step.")] = 8,
    judge_votes: Annotated[int, typer.Option(min=1, help="Verdicts a group, each in another order.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Of GRPO (AdamW).")] = 2e-4,
    lora_layers: Annotated[
        int | None, typer.Option(min=1, help="Adapt only the last N layers.", show_default="all")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of an answer.")] = 128,
    eval_samples: Annotated[int, typer.Option(min=1, help="Attempts a held-out input.")] = 2,
    engine: Engine = "auto",
    trainer: Trainer = "auto",
    seed: Annotated[
        int, typer.Option(help="Fixes the order of inputs, sampling and training; not what the models write.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in --output, or set it aside and start anew.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train an agent from one sentence: a model writes its prompt, inputs and rubric, another one judges."""
    given = {name: value for name, value in locals().items() if name != "as_json"}
    import logging

    from mcp_rl.art.auto import auto as run_auto
    from mcp_rl.art.config import AutoConfig
    from mcp_rl.config import read_options
    from mcp_rl.console import Display

    if not as_json:
        logging.getLogger("art_core").setLevel(logging.INFO)  # the steps, where stderr is no terminal
    result = run(run_auto(read_options(AutoConfig, given), Display(quiet=as_json)))
    if as_json:
        print_json(result.as_dict())


@app.command()
def export(
    model: Annotated[
        Path,
        typer.Argument(help="A trained model (.art/PROJECT/models/NAME), or a run folder with one.", metavar="MODEL"),
    ],
    folder: Annotated[Path, typer.Argument(help="The new folder.", metavar="FOLDER")],
    step: Annotated[int | None, typer.Option(min=0, help="Which checkpoint.", show_default="newest")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as a folder of its own, merged, for Transformers or vLLM."""
    from mcp_rl.config import require_local

    require_local()
    from art_backend.export import export_run

    written = export_run(model, folder, step)
    print_json({"folder": str(written)}) if as_json else typer.echo(f"Written to {written}.")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do, what is missing, and how to get it. Exit code 1 when something is."""
    from dataclasses import asdict

    from art_backend.doctor import diagnose
    from mcp_rl.art.show import show_checks

    checks = diagnose()
    print_json([asdict(check) for check in checks]) if as_json else show_checks(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@vllm.command()
def install(
    force: Annotated[bool, typer.Option("--force", help="Install again, over what is there.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where the environment is made.", show_default="in your cache")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install vLLM into an environment of its own, for this machine: the CUDA build on a GPU, else the CPU build."""
    import logging

    from mcp_rl.config import require_local

    require_local()
    from art_backend.vllm import install as install_vllm

    logging.getLogger("art_core").setLevel(logging.INFO)  # minutes without a word look like a hang, also in a CI log
    found = install_vllm(force=force, folder=folder)
    if as_json:
        print_json({"python": str(found.python), "version": found.version, "cpu_build": found.cpu_build})
        return
    typer.echo(f"vLLM {found.version} ({'CPU' if found.cpu_build else 'CUDA'} build): {found.python}")
    if folder is not None:
        typer.echo(f"Use it with: export ART_VLLM_PYTHON={found.python}")
