"""`mcp-rl eval`: score any model, trained here or not, on the held-out scenarios of a file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from art_core.errors import ConfigError
from mcp_rl.client import MCPServer
from mcp_rl.config import MAX_MODEL_LEN, EngineName, TrainConfig, require_local
from mcp_rl.console import Display, quiet_libraries
from mcp_rl.evaluate import evaluate
from mcp_rl.records import EvalRecord, Stage
from mcp_rl.rollout import RolloutConfig, load_agent
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios import load


class EvalConfig(BaseModel):
    """What to score, on which scenarios, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """`RUN[@STEP]`, or a base model."""
    scenarios: Path
    samples: int = Field(default=4, ge=1)
    """Attempts a scenario at temperature 1."""
    seed: int = 0
    isolate: bool = False
    engine: EngineName = "auto"


@dataclass(frozen=True)
class Candidate:
    """What is to be scored: a base model, or a policy version of a run with the limits that the run's rollouts had."""

    base_model: str
    adapter: Path | None = None
    lora_rank: int = TrainConfig.model_fields["lora_rank"].default
    step: int = 0
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    concurrency: int = TrainConfig.model_fields["concurrency"].default


def parse_model(text: str) -> Candidate:
    """Read `RUN[@STEP]`, or the name of a base model.

    Raises:
        ConfigError: the run has no such step.
    """
    name, _, step = text.partition("@")
    folder = RunFolder(Path(name))
    if not folder.model_folder.is_dir() or (recorded := folder.read_config()) is None:  # a model has a config.json too
        return Candidate(text)
    from art_backend.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder.model_folder / "checkpoints")
    steps = checkpoints.steps()
    if not steps or (step and (not step.isdigit() or int(step) not in steps)):
        raise ConfigError(
            f"{name} has no policy version {step or '(none at all)'}: it has {', '.join(map(str, steps)) or 'none'}."
        )
    version = int(step) if step else steps[-1]
    options = {name: value for name, value in recorded.items() if name in TrainConfig.model_fields}
    config = TrainConfig.model_validate(options)  # the record says more: versions, when it began
    adapter, rank = checkpoints.path(version), checkpoints.rank(version)
    return Candidate(config.model, adapter, rank, version, config.rollout(), config.concurrency)


async def evaluate_model(server: MCPServer, config: EvalConfig, display: Display) -> EvalRecord:
    """Serve the model and attempt every held-out scenario (all of them, if the file marks none as held out)."""
    require_local()
    from art_backend.vllm.choice import check_engine, make_engine

    check_engine(config.engine)
    candidate = parse_model(config.model)
    loaded = load(config.scenarios)
    chosen = [scenario for scenario in loaded if scenario.split == "held_out"] or loaded
    async with server:
        from art_core.models import Model

        quiet_libraries()
        engine = await asyncio.to_thread(
            make_engine,
            config.engine,
            candidate.base_model,
            max_batch_size=candidate.concurrency,
            max_model_len=MAX_MODEL_LEN,
            lora_rank=candidate.lora_rank,
        )
        await engine.start()
        try:
            name = f"agent@{candidate.step}"
            await engine.publish(name, candidate.adapter)
            endpoint = Model(
                name="agent", project="mcp-rl", inference_base_url=engine.base_url, inference_api_key=engine.api_key
            )
            return await evaluate(
                await load_agent(endpoint.openai_client(), name, server.tools, candidate.base_model, candidate.limits),
                server,
                chosen,
                stage=Stage.AFTER if candidate.adapter else Stage.BASE,
                step=candidate.step,
                samples=config.samples,
                seed=config.seed,
                display=display,
                isolate=config.isolate,
            )
        finally:
            await engine.close()
