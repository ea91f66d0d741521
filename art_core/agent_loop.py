"""`train_agent`: one training loop for every framework. The caller brings an agent, scenarios and a reward.

    validate -> (roll out groups, train, serve the new version) x steps -> validate

What a run has reached is read off the model alone: its policy version gives the step, which gives the scenarios, and
rollouts that were recorded for a step under way are used rather than made again. So the same call continues a run that
was stopped anywhere, and returns at once when the run is finished.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from art_core.agent_rollout import AgentRunner
from art_core.agent_run import AgentRun, AgentStep, ScoreGroup
from art_core.backend import Backend
from art_core.errors import ConfigError
from art_core.models import TrainableModel
from art_core.types import Trajectory

S = TypeVar("S")
FIRST_STEP = "train_agent/first_step"
"""History entry: the policy version at which training by `train_agent` began; supervised steps may precede it."""


@dataclass(frozen=True)
class TrainAgentResult:
    """What `train_agent` did.

    `step` is the policy version that now serves; `steps` are those of this call, not those of the runs that it
    continued. The validation rewards are means over the scored rollouts: None without `validation` (or a scored rollout),
    and `validation_before` also when the run began without it.
    """

    step: int
    steps: tuple[AgentStep, ...] = ()
    validation_before: float | None = None
    validation_after: float | None = None
    checkpoint_path: Path | None = None


async def train_agent(
    agent: Callable[[TrainableModel, S], Any],
    scenarios: Sequence[S],
    reward: Callable[[S, Any, Trajectory], Any] | None,
    backend: Backend,
    *,
    model: TrainableModel,
    steps: int,
    group_size: int = 8,
    scenarios_per_step: int = 4,
    score_group: ScoreGroup | None = None,
    validation: Sequence[S] = (),
    train_only: Collection[str] | None = None,
    max_exceptions: float = 0.25,
    concurrency: int = 32,
    seed: int = 0,
    **train_options: Any,
) -> TrainAgentResult:
    """Train the model of `agent` by GRPO, `steps` steps in all, those of earlier calls included.

    Args:
        agent: `agent(model, scenario)` runs the agent once on `model`, sync (then in a thread) or async. Its model calls
            are captured; what it returns goes to `reward` as it is.
        scenarios: what to attempt, of any type whose `repr` tells one from another.
        reward: `reward(scenario, outcome, trajectory)`, sync or async, gives a number, rewards by role (a dict), or None
            for a rollout that cannot be scored. None instead of a function: `score_group` does it.
        backend: serves and trains the model; `model` is registered with it unless it is already.
        group_size: attempts at each scenario of a step.
        scenarios_per_step: scenarios of a step: slices of seeded permutations of all, one after the other.
        score_group: gives (or awaits) each group of a step with the rewards that it is to be trained on, where attempts are
            compared with each other: `lambda group: ruler_score_group(group, judge)`. Validation is not given to it.
        validation: attempted once each (list them repeatedly for a steadier mean) before and after training.
        train_only: roles whose calls are trained (see `art_core.role`); None: all.
        max_exceptions: failed rollouts of a step that are tolerated: a count, or a share between 0 and 1.
        concurrency: rollouts at once.
        train_options: options of the backend's training step.

    Raises:
        ConfigError: an option is out of range, or the model has more than `steps` steps already.
        TooManyExceptionsError: more rollouts of a step failed. Those that did not are used when the run is continued.
        NothingJudgedError: `score_group` gave no reward to any group of a step. What was rolled out is used then, too.
    """
    if reward is None and score_group is None:
        raise ConfigError("reward is None and there is no score_group: give one of them.")
    _check(scenarios, train_only, steps=(steps, 0), group_size=(group_size, 2), concurrency=(concurrency, 1),
           scenarios_per_step=(scenarios_per_step, 1))  # fmt: skip
    if not model.registered_with(backend):
        await model.register(backend)
    first = _first_step(model, await model.get_step())
    if (made := await model.get_step() - first) > steps:
        raise ConfigError(f"{model.name} has {made} steps already: give steps={made} or more, or another model name.")
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="art-rollout")
    options = train_options if train_only is None else {**train_options, "train_only": frozenset(train_only)}
    try:
        runner = AgentRunner(agent, reward or (lambda *_: None), model, threads)
        run = AgentRun(runner, model, asyncio.Semaphore(concurrency), max_exceptions, options, score_group)
        before = await run.validate(validation, first)
        taken = []
        while (index := await model.get_step() - first) < steps:
            chosen = choose(len(scenarios), scenarios_per_step, index, seed)
            taken.append(await run.step([(number, scenarios[number]) for number in chosen], group_size, index, steps))
        after = await run.validate(validation, first + steps)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return TrainAgentResult(first + steps, tuple(taken), before, after, run.checkpoint)


def choose(total: int, count: int, index: int, seed: int) -> list[int]:
    """The `count` scenarios (numbers below `total`) of step `index`: consecutive slices of an endless sequence of seeded
    permutations, without a repetition within a step."""
    count = min(count, total)
    chosen: list[int] = []
    position = index * count
    while len(chosen) < count:
        epoch, offset = divmod(position, total)
        candidate = random.Random(f"{seed}/{epoch}").sample(range(total), total)[offset]
        if candidate not in chosen:  # where two permutations meet
            chosen.append(candidate)
        position += 1
    return chosen


def _first_step(model: TrainableModel, current: int) -> int:
    """The version at which the run began; on the first call that is `current`, and it is recorded."""
    for record in model.store.history():
        if FIRST_STEP in record:
            return int(record[FIRST_STEP])
    model.store.append_history({"step": current, "time": time.time(), FIRST_STEP: current})
    return current


def _check(scenarios: Sequence[Any], train_only: Any, **limits: tuple[int, int]) -> None:
    if not scenarios:
        raise ConfigError("scenarios is empty: give at least one to train on.")
    if isinstance(train_only, str):
        raise ConfigError(f"train_only={train_only!r} is a name: give a collection of role names, {{{train_only!r}}}.")
    for name, (value, least) in limits.items():
        if value < least:
            raise ConfigError(f"{name}={value} is too small: give at least {least}.")
