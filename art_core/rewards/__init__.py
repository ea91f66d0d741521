"""Rewards that can be computed (match, regular expression, JSON field, running code), their weighted sum, and RULER."""

from art_core.judging import ruler, ruler_score_group
from art_core.rewards.base import Reward, WeightedSum, apply_reward, evaluate
from art_core.rewards.code import CodeReward
from art_core.rewards.match import ExactMatch, JSONField, RegexMatch
from art_core.rewards.sandbox import Run, RunStatus, Sandbox

__all__ = [
    "CodeReward",
    "ExactMatch",
    "JSONField",
    "RegexMatch",
    "Reward",
    "Run",
    "RunStatus",
    "Sandbox",
    "WeightedSum",
    "apply_reward",
    "evaluate",
    "ruler",
    "ruler_score_group",
]
