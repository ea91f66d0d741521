"""The outcome in words. A rise is called one only where it exceeds the noise; what is missing is said, not left out."""

from __future__ import annotations

from mcp_rl.console import clock
from mcp_rl.records import EvalRecord, Stage
from mcp_rl.report.data import RunData
from mcp_rl.report.stats import gain


def headline(data: RunData) -> str:
    """One sentence: whether the held-out reward rose."""
    before, after = data.before, data.after
    if after is None:
        return f"This run is not finished: {steps_done(data)}, and no evaluation after training yet."
    time = clock(data.seconds).replace(" ", "\u00a0")  # never broken over two lines
    cost = f"in {_count(_steps(data), 'GRPO step')}, {time} in all"
    if before is None:
        return f"Held-out reward is {after.reward:.2f} {cost}; what it was before GRPO is not recorded."
    change = after.reward - before.reward
    if change == 0:
        return f"Held-out reward stayed at {after.reward:.2f} {cost}."
    moved = f"from {_pair(before.reward, after.reward)}"
    paired = gain(before, after)
    if paired is not None and paired.ci is None:
        return f"Held-out reward went {moved} {cost}: measured on a single scenario, this shows nothing."
    if paired is not None and paired.ci is not None and abs(change) <= paired.ci:
        return (
            f"Held-out reward did not clearly change: it went {moved} {cost}, "
            f"which is within the noise (± {paired.ci:.2f})."
        )
    return f"Held-out reward {'rose' if change > 0 else 'fell'} {moved} {cost}."


def story(data: RunData) -> list[str]:
    """Paragraphs for below the headline: what was trained, what changed, and which part did what."""
    return [paragraph for paragraph in (_setting(data), _rewarded(data), _outcome(data)) if paragraph]


def _setting(data: RunData) -> str:
    told = f"{data.config.model} was trained by GRPO to use {_tools(data)}."
    if data.scenarios:
        train, held_out = (sum(s.split == split for s in data.scenarios) for split in ("train", "held_out"))
        told += (
            f" It trained on {_count(train, 'scenario')} and was measured on {_count(held_out, 'scenario')} that it never "
            "saw in training."
        )
    return told


def _rewarded(data: RunData) -> str:
    """What the reward of training was, where it was not what the evaluations measure."""
    options = data.config.model_dump()
    if (judge := options.get("judge")) is None:
        return ""
    weight = float(options.get("judge_weight", 1.0))
    share = "was" if weight == 1 else f"was to {weight:.0%}"
    told = (
        f"In training the reward {share} the score that the judge {judge} gave; the held-out figures here are the "
        "verifiable reward, by rule."
    )
    if data.comparison is not None:
        sentence = data.comparison.sentence()
        told += f" Shown the held-out attempts of before and after GRPO side by side, {sentence}."
    return told


def _outcome(data: RunData) -> str:
    base, before, after = data.evals.get(Stage.BASE), data.before, data.after
    told = []
    if base is not None and before is not None:
        told.append(
            f"The bare model scored {base.reward:.2f}; a supervised warm-up on the train scenarios brought it to "
            f"{_reached(base, before)}."
        )
    if before is not None and after is not None:
        paired = gain(before, after)
        if paired is not None and paired.ci is not None:
            told.append(
                f"Compared scenario by scenario, GRPO {'alone ' if base else ''}changed the reward by "
                f"{_signed(paired.mean)} ± {paired.ci:.2f} (95% interval, {paired.n} scenarios)."
            )
        told.append(
            f"{before.success:.0%} of the held-out attempts were solved before GRPO, {after.success:.0%} after it."
        )
    return " ".join(told)


def warnings(data: RunData) -> list[str]:
    """What a reader must know before trusting the numbers."""
    told = [f"Not evaluated yet: {data.title(stage)}." for stage in data.stages if stage not in data.evals]
    if len(data.steps) < data.planned_steps:
        told.append(f"Steps: {steps_done(data)}.")
    reached = data.before.step + len(data.steps) if data.before else 0
    if data.after is not None and data.after.step < reached:
        told.append(
            f"The evaluation after GRPO is of policy version {data.after.step}, but the run has gone on to {reached}."
        )
    untrained = [step for step in data.steps if not step.trained]
    if untrained:
        why = f" ({untrained[-1].reason})" if untrained[-1].reason else ""
        told.append(f"{_count(len(untrained), 'GRPO step')} could not train{why}.")
    failed = sum(step.exceptions for step in data.steps)
    if failed:
        told.append(
            f"{_count(failed, 'rollout')} failed for reasons outside the model. They were not scored or trained on."
        )
    if not data.scenarios:
        told.append("The scenarios of this run are not recorded.")
    if data.tools is None:
        told.append("The tools of the server are not recorded yet.")
    return told


def steps_done(data: RunData) -> str:
    """e.g. `5 of 16 GRPO steps are recorded`."""
    return f"{len(data.steps)} of {_count(data.planned_steps, 'GRPO step')} are recorded"


def _steps(data: RunData) -> int:
    return len(data.steps) or (data.summary.steps if data.summary else data.config.steps)


def _tools(data: RunData) -> str:
    if data.tools is None:
        return f"the tools of {data.config.server}"
    return f"the {_count(len(data.tools.tools), 'tool')} of the MCP server {data.tools.name}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _pair(first: float, last: float) -> str:
    """`0.31 to 0.72 (+0.41)`, with a third digit where two would hide the difference."""
    digits = 2 if abs(last - first) >= 0.01 else 3
    return f"{first:.{digits}f} to {last:.{digits}f} ({_signed(last - first, digits)})"


def _reached(first: EvalRecord, last: EvalRecord) -> str:
    """e.g. `0.46 (+0.15)`."""
    return _pair(first.reward, last.reward).split(" to ")[1]
