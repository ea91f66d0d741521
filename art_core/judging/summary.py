"""How many groups of a step were judged. Training on the few that were is fine; a step without any is a broken judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from art_core.judging.errors import NothingJudgedError
from art_core.types import TrajectoryGroup

RULER_SCORE = "ruler_score"
"""Trajectory metric: the judge's score."""
INDEPENDENT_REWARD = "independent_reward"
"""Trajectory metric: the reward that it had before it was judged."""
JUDGE_ERROR = "judge_error"
"""Group metadata: why the group is unscored."""


@dataclass(frozen=True)
class JudgeSummary:
    """Figures of a step; `str()` gives "judged 5/8 groups".

    Attributes:
        judged: groups with scores.
        groups: groups with at least one finished rollout.
        reasons: why the others have none, with their number.
        cost: US dollars, failed tries included.
    """

    judged: int
    groups: int
    cost: float
    reasons: dict[str, int] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """For the history of a run."""
        return {"judge/groups": float(self.groups), "judge/judged": float(self.judged), "judge/cost": self.cost}

    def __str__(self) -> str:
        line = f"judged {self.judged}/{self.groups} groups"
        return f"{line} ({next(iter(self.reasons))})" if self.reasons else line


def judge_summary(groups: Iterable[TrajectoryGroup]) -> JudgeSummary:
    """Count the groups that `ruler_score_group` has been given."""
    judgeable = [group for group in groups if group.trajectories]
    judged = [group for group in judgeable if all(RULER_SCORE in t.metrics and t.reward is not None for t in group)]
    reasons = Counter(str(group.metadata[JUDGE_ERROR]) for group in judgeable if JUDGE_ERROR in group.metadata)
    cost = sum(group.metrics.get("judge_cost", 0.0) for group in judgeable)
    return JudgeSummary(len(judged), len(judgeable), cost, dict(reasons.most_common()))


def require_judged(groups: Iterable[TrajectoryGroup]) -> JudgeSummary:
    """The summary of a step, which must have something to learn from.

    Raises:
        NothingJudgedError: there are groups, and not one of them was judged.
    """
    summary = judge_summary(groups)
    if summary.groups and not summary.judged:
        reason = next(iter(summary.reasons), "no reason was given")
        raise NothingJudgedError(f"None of the {summary.groups} groups of this step could be judged: {reason}")
    return summary
