"""Options of `art auto` in one typed place."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from mcp_rl.config import RunOptions, TrainConfig


class AutoConfig(RunOptions):
    """What to train from one sentence, and how."""

    task: str = Field(min_length=1)
    """What the agent is for, in a sentence."""
    judge: str
    generator: str
    generator_url: str | None = None
    """An OpenAI-compatible server that has the generator; None: the provider's own."""
    tools: str | None = None
    """An MCP server whose tools the agent uses; None: an agent that answers in one message."""
    output: Path = Path("runs/auto")
    model: str = "smollm2-135m"
    steps: int = Field(default=16, ge=0)
    num_inputs: int = Field(default=48, ge=2)
    """Inputs (with tools: scenarios) that the generator writes."""
    held_out: float = Field(default=1 / 4, gt=0, lt=1)
    """The share of them that is only evaluated on."""
    scenarios_per_step: int = Field(default=4, ge=1)
    group_size: int = Field(default=8, ge=2)
    judge_votes: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=2e-4, gt=0)
    lora_layers: int | None = Field(default=None, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    eval_samples: int = Field(default=2, ge=1)
    """Attempts a held-out input that the judge compares, of the base model and of the trained one."""
    seed: int = 0

    def train_config(self, server: str, scenarios: Path, system_prompt: str, rubric: str) -> TrainConfig:
        """The options of `mcp-rl train` for the same run on a server's tools."""
        same = [
            *("judge", "judge_url", "judge_votes", "output", "model", "steps", "scenarios_per_step", "group_size"),
            *("learning_rate", "lora_layers", "max_tokens", "engine", "trainer", "seed"),
        ]
        return TrainConfig(
            server=server,
            scenarios=scenarios,
            system_prompt=system_prompt,
            judge_rubric=rubric,
            eval_samples=self.eval_samples,
            **{name: getattr(self, name) for name in same},
        )
