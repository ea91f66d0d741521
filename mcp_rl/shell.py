"""What the commands share: how they end, how they are stopped, how they answer machines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer

from art_core.errors import ARTError

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, for machines.")]
Engine = Annotated[
    str, typer.Option(help="What samples: transformers, vllm (see `art vllm install`), or what fits this machine.")
]
Trainer = Annotated[str, typer.Option(help="What trains: peft, unsloth, or what fits this machine.")]


def main_of(app: typer.Typer) -> None:
    """Run a command line: an expected failure is one sentence and exit code 2."""
    # litellm would ask a host of its own for prices when it is imported, for up to ten seconds without a network. Set to
    # "False" it does; else a model that is newer than the installed litellm costs $0.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        app()
    except ARTError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. Ctrl-C cancels it, lets it clean up, and exits with code 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:  # caught here: typer would end without a word
        typer.echo("Stopped. Nothing is lost: the same command goes on from here.", err=True)
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    """Write a result to stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
