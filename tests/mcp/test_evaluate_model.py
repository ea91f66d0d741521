"""`mcp-rl eval`: the candidate gets the engine that was asked for, with the limits of its run. Real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcp_rl.client import MCPServer
from mcp_rl.config import TrainConfig
from mcp_rl.console import Display
from mcp_rl.evaluate_model import EvalConfig, evaluate_model, parse_model
from mcp_rl.records import Stage
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios import save
from tests.commands import run_command
from tests.mcp.test_evaluate import task, toolbox

SQL_SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"
RANK = 32
"""Above what vLLM is started for unless it is told."""


def run_of(folder: Path, base_model: Path) -> Path:
    """A run folder whose policy version 0 has a fresh adapter of rank 32: it computes what the base model does."""
    import torch
    from transformers import AutoModelForCausalLM

    from art_backend.adapter_files import attach_adapter, save_adapter
    from art_backend.checkpoints import Checkpoints
    from art_backend.config import AdapterConfig

    config = TrainConfig(server="s", model=str(base_model), output=folder, concurrency=3, max_tokens=16, max_turns=2)
    run = RunFolder(folder)
    run.write_config(config)
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    adapter = attach_adapter(model, str(base_model), AdapterConfig(r=RANK, alpha=RANK), seed=0)
    Checkpoints(run.model_folder / "checkpoints").write(0, lambda path: save_adapter(path, adapter))
    return folder


def scenarios_of(path: Path) -> Path:
    save(path, [task("easy"), task("hard")])
    return path


def test_a_run_is_served_with_the_limits_and_the_rank_that_it_was_trained_with(
    tiny_llama: Path, tmp_path: Path
) -> None:
    candidate = parse_model(str(run_of(tmp_path / "run", tiny_llama)))
    assert (candidate.base_model, candidate.step) == (str(tiny_llama), 0)
    assert (candidate.lora_rank, candidate.concurrency, candidate.limits.max_tokens) == (RANK, 3, 16)


def test_a_base_model_is_served_with_the_limits_that_a_new_run_has(tiny_llama: Path) -> None:
    candidate, new = parse_model(str(tiny_llama)), TrainConfig(server="s")
    assert (candidate.lora_rank, candidate.concurrency, candidate.limits) == (16, new.concurrency, new.rollout())


async def test_the_embedded_engine_scores_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    options = EvalConfig(
        model=str(run_of(tmp_path / "run", tiny_llama)),
        scenarios=scenarios_of(tmp_path / "scenarios.jsonl"),
        samples=1,
        engine="transformers",
    )
    record = await evaluate_model(MCPServer(toolbox()), options, Display(quiet=True))
    assert (record.stage, record.step, len(record.rollouts)) == (Stage.AFTER, 0, 2 * (1 + 1))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_vllm_scores_a_run_on_the_example_server(smollm2: Path, tmp_path: Path) -> None:
    from art_backend.vllm import find_interpreter
    from art_core.errors import EngineError

    try:
        if find_interpreter() is None:
            pytest.skip("no vLLM: run `art vllm install`, or name a Python that has it in $ART_VLLM_PYTHON")
    except EngineError as error:
        pytest.skip(str(error))
    scenarios = tmp_path / "scenarios.jsonl"
    options = ["-m", "mcp_rl", "scenarios", "--server", str(SQL_SERVER), "--num", "4", "--held-out", "0.5"]
    assert run_command([*options, "--out", str(scenarios)], timeout=60).returncode == 0
    options = ["-m", "mcp_rl", "eval", "--server", str(SQL_SERVER), "--scenarios", str(scenarios), "--engine", "vllm"]
    run = run_of(tmp_path / "run", smollm2)
    done = run_command([*options, "--model", str(run), "--samples", "1", "--json"], timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert len(record["rollouts"]) == 2 * (1 + 1)
    assert all(rollout["completion_tokens"] > 0 for rollout in record["rollouts"])
