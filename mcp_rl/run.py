"""A run under way, and how it is opened: connect first, load the model last, so that a wrong URL costs no model load."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from art_core.errors import ConfigError
from art_core.judging import DEFAULT_RUBRIC
from mcp_rl.config import MAX_MODEL_LEN, TrainConfig
from mcp_rl.console import Display, quiet_libraries
from mcp_rl.judging import GroupJudge, judge_llm, open_judge
from mcp_rl.rollout import Agent, load_agent
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios import KINDS, MIX, Scenario, generate, load, save
from mcp_rl.scenarios.make import written

if TYPE_CHECKING:
    from art_backend import LocalBackend
    from art_core.models import TrainableModel
    from mcp_rl.client import MCPServer


@dataclass
class Run:
    """A run under way: everything its phases share."""

    config: TrainConfig
    folder: RunFolder
    server: MCPServer
    scenarios: list[Scenario]
    backend: LocalBackend
    model: TrainableModel
    agent: Agent
    display: Display
    judge: GroupJudge | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def first_step(self) -> int:
        """The policy version that enters GRPO: 0 is the bare model, the warm-up makes version 1."""
        return 1 if self.config.warmup_steps else 0

    def split(self, name: str) -> list[Scenario]:
        """The scenarios of `train` or `held_out`."""
        return [scenario for scenario in self.scenarios if scenario.split == name]


@asynccontextmanager
async def open_run(config: TrainConfig, folder: RunFolder, display: Display) -> AsyncIterator[Run]:
    """Everything that a run needs, closed again at the end."""
    from art_backend.trainer_choice import check_trainer
    from art_backend.vllm.choice import check_engine
    from mcp_rl.client import MCPServer

    check_engine(config.engine)
    check_trainer(config.trainer)

    server = MCPServer(
        config.server,
        connect_timeout=config.connect_timeout,
        call_timeout=config.call_timeout,
        tools=config.tools,
        exclude=config.exclude_tools,
        allow_destructive=config.allow_destructive,
    )
    async with server:
        scenarios = await _load_scenarios(config, folder, server, display)
        from art_backend import AdapterConfig, LocalBackend
        from art_backend.base_model import resolve
        from art_backend.threads import in_own_thread
        from art_core.models import TrainableModel

        quiet_libraries()
        await in_own_thread(resolve, config.model)  # fetched or refused before anything is written
        folder.write_config(config)
        backend = LocalBackend(
            adapter=AdapterConfig(r=config.lora_rank, alpha=2 * config.lora_rank, last_layers=config.lora_layers),
            engine=config.engine,
            trainer=config.trainer,
            max_batch_size=config.concurrency,
            max_model_len=MAX_MODEL_LEN,
            seed=config.seed,
        )
        async with backend:
            model = TrainableModel(name="agent", project="mcp-rl", base_model=config.model, base_path=config.output)
            display.line(f"Loading {config.model} ...", style="dim")
            await model.register(backend)
            agent = await load_agent(model.openai_client(), model.name, server.tools, config.model, config.rollout())
            judge = await _judge(config, backend, model)
            yield Run(config, folder, server, scenarios, backend, model, agent, display, judge)


async def _judge(config: TrainConfig, backend: LocalBackend, model: TrainableModel) -> GroupJudge | None:
    if config.judge is None:
        return None
    return await open_judge(
        config.judge,
        config.judge_url,
        config.output,
        backend,
        model,
        weight=config.judge_weight,
        rubric=config.judge_rubric or DEFAULT_RUBRIC,
        votes=config.judge_votes,
    )


async def _load_scenarios(
    config: TrainConfig, folder: RunFolder, server: MCPServer, display: Display
) -> list[Scenario]:
    """Those of the run if it has some, else those of the given file, else new ones."""
    source = folder.scenarios if folder.scenarios.exists() else config.scenarios
    if source is not None:
        scenarios = load(source)
    elif config.generator is not None:
        display.line(f"{config.generator} writes scenarios, and the server is asked to check them ...", style="dim")
        scenarios = await written(
            server,
            judge_llm(config.generator, config.generator_url),
            folder.scenarios.with_suffix(".partial.jsonl"),
            num=config.num_scenarios,
            seed=config.seed,
            held_out=config.held_out,
            max_calls=config.max_calls,
        )
    else:
        display.line("Making scenarios from the server's schemas ...", style="dim")
        kinds = [kind for kind in MIX if KINDS.index(kind) < config.max_calls]
        scenarios = await generate(
            server, num=config.num_scenarios, seed=config.seed, held_out=config.held_out, kinds=kinds
        )
    counts = {name: sum(s.split == name for s in scenarios) for name in ("train", "held_out")}
    if not all(counts.values()):
        raise ConfigError(
            f"{counts['train']} train and {counts['held_out']} held-out scenarios are too few to train on: "
            "give a server with more tools or values, or a --scenarios file with both splits."
        )
    unknown = {call.tool for s in scenarios for call in s.calls} - {tool.name for tool in server.tools}
    if unknown:
        raise ConfigError(
            f"The scenarios call {sorted(unknown)[0]!r}, which {server.name} does not offer: make new ones."
        )
    save(folder.scenarios, scenarios)
    display.line(
        f"{server.name}: {len(server.tools)} tools over {server.transport} · {len(scenarios)} scenarios, "
        f"{counts['train']} to train on, {counts['held_out']} held out"
    )
    return scenarios
