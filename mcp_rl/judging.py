"""RULER as the reward of a run: groups are judged as they finish, and each verdict is on the disk before it counts.

A verdict costs money, so a run that was stopped takes those that it has: they are found by the content of the group, and
a group that was rolled out anew is judged anew. A group that could not be judged is not recorded; the next session asks
again. The verifiable reward stays beside the judge's score in every record, so that the report can say how far they agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from art_core.errors import ConfigError
from art_core.files import append_lines, read_lines
from art_core.judging import DEFAULT_RUBRIC, JudgeError, judge_summary, ruler, ruler_score_group
from art_core.judging.summary import INDEPENDENT_REWARD, RULER_SCORE
from art_core.llm import StructuredLLM
from art_core.llm.cache import content_key
from art_core.types import Trajectory, TrajectoryGroup
from mcp_rl.config import require_judge_extra
from mcp_rl.correlation import spearman
from mcp_rl.preflight import preflight

if TYPE_CHECKING:
    from art_backend import LocalBackend
    from art_core.models import TrainableModel

JUDGEMENTS = "judgements.jsonl"
"""In the run folder."""
LOCAL = "local"
"""As a judge's name: the run's own base model."""
LOCAL_NAME = "judge"
"""The name under which the run's engine serves it."""
LOCAL_LIMITS = {"prompt_chars": 4_500, "max_candidates": 4}
"""What fits into the context of the run's own engine."""
LOCAL_TOKENS = 256
"""Of its verdict; four times as many when that is cut off."""
LOCAL_SECONDS = 600.0
"""For one: a busy CPU is slow, and asking it again would not make it faster."""
RETRIES = 4
"""Of a request to a judge that is busy or gone: about fifteen seconds of waiting."""


class Verdict(BaseModel):
    """One attempt of a judged group. `verifiable`: the reward by rule, None where there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    score: float
    verifiable: float | None
    metrics: dict[str, float]
    log: str


class Judgement(BaseModel):
    """A line of `judgements.jsonl`: a group that was judged. `metrics` are the group's, what it cost among them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    policy: int
    verdicts: list[Verdict]
    metrics: dict[str, float]


def read_judgements(folder: Path) -> list[Judgement]:
    """The judgements of a run, in the order in which they were made; lines that are none are left out."""
    found = []
    for value in read_lines(folder / JUDGEMENTS):
        try:
            found.append(Judgement.model_validate(value))
        except ValidationError:
            continue
    return found


def judge_llm(model: str, url: str | None, api_key: str | None = None, **options: Any) -> StructuredLLM:
    """The endpoint of a judge or generator, with patience for a busy one."""
    return StructuredLLM(model, base_url=url, api_key=api_key, max_retries=RETRIES, max_concurrency=16, **options)


async def require_judge(model: str, url: str | None, *, needed: bool = True) -> None:
    """Raise MissingExtraError or ConfigError unless the judge can be asked. One that is not `needed` any more, or that the
    run will serve itself, is not asked for a sign of life."""
    require_judge_extra()
    if needed and model != LOCAL:
        await preflight(f"--judge {model}", model, url)


@dataclass
class GroupJudge:
    """Scores groups by RULER, and remembers.

    Attributes:
        folder: of the run.
        weight: share of the judge's score in the reward; the rest is the reward that a trajectory has already.
        limits: further arguments of `ruler_score_group`.
    """

    llm: StructuredLLM
    folder: Path
    weight: float = 1.0
    rubric: str = DEFAULT_RUBRIC
    votes: int = 1
    limits: Mapping[str, Any] = field(default_factory=dict)

    async def score(self, group: TrajectoryGroup, policy: int) -> TrajectoryGroup:
        """A copy of `group` with rewards; without any (None) when it cannot be judged, with the reason in its metadata."""
        key = content_key([self.llm.model, self.rubric, self.votes, [trajectory.messages() for trajectory in group]])
        known = self._known.get(key)
        if known is None:
            judged = await ruler_score_group(group, self.llm, rubric=self.rubric, votes=self.votes, **self.limits)
            if any(RULER_SCORE not in trajectory.metrics for trajectory in judged):
                return judged
            known = _judgement(key, policy, judged)
            if group.trajectories:
                append_lines(self.folder / JUDGEMENTS, [known.model_dump(mode="json")])
                self._known[key] = known
        return self._apply(group, known)

    @cached_property
    def _known(self) -> dict[str, Judgement]:
        return {judgement.key: judgement for judgement in read_judgements(self.folder)}

    def _apply(self, group: TrajectoryGroup, judgement: Judgement) -> TrajectoryGroup:
        trajectories = [self._rewarded(t, verdict) for t, verdict in zip(group, judgement.verdicts, strict=True)]
        metrics = {**group.metrics, **judgement.metrics}
        return group.model_copy(update={"trajectories": trajectories, "metrics": metrics})

    def _rewarded(self, trajectory: Trajectory, verdict: Verdict) -> Trajectory:
        own = trajectory.reward
        reward = verdict.score if own is None else self.weight * verdict.score + (1 - self.weight) * own
        update = {
            "reward": reward,
            "metrics": {**trajectory.metrics, **verdict.metrics},
            "logs": [*trajectory.logs, verdict.log],
        }
        return trajectory.model_copy(update=update)


def _judgement(key: str, policy: int, judged: TrajectoryGroup) -> Judgement:
    names = (RULER_SCORE, "ruler_spread", "addresses_judge", INDEPENDENT_REWARD)
    verdicts = [
        Verdict(
            score=t.metrics[RULER_SCORE],
            verifiable=t.metrics.get(INDEPENDENT_REWARD),
            metrics={name: float(t.metrics[name]) for name in names if name in t.metrics},
            log=t.logs[-1],
        )
        for t in judged
    ]
    spent = {name: float(value) for name, value in judged.metrics.items() if name.startswith("judge_")}
    return Judgement(key=key, policy=policy, verdicts=verdicts, metrics=spent)


def judge_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The figures of a step whose groups were given to a judge: how many were judged, at what cost, and how the judge's
    scores and the verifiable rewards go together (over all rollouts of the step)."""
    summary = judge_summary(groups)
    judged = [t.metrics for group in groups for t in group if RULER_SCORE in t.metrics]
    metrics = summary.metrics() | {"judge/addresses_judge": sum(float(m["addresses_judge"]) for m in judged)}
    if judged:
        metrics["judge/score"] = statistics.fmean(m[RULER_SCORE] for m in judged)
    both = [m for m in judged if INDEPENDENT_REWARD in m]
    if both:
        metrics["judge/verifiable"] = statistics.fmean(m[INDEPENDENT_REWARD] for m in both)
        together = spearman([m[RULER_SCORE] for m in both], [m[INDEPENDENT_REWARD] for m in both])
        if together is not None:
            metrics["judge/correlation"] = together
    return metrics


async def open_judge(
    name: str, url: str | None, folder: Path, backend: LocalBackend, model: TrainableModel, **options: Any
) -> GroupJudge:
    """The judge `name` of a run, with `options` of `GroupJudge`.

    `local` is the base model of the registered `model`: the same engine serves it, and training does not change it. The
    engine's context is short, so the prompts are. Raises ConfigError when that model cannot judge.
    """
    if name != LOCAL:
        return GroupJudge(judge_llm(name, url), folder, **options)
    endpoint = await backend.serve_base(model, LOCAL_NAME)
    llm = judge_llm(
        LOCAL_NAME,
        endpoint.base_url,
        endpoint.api_key,
        temperature=0.0,
        max_tokens=LOCAL_TOKENS,
        timeout=LOCAL_SECONDS,
    )
    if not read_judgements(folder):  # it has not judged in this run yet
        await _try_out(llm, model)
    return GroupJudge(llm, folder, limits=LOCAL_LIMITS, **options)


async def _try_out(llm: StructuredLLM, model: TrainableModel) -> None:
    """Raise ConfigError unless a local judge gives a verdict on two short attempts: small models hardly ever do, and that
    is better known now than after the first rollouts."""
    question = {"role": "user", "content": "What is 2 + 2?"}
    attempts = [[question, {"role": "assistant", "content": text}] for text in ("It is 4.", "It is 5.")]
    try:
        await ruler(attempts, llm, prompt_chars=int(LOCAL_LIMITS["prompt_chars"]))
    except JudgeError as error:
        raise ConfigError(
            f"--judge {LOCAL} cannot be used: {model.base_model} gave no verdict on a trial of two short attempts ({error}) "
            "Give a larger --model, or another judge by --judge and --judge-url."
        ) from error
