"""RULER: scores for message lists, and for a group whose rewards they become.

A group that cannot be judged is unscored: its rewards are None, the reason is in its metadata and log, its cost in its
metrics, and training skips it. It is never 0, and never stops the other groups of the step; `require_judged` stops a step
in which no group was judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from art_core.errors import ConfigError
from art_core.judging.candidate import Candidate, merge_tools
from art_core.judging.errors import JudgeError
from art_core.judging.injection import addresses_judge
from art_core.judging.panel import Judgement, Opinion, Panel, judge_group
from art_core.judging.rubric import DEFAULT_RUBRIC
from art_core.judging.summary import INDEPENDENT_REWARD, JUDGE_ERROR, RULER_SCORE
from art_core.judging.verdict import TrajectoryScore
from art_core.llm.structured import StructuredLLM
from art_core.llm.usage import Usage
from art_core.types import Tools, Trajectory, TrajectoryGroup

Judge = str | StructuredLLM
"""A litellm model name, or an endpoint with limits and cache of its own."""


async def ruler(
    message_lists: Sequence[Sequence[Any]],
    judge_model: Judge | Sequence[Judge] = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
    votes: int = 1,
    max_candidates: int = 10,
    prompt_chars: int = 60_000,
) -> list[TrajectoryScore]:
    """Scores of attempts at one task, in the order given; `trajectory_id` is the place, from "1".

    Args:
        message_lists: one list of chat messages for each attempt.
        judge_model: `openai/o3`, any other model of litellm's, a `StructuredLLM`, or several of these.
        extra_litellm_params: for judges named by a string: `base_url`, `api_key`, `timeout`, ... (see `StructuredLLM`).
        rubric: what the judge looks for.
        tools: OpenAI definitions of the tools that the agent had.
        debug: write prompts and verdicts to stderr.
        votes: how often each judge is asked, with the attempts in another order each time; the mean counts.
        max_candidates: attempts shown at once; more are cut into batches that are tied together.
        prompt_chars: characters of a prompt at most (about four a token): long texts are cut alike in all attempts.

    Raises:
        JudgeError: no verdict could be had.
    """
    panel = Panel(
        judges=_judges(judge_model, extra_litellm_params),
        rubric=rubric,
        votes=votes,
        max_candidates=max_candidates,
        prompt_chars=prompt_chars,
        debug=debug,
    )
    judgement = await judge_group(panel, [Candidate.of_messages(messages) for messages in message_lists], tools or [])
    return [
        TrajectoryScore(trajectory_id=str(place), explanation=opinion.explanation, score=opinion.score)
        for place, opinion in enumerate(judgement.opinions, start=1)
    ]


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: Judge | Sequence[Judge] = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    votes: int = 1,
    max_candidates: int = 10,
    prompt_chars: int = 60_000,
) -> TrajectoryGroup:
    """A copy of `group` whose rewards are the judge's scores. Fit for `after_each` of `gather_trajectory_groups`.

    Of each trajectory, `metrics["independent_reward"]` keeps the reward it had, `metrics["ruler_score"]` and `reward` get
    the score, `metrics["ruler_spread"]` the standard deviation of the votes, `metrics["addresses_judge"]` whether its text
    talks to the judge, and its log the explanation. The group's metrics get `judge_cost` (US dollars), `judge_requests`,
    `judge_prompt_tokens`, `judge_completion_tokens` and `judge_votes`; what else the group holds stays.

    An endpoint that does not answer, or a judge that gives no valid verdict, leaves the group unscored: rewards None, the
    reason in `metadata["judge_error"]` and the logs.

    Args:
        swallow_exceptions: leave the group unscored, too, when something else fails (a missing package, a wrong option),
            instead of raising. The other arguments are those of `ruler`.
    """
    if not group.trajectories:
        return group
    try:
        panel = Panel(
            judges=_judges(judge_model, extra_litellm_params),
            rubric=rubric,
            votes=votes,
            max_candidates=max_candidates,
            prompt_chars=prompt_chars,
            debug=debug,
        )
        candidates = [Candidate.of_trajectory(trajectory) for trajectory in group]
        tools = merge_tools(candidate.tools for candidate in candidates)
        judgement = await judge_group(panel, candidates, tools)
    except JudgeError as error:
        return _unscored(group, str(error), error.usage)
    except Exception as error:
        if not swallow_exceptions:
            raise
        return _unscored(group, f"{type(error).__name__}: {error}", Usage())
    return _scored(group, candidates, judgement)


def _judges(judge: Judge | Sequence[Judge], params: Mapping[str, Any] | None) -> list[StructuredLLM]:
    listed = [judge] if isinstance(judge, (str, StructuredLLM)) else list(judge)
    if params and not any(isinstance(one, str) for one in listed):
        raise ConfigError("extra_litellm_params are for judges named by a string: give them to the StructuredLLM.")
    return [StructuredLLM(one, **(params or {})) if isinstance(one, str) else one for one in listed]


def _scored(group: TrajectoryGroup, candidates: Sequence[Candidate], judgement: Judgement) -> TrajectoryGroup:
    trajectories = [
        _with_opinion(trajectory, candidate, opinion)
        for trajectory, candidate, opinion in zip(group, candidates, judgement.opinions, strict=True)
    ]
    lost = [f"a judge's vote is missing: {failure}" for failure in judgement.failures]
    return group.model_copy(
        update={
            "trajectories": trajectories,
            "metrics": {**group.metrics, **_spent(judgement.usage), "judge_votes": judgement.votes},
            "logs": [*group.logs, *lost],
        }
    )


def _with_opinion(trajectory: Trajectory, candidate: Candidate, opinion: Opinion) -> Trajectory:
    metrics = {
        **_kept(trajectory),
        RULER_SCORE: opinion.score,
        "ruler_spread": opinion.spread,
        "addresses_judge": float(addresses_judge(candidate)),
    }
    line = f"RULER {opinion.score:.3f}: {opinion.explanation}"
    return trajectory.model_copy(update={"reward": opinion.score, "metrics": metrics, "logs": [*trajectory.logs, line]})


def _unscored(group: TrajectoryGroup, reason: str, usage: Usage) -> TrajectoryGroup:
    trajectories = [t.model_copy(update={"reward": None, "metrics": _kept(t)}) for t in group]
    return group.model_copy(
        update={
            "trajectories": trajectories,
            "metrics": {**group.metrics, **_spent(usage), "judge_votes": 0},
            "metadata": {**group.metadata, JUDGE_ERROR: reason},
            "logs": [*group.logs, f"not judged: {reason}"],
        }
    )


def _kept(trajectory: Trajectory) -> dict[str, float | int | bool]:
    had = {} if trajectory.reward is None else {INDEPENDENT_REWARD: trajectory.reward}
    return {**had, **trajectory.metrics}  # of a group that is judged again, the first reward stays


def _spent(usage: Usage) -> dict[str, float | int | bool]:
    return {
        "judge_cost": usage.cost,
        "judge_requests": usage.requests,
        "judge_prompt_tokens": usage.prompt_tokens,
        "judge_completion_tokens": usage.completion_tokens,
    }
