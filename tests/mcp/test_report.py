"""The report: one file that needs nothing else, tells the truth about the outcome, and survives whatever a run left."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_core.errors import ConfigError
from mcp_rl.records import Phase, RolloutRecord, Stage, StepRecord
from mcp_rl.report import build_report
from mcp_rl.report.data import load_run
from mcp_rl.report.headline import headline, warnings
from mcp_rl.report.page import mask
from mcp_rl.report.rollouts import MOST, arguments_text, choose_cases, conversation
from mcp_rl.report.stats import calls_made, estimate, gain, moving_average, rows
from mcp_rl.run_folder import RunFolder
from mcp_rl.tools import Tool
from tests.mcp.report_runs import (
    Options,
    make_rollout,
    make_run,
    make_scenarios,
    make_server,
    make_step,
    read_page,
    summarise,
)

HOSTILE = "<script>alert('x')</script> & \ud800 \x00 </pre></details> $\\frac{1}{2}$"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A finished run with a warm-up: (run folder, page as text, page parsed). Not to be changed."""
    run = make_run(tmp_path_factory.mktemp("full") / "run")
    return run, *read_page(run.path)


def test_full_report_says_what_happened(full):
    run, html, page = full
    base, before, after = (run.read_eval(stage) for stage in Stage)
    change = f"{before.reward:.2f} to {after.reward:.2f} ({after.reward - before.reward:+.2f})"
    assert f"Held-out reward rose from {change} in 16 GRPO steps, 9 min 40 s in all." in page.text
    for record in (base, before, after):
        assert f"{record.reward:.3f}" in page.text
        assert f"{record.greedy_reward:.3f}" in page.text
    # The three stages are three, wherever they are named.
    for title in ("Base model", "After warm-up = before GRPO", "After GRPO"):
        assert title in page.text
    assert f"The bare model scored {base.reward:.2f}; a supervised warm-up" in page.text
    for shown in (
        "seed 7",
        "412",
        "103",
        "37,520",
        "104,688",
        "Warm-up, 4 supervised steps",
        "learning rate",
        "2.31 GB",
    ):
        assert shown in page.text, shown
    assert "drop_table (marked as destructive)" in page.text
    assert f"openai {run.read_config()['versions']['openai']}" in page.text
    assert html.count("<article") == 3
    assert html.count("<svg") == 4


def test_report_is_self_contained(full):
    _, html, page = full
    assert all(reference.startswith("#") for reference in page.references)
    assert set(page.references) <= {f"#{identifier}" for identifier in page.ids}
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "http" not in html
    assert "url(" not in html.replace("url(#", "")
    assert "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert "#0a0b" not in html  # no placeholder colour is left


def test_report_is_reproducible(full):
    run, html, _ = full
    assert build_report(run.path).read_text(encoding="utf-8") == html


def test_without_warmup_there_are_two_stages(tmp_path):
    _, page = read_page(make_run(tmp_path / "run", warmup=False, levels=(0.3, 0.0, 0.7)).path)
    assert "Base model = before GRPO" in page.text
    assert "warm-up" not in page.text.replace("warmup", "")
    assert "Held-out reward rose from" in page.text


@pytest.mark.parametrize(
    ("levels", "expected"),
    [((0.1, 0.5, 0.52), "did not clearly change"), ((0.1, 0.7, 0.3), "fell from"), ((0.1, 0.3, 0.7), "rose from")],
)
def test_headline_tells_the_truth(tmp_path, levels, expected):
    run = make_run(tmp_path / "run", levels=levels, seed=5)
    assert headline(load_run(run.path)).startswith(f"Held-out reward {expected}")


def test_headline_of_equal_and_single(tmp_path):
    run = make_run(tmp_path / "run", warmup=False)
    scenario = make_scenarios()[1]
    same = [make_rollout(scenario, 0, 1.0, 0.5), make_rollout(scenario, 1, 0.0, 0.5)]
    for stage in (Stage.BASE, Stage.AFTER):
        run.write_eval(summarise(stage, 0, same))
    assert "stayed at 0.50" in headline(load_run(run.path))
    run.write_eval(
        summarise(Stage.AFTER, 17, [make_rollout(scenario, 0, 1.0, 0.9), make_rollout(scenario, 1, 0.0, 0.9)])
    )
    assert "measured on a single scenario, this shows nothing" in headline(load_run(run.path))


def test_hostile_text_is_escaped(tmp_path):
    run = make_run(tmp_path / "run", text=HOSTILE, result=HOSTILE + "y" * 50_000, steps=3)
    hostile = make_server(3)
    hostile.name, hostile.left_out = HOSTILE.replace("\ud800", ""), {"<b>": "</table><script>"}
    hostile.tools = [Tool("--><script>" + "n" * 300 + "$x^$", "</td><script>", {"type": "object", "properties": {}})]
    run.write_tools(hostile)
    rollouts = [
        RolloutRecord(
            **{**r.model_dump(), "tools": ["<script>$_$" + "t" * 99], "kind": "日本</svg>", "end_reason": "<i>"}
        )
        for r in run.read_eval(Stage.AFTER).rollouts
    ]
    rollouts[-1].messages[2]["tool_calls"][0]["function"]["arguments"] = '{"a": "\ud800</pre>"'
    run.write_eval(summarise(Stage.AFTER, 17, rollouts))
    html, page = read_page(run.path)
    assert "script" not in page.tags
    assert "<script" not in html
    assert "&lt;script&gt;alert(" in html
    assert "\x00" not in html
    assert f"[cut: {MOST:,} of {len(HOSTILE) + 50_000:,} characters]" in html
    assert len(html) < 400_000
    assert "<details" in html


def test_partial_runs(tmp_path):
    fresh = RunFolder(tmp_path / "fresh")
    fresh.write_config(Options())
    _, page = read_page(fresh.path)
    assert "This run is not finished: 0 of 16 GRPO steps are recorded" in page.text
    assert "Not evaluated yet: Base model." in page.text
    running = make_run(tmp_path / "running", finished=False, steps=5)
    _, page = read_page(running.path)
    assert (
        "This run is not finished: 5 of 16 GRPO steps are recorded, and no evaluation after training yet." in page.text
    )
    assert "Not evaluated yet: After GRPO." in page.text
    for name in ("scenarios.jsonl", "tools.json", "steps.jsonl"):
        (running.path / name).unlink()
    running.eval(Stage.BEFORE).unlink()
    _, page = read_page(running.path)
    assert "The scenarios of this run are not recorded." in page.text
    after_only = make_run(tmp_path / "after")
    after_only.eval(Stage.BEFORE).unlink()
    stale = make_run(tmp_path / "stale", steps=20)
    assert "The evaluation after GRPO is of policy version 17, but the run has gone on to 21." in warnings(
        load_run(stale.path)
    )
    assert "what it was before GRPO is not recorded" in headline(load_run(after_only.path))


def test_torn_step_and_step_recorded_twice(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    run.write_steps(
        [make_step(2, random.Random(0), reward=0.987, trained=False, reason="4 of 4 groups have equal rewards")]
    )
    with run.steps.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')
    assert [step.step for step in load_run(run.path).steps] == [1, 2]
    assert run.read_steps()[-1].reward == 0.987
    _, page = read_page(run.path)
    assert "Not trained: 4 of 4 groups have equal rewards" in page.text
    assert "1 GRPO step could not train (4 of 4 groups have equal rewards)." in page.text


def test_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"is not a run .*config\.json.*give the --output folder"):
            build_report(path)


def test_damaged_records_are_named(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    run.eval(Stage.AFTER).write_text('{"stage": "after"}')
    with pytest.raises(ConfigError, match=r"after\.json is damaged \(step: Field required\)"):
        build_report(run.path)


def test_records_round_trip_and_totals_span_sessions(tmp_path):
    run = make_run(tmp_path / "run", text="lone \ud800 surrogate")
    record = run.read_eval(Stage.AFTER)
    run.write_eval(record)
    assert run.read_eval(Stage.AFTER) == record
    assert "\ud800" in record.rollouts[0].messages[-1]["content"]
    assert run.add_seconds(10.0) == 10.0
    assert run.add_seconds(15.0) == 15.0  # the same session, later
    resumed = RunFolder(run.path)
    assert resumed.add_seconds(5.0) == 20.0
    assert resumed.add_seconds(6.0) == 21.0
    for calls in (1, 4):
        resumed.write_tools(make_server(calls))
    assert [tool.calls for tool in resumed.read_tools().tools] == [416, 416, 416]
    started = run.read_config()["started"]
    resumed.write_config(Options(steps=20), base_model="m")
    config = resumed.read_config()
    assert (config["started"], config["steps"], config["base_model"], config["group_size"]) == (started, 20, "m", 8)


def test_step_from_history(tmp_path):
    entry = {
        "step": 3,
        "trained": 1,
        "grpo/step": 2.0,
        "train/reward": 0.5,
        "train/reward_std_dev": 0.1,
        "train/sampled_tokens": 120.0,
        "time/step_rollout_s": 4.0,
        "time/step_trainer_s": 1.5,
        "data/groups": 4.0,
        "data/groups_trained": 3.0,
        "data/tokens_trained": 90.0,
        "loss/train": float("nan"),
    }
    step = StepRecord.from_history(entry)
    assert (step.step, step.phase, step.reward, step.seconds) == (2, Phase.GRPO, 0.5, 5.5)
    assert (step.tokens_sampled, step.tokens_trained, step.groups_skipped, step.trained) == (120, 90, 1, True)
    run = RunFolder(tmp_path)
    for _ in range(2):  # NaN and all: a step is recorded once
        run.write_steps([StepRecord.from_history(entry)])
    assert len(run.steps.read_text().splitlines()) == 1
    warmup = StepRecord.from_history({"step": 1, "trained": 1, "loss/train": 0.7, "sft/optimizer_steps": 4})
    assert (warmup.phase, warmup.step, warmup.reward) == (Phase.WARMUP, 1, None)


def test_intervals_by_hand():
    assert estimate([0.5]).ci is None
    three = estimate([0.2, 0.5, 0.8])
    assert three.mean == pytest.approx(0.5)
    assert three.ci == pytest.approx(4.303 * 0.3 / 3**0.5)
    assert estimate([0.4] * 5).ci == pytest.approx(0.0)
    assert moving_average([0.0, 1.0, 2.0, 3.0]) == [1.0, 1.5, 1.5, 2.0]
    first, second = make_scenarios()[1:4:2]
    before = summarise(
        Stage.BEFORE, 1, [make_rollout(s, i, t, 0.2) for s in (first, second) for i, t in ((0, 1.0), (1, 0.0))]
    )
    after = summarise(
        Stage.AFTER,
        2,
        [make_rollout(s, i, t, 0.6 + 0.2 * n) for n, s in enumerate((first, second)) for i, t in ((0, 1.0), (1, 0.0))],
    )
    change = gain(before, after)
    assert change.mean == pytest.approx(0.5)
    assert change.ci == pytest.approx(12.706 * (0.02**0.5) / 2**0.5)
    by_tool = {row.name: row for row in rows({Stage.BEFORE: before, Stage.AFTER: after}, lambda rollout: rollout.tools)}
    assert by_tool["list_tables"].n == 2  # one scenario needs it alone, the other among three
    assert by_tool["run_query"].estimates[Stage.AFTER].mean == pytest.approx(0.8)
    assert calls_made(before) == {"get_tables": 4}


def test_choice_of_rollouts_is_by_rule(full):
    data = load_run(full[0].path)
    cases = choose_cases(data)
    assert [case.label for case in cases[:2]] == ["Largest gain", "Typical"]
    gains = sorted(
        after.reward - before.reward
        for before, after in zip(data.before.rollouts, data.after.rollouts, strict=True)
        if after.temperature == 0
    )
    assert cases[0].gain == pytest.approx(gains[-1])
    assert all(attempt.rollout.temperature == 0 for case in cases for attempt in case.attempts.values())
    assert not cases[2].attempts[Stage.AFTER].rollout.solved
    assert cases == choose_cases(data)


def test_conversation_pairs_calls_with_results():
    def call(identifier, name, arguments):
        return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}

    lines = conversation(
        [
            {"role": "user", "content": "task"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [call("a", "f", '{"x": 1}'), call("b", "g", "{oops")],
            },
            {"role": "tool", "tool_call_id": "b", "content": "second"},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "first"}]},
            {"role": "assistant", "content": None, "tool_calls": [call("c", "h", None)]},
        ]
    )
    assert lines[0].text.head == "Let me see."
    shown = [(line.call, line.arguments.head, line.text.head if line.text else None) for line in lines[1:]]
    assert shown == [("f", "x=1", "first"), ("g", "{oops", "second"), ("h", "", None)]
    assert arguments_text('{"sql": "SELECT \'a\'", "n": null}') == "sql=\"SELECT 'a'\", n=null"


def test_credentials_are_masked():
    assert mask("https://ann:pw@host/mcp?token=abc&x=1") == "https://•••@host/mcp?token=•••&x=1"
    assert mask("python s.py --api-key sk-123 --max-tokens 5") == "python s.py --api-key ••• --max-tokens 5"
    assert mask("API_KEY=1 npx server") == "API_KEY=••• npx server"


numbers = st.floats(min_value=-1e3, max_value=1e3, allow_nan=False)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(numbers, st.floats(0, 1e3)), min_size=1, max_size=4) | st.just([(0.25, 0.0)] * 3),
    levels=st.tuples(numbers, numbers) | st.just((0.5, 0.5)),
)
def test_any_numbers(tmp_path_factory, steps, levels):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.write_config(Options(steps=len(steps), warmup_steps=0))
    run.write_steps(
        [
            make_step(i, random.Random(0), reward=reward, reward_std=std)
            for i, (reward, std) in enumerate(steps, start=1)
        ]
    )
    for stage, level in zip((Stage.BASE, Stage.AFTER), levels, strict=True):
        rollouts = [make_rollout(s, i, t, level) for s in make_scenarios(4) for i, t in ((0, 1.0), (1, 0.0))]
        run.write_eval(summarise(stage, 0, rollouts))
    html, page = read_page(run.path)
    assert "Held-out reward" in page.text
    assert "nan" not in html.lower().replace("finance", "")
    assert f"{levels[1]:.3f}" in page.text
