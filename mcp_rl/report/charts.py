"""Matplotlib charts as inline SVG that follows the page: its font, its colours, light and dark.

Charts are drawn in placeholder colours, which become CSS variables in the SVG text. Ids get a prefix, since several
charts share one document, and nothing in the SVG names an address. Only the object-oriented API is used, and settings
hold for the chart alone: the caller's own plots are not touched.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mcp_rl.records import Stage
from mcp_rl.report.data import RunData
from mcp_rl.report.judge import JudgeStep
from mcp_rl.report.stats import Row, moving_average
from mcp_rl.results import sanitise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, LINE = "#0a0b0c", "#0a0b0d"
STAGE_COLOURS = {Stage.BASE: "#0a0b01", Stage.BEFORE: "#0a0b02", Stage.AFTER: "#0a0b03"}
_CSS = {
    INK: "currentColor",
    LINE: "var(--train)",
    **{colour: f"var(--{stage.value})" for stage, colour in STAGE_COLOURS.items()},
}
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "font.size": 9,
    "legend.fontsize": 9,
    "axes.linewidth": 0.6,
    "svg.fonttype": "none",
}
MARKERS = {Stage.BASE: "o", Stage.BEFORE: "s", Stage.AFTER: "D"}
MAX_ROWS = 16
"""Rows of a bar chart; the table below it has them all."""


def learning_curve(data: RunData, *, width: float, height: float, name: str) -> str:
    """Reward of each GRPO step with its spread, and the held-out evaluations at both ends. Sizes in inches."""
    with _style(name):
        figure = _draw_curve(data, width, height)
        return _svg(figure, name, "Learning curve")


def bars(data: RunData, rows: Sequence[Row], *, width: float, name: str, title: str) -> str:
    """Held-out reward of each row at each stage, with 95% whiskers. Width in inches."""
    with _style(name):
        return _svg(_draw_bars(data, rows[:MAX_ROWS], width), name, title)


def judge_curve(steps: Sequence[JudgeStep], *, width: float, name: str) -> str:
    """The judge's mean score and the mean verifiable reward of each step. Width in inches."""
    with _style(name):
        figure, axes = _figure(width, 2.8)
        lines = [("judge", [(s.step, s.score) for s in steps]), ("verifiable", [(s.step, s.verifiable) for s in steps])]
        for (label, points), (style, marker) in zip(lines, (("-", "o"), ("--", "s")), strict=True):
            shown = [(number, value) for number, value in points if value is not None]
            if shown:
                axes.plot(
                    *zip(*shown, strict=True), color=LINE, linestyle=style, marker=marker, markersize=4, label=label
                )
        axes.set(ylim=_range([v for _, points in lines for _, v in points if v is not None]), xlabel="GRPO step")
        axes.set_xticks(_step_ticks(max((step.step for step in steps), default=0)))
        axes.set_ylabel("mean of a step")
        if axes.get_legend_handles_labels()[0]:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False)
        return _svg(figure, name, "Judge and verifiable reward")


def _draw_curve(data: RunData, width: float, height: float) -> Figure:
    figure, axes = _figure(width, height)
    steps = [step for step in data.steps if step.reward is not None]
    numbers = [step.step for step in steps]
    rewards = [step.reward for step in steps if step.reward is not None]
    last = max([data.planned_steps, *numbers])
    values = [*rewards, *(record.reward for record in data.evals.values())]
    low, high = _range(values)
    if steps:
        lower = [max(low, reward - step.reward_std) for reward, step in zip(rewards, steps, strict=True)]
        upper = [min(high, reward + step.reward_std) for reward, step in zip(rewards, steps, strict=True)]
        axes.fill_between(numbers, lower, upper, color=LINE, alpha=0.14, linewidth=0, label="± 1 standard deviation")
        axes.plot(
            numbers, rewards, color=LINE, marker="o", markersize=3, linewidth=0.8, alpha=0.7, label="mean of a step"
        )
    if len(steps) > 2:
        axes.plot(numbers, moving_average(rewards), color=LINE, linewidth=2.2, label="moving average (5 steps)")
    places = {Stage.BASE: 0.5 - max(1.0, last / 12), Stage.BEFORE: 0.5, Stage.AFTER: last + 0.5}
    for stage, record in data.evals.items():
        axes.errorbar(
            [places[stage]],
            [record.reward],
            yerr=[record.reward_ci],
            color=STAGE_COLOURS[stage],
            marker=MARKERS[stage],
            markersize=7,
            capsize=3,
            linewidth=1.4,
            linestyle="none",
            label=f"held-out: {data.short_title(stage).lower().replace('grpo', 'GRPO')}",
            zorder=3,
        )
    left = places[Stage.BASE] if Stage.BASE in data.evals else 0.5
    pad = max(0.5, (last - left) * 0.03)
    axes.set(xlim=(left - pad, last + 0.5 + pad), ylim=(low, high), xlabel="GRPO step", ylabel="reward")
    axes.set_xticks(_step_ticks(last))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=3 if width > 7 else 2, frameon=False)
    return figure


def _draw_bars(data: RunData, rows: Sequence[Row], width: float) -> Figure:
    stages = [stage for stage in data.stages if stage in data.evals]
    thickness = 0.8 / len(stages)
    figure, axes = _figure(width, 0.75 + len(rows) * (0.16 + 0.13 * len(stages)))
    for index, stage in enumerate(stages):
        present = [(y, row.estimates[stage]) for y, row in enumerate(rows) if stage in row.estimates]
        places = [y + (index + 0.5) * thickness - 0.4 for y, _ in present]
        axes.barh(
            places,
            [estimate.mean for _, estimate in present],
            height=thickness * 0.88,
            color=STAGE_COLOURS[stage],
            label=data.short_title(stage),
        )
        axes.errorbar(
            [estimate.mean for _, estimate in present],
            places,
            xerr=[estimate.ci or 0.0 for _, estimate in present],
            fmt="none",
            color=INK,
            alpha=0.6,
            linewidth=0.9,
            capsize=1.8,
        )
    axes.set_yticks(range(len(rows)), [f"{_short(row.name)}  n={row.n}" for row in rows], parse_math=False)
    axes.set(xlim=_range([e.mean for row in rows for e in row.estimates.values()]), xlabel="held-out reward")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    return figure


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Our settings, and no warning about glyphs that only the browser has."""
    from matplotlib import rc_context

    with rc_context(_STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure with one pair of quiet axes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Axis limits: 0 to 1 where the values fit in, else what they need. Never empty."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if low >= 0 and high <= 1:
        return 0.0, 1.02
    pad = 0.05 * (high - low)
    return low - (pad if low < 0 else 0.0), high + pad


def _step_ticks(last: int) -> list[int]:
    """About eight round step numbers, the last one included."""
    size = next((size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500) if last / size <= 8), max(1, last // 8))
    ticks = [tick for tick in range(size, last + 1, size) if last - tick >= size / 2]
    return [*ticks, last] if last else []


def _short(name: str) -> str:
    name = sanitise(name).replace("\n", " ")
    return name if len(name) <= 24 else name[:23] + "…"


def _svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element for an HTML page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(
        r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{title}" viewBox="\1">', svg, count=1
    )
    for colour, css in _CSS.items():
        svg = svg.replace(colour, css)
    return re.sub(r"\s*\n\s*", "\n", svg)
