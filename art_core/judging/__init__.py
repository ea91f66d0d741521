"""RULER: a language model compares the attempts of a group, and its scores become their rewards."""

from art_core.judging.errors import JudgeError, NothingJudgedError
from art_core.judging.rubric import DEFAULT_RUBRIC, make_rubric
from art_core.judging.score import ruler, ruler_score_group
from art_core.judging.summary import JudgeSummary, judge_summary, require_judged
from art_core.judging.verdict import TrajectoryScore

__all__ = [
    "DEFAULT_RUBRIC",
    "JudgeError",
    "JudgeSummary",
    "NothingJudgedError",
    "TrajectoryScore",
    "judge_summary",
    "make_rubric",
    "require_judged",
    "ruler",
    "ruler_score_group",
]
