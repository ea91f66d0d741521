"""`report.html`: what a run did, for somebody who was not there.

The first sentence says whether the held-out reward rose, and says so only where the change exceeds the noise. Everything
is one file without outside resources; all text from models and servers is escaped, and what no page can show (control
characters, lone surrogates) is replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core.errors import MissingExtraError, StorageError
from mcp_rl.console import clock
from mcp_rl.report.data import RunData, load_run
from mcp_rl.report.headline import headline, story, warnings
from mcp_rl.report.judge import judge_view
from mcp_rl.report.rollouts import choose_cases
from mcp_rl.report.stats import rows
from mcp_rl.report.timing import phases
from mcp_rl.report.tool_use import tool_use
from mcp_rl.results import sanitise

if TYPE_CHECKING:
    from jinja2 import Environment

_SECRET = re.compile(
    r"(?i)(://)[^/@\s]+@|(\b(?:[\w-]*api[-_]?key|[\w-]*token|[\w-]*secret|[\w-]*password|bearer)[=: ]+)[^\s&]+"
)


def build_report(run: Path) -> Path:
    """Write `report.html` into the run folder `run`, finished or not, and return its path.

    Raises:
        ConfigError: `run` is not a run folder, or a file in it is damaged.
        MissingExtraError: Jinja2 or Matplotlib is not installed.
        StorageError: the folder cannot be written.
    """
    data = load_run(Path(run))
    return write_page(data.folder.report, render(data))


def write_page(target: Path, page: str) -> Path:
    """Write a report and return its path. Raises StorageError."""
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{target} cannot be written ({error.strerror}): make the run folder writable.") from None
    return target


def render(data: RunData) -> str:
    """The page as a string. Raises MissingExtraError."""
    by_tool, by_kind = rows(data.evals, lambda rollout: rollout.tools), rows(data.evals, lambda rollout: [rollout.kind])
    try:
        from markupsafe import Markup

        from mcp_rl.report.charts import bars, judge_curve, learning_curve

        charts = {
            "wide": learning_curve(data, width=9.6, height=3.6, name="curve"),
            "narrow": learning_curve(data, width=4.8, height=4.2, name="curve-narrow"),
        }
        if data.evals:
            charts["tools"] = bars(data, by_tool, width=4.8, name="tools", title="Held-out reward by tool")
            charts["kinds"] = bars(data, by_kind, width=4.8, name="kinds", title="Held-out reward by kind of scenario")
        judge = judge_view(data)
        if judge is not None and judge.steps:
            charts["judge"] = judge_curve(judge.steps, width=7.2, name="judge")
        template = environment("mcp_rl.report").get_template("report.html.jinja")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"The report ({error.name})", "mcp") from None
    html = template.render(
        data=data,
        headline=headline(data),
        story=story(data),
        judge=judge,
        warnings=warnings(data),
        charts={name: Markup(svg) for name, svg in charts.items()},
        breakdowns=[("Tool", by_tool), ("Kind of scenario", by_kind)],
        cases=choose_cases(data),
        tools=tool_use(data),
        phases=phases(data),
        config=config_rows(data),
    )
    return sanitise(html)


def environment(package: str) -> Environment:
    """Templates that lie in `package`: all text is escaped, and a missing variable is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"clock": clock, "signed": _signed, "count": _count}
    return made


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def config_rows(data: RunData) -> list[tuple[str, str]]:
    """The options of the run as text, credentials masked: a report is passed on more freely than a run folder."""
    options = data.config.model_dump(exclude={"versions"})
    return [(name, mask(_plain(value))) for name, value in options.items() if value is not None]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def mask(text: str) -> str:
    """`text` without the user part of URLs and without what follows a key, token, secret or password."""
    return _SECRET.sub(lambda found: f"{found[1]}•••@" if found[1] else f"{found[2]}•••", text)
