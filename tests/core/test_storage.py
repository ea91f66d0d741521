"""Run folders: what is written loads back equal, grows linearly, and survives a kill."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.chat_completion import Choice

from art_core.calls import SampledCall, sampled_call
from art_core.errors import ConfigError, StorageError
from art_core.files import append_lines, read_lines, write_json
from art_core.storage import RunStore
from art_core.storage.codec import decode_group, encode_group
from art_core.types import History, RolloutException, Trajectory, TrajectoryGroup


def entry(token: str, logprob: float | None, **fields: Any) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": [], **fields}


def choice(prompt: list[int], sampled: list[int], text: str = "hi", **fields: Any) -> Choice:
    return Choice.construct(
        finish_reason="stop",
        index=0,
        message={"role": "assistant", "content": text},
        logprobs={"content": [entry(f"t{token}", -token / 7) for token in sampled]},
        prompt_token_ids=prompt,
        token_ids=sampled,
        **fields,
    )


def round_trip(group: TrajectoryGroup | Trajectory) -> TrajectoryGroup:
    return decode_group(json.loads(json.dumps(encode_group(group))))


def conversation(turns: int) -> Trajectory:
    """`turns` turns of 50 new prompt tokens and 20 sampled ones, each turn also an additional history of its own."""
    trajectory = Trajectory(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []
    for turn in range(turns):
        question = {"role": "user", "content": f"question {turn} " + "x" * 100}
        tokens = [*tokens, *range(1000 * turn, 1000 * turn + 50)]
        reply = choice(tokens, list(range(1000 * turn + 500, 1000 * turn + 520)), f"answer {turn} " + "y" * 60)
        history = [*copy.deepcopy(messages), question, reply]
        trajectory.additional_histories.append(History(messages_and_choices=history, tools=trajectory.tools))
        trajectory.messages_and_choices += [question, reply]
        messages += [question, {"role": "assistant", "content": reply.message.content}]
        tokens = [*tokens, *reply.token_ids]  # type: ignore[attr-defined]
    return trajectory


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    partial = Trajectory(messages_and_choices=[choice([1, 2], [3])], reward=None)
    tool_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    sampled = Choice.construct(
        finish_reason="tool_calls",
        index=1,
        message={"role": "assistant", "content": None, "tool_calls": [tool_call], "reasoning_content": "hm"},
        logprobs={
            "content": [
                entry("é", -0.1, top_logprobs=[{"token": "b", "logprob": -1.5, "bytes": None}]),
                entry("\ufffd", -0.30000000000000004, bytes=[195]),
                entry("z", -9999.0),
            ],
            "refusal": None,
        },
        prompt_token_ids=[1, 2, 7],
        token_ids=[4, 5, 6],
        policy_version=3,
        call_id="chatcmpl-1",
        temperature=0.7,
        provider_specific_fields={"a": [1, {"b": None}]},
    )
    group = TrajectoryGroup(
        [
            Trajectory(
                messages_and_choices=[{"role": "user", "content": "q"}, sampled],
                tools=[{"type": "function", "function": {"name": "f"}}],
                additional_histories=[History(messages_and_choices=[{"role": "user", "content": "other"}], tools=[])],
                reward=None,
                initial_policy_version=2,
                final_policy_version=3,
                metrics={"turns": 2, "ok": True, "share": 0.1},
                metadata={"scenario": {"id": "x"}, "snow": "雪"},
                logs=["line"],
            ),
            Trajectory(messages_and_choices=[{"role": "assistant", "content": "by hand"}], reward=1.0),
        ],
        exceptions=[RolloutException(type="E", message="m", traceback="t", trajectory=partial), ValueError("bad")],
        metadata={"scenario_id": "7"},
        metrics={"judge_cost": 0.25},
        logs=["judged"],
    )
    store = RunStore(tmp_path)
    store.append_trajectories("train", 3, [group])
    (loaded,) = store.read_trajectories("train", 3)
    assert loaded == group
    assert loaded.trajectories[0].messages_and_choices[1].model_dump(mode="json", exclude_unset=True) == (
        sampled.model_dump(mode="json", exclude_unset=True)
    )
    assert sampled_call(loaded.trajectories[0].choices()[0]) == SampledCall(
        (1, 2, 7), (4, 5, 6), (-0.1, -0.30000000000000004, None), 3, 0.7
    )
    assert store.steps("train") == [3]
    assert "雪" in (tmp_path / "trajectories/train/0003.jsonl").read_text()


def test_same_step_is_appended_and_a_bare_trajectory_loads_as_a_group_of_one(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    first, second = TrajectoryGroup([conversation(2)], metadata={"id": 1}), conversation(1)
    store.append_trajectories("val", 0, [first])
    store.append_trajectories("val", 0, [second])
    store.append_trajectories("val", 12, [])
    assert store.read_trajectories("val", 0) == [first, TrajectoryGroup([second])]
    assert [value["bare"] for value in read_lines(tmp_path / "trajectories/val/0000.jsonl")] == [False, True]
    assert store.read_trajectories("val", 1) == []
    assert store.steps("val") == [0, 12]
    assert store.steps("train") == []


def test_null_and_nan_logprobs_load_back(tmp_path: Path) -> None:
    reply = choice([1], [2, 3])
    reply.logprobs.content[0].logprob = None  # type: ignore[union-attr,index,assignment]
    reply.logprobs.content[1].logprob = math.nan  # type: ignore[union-attr,index]
    (loaded,) = round_trip(Trajectory(messages_and_choices=[reply])).trajectories[0].choices()
    assert loaded.logprobs is not None
    assert loaded.logprobs.content is not None
    assert loaded.logprobs.content[0].logprob is None
    assert math.isnan(loaded.logprobs.content[1].logprob)


def test_non_finite_metrics_survive(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append_history({"step": 1, "loss/train": math.nan, "a": math.inf, "b": -math.inf})
    store.append_trajectories("train", 0, [Trajectory(metrics={"m": math.nan, "n": -math.inf})])
    (record,) = store.history()
    assert math.isnan(record["loss/train"])
    assert (record["a"], record["b"]) == (math.inf, -math.inf)
    metrics = store.read_trajectories("train", 0)[0].trajectories[0].metrics
    assert math.isnan(metrics["m"])
    assert metrics["n"] == -math.inf


def test_size_grows_linearly_with_new_tokens(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    sizes = {}
    for turns in (20, 40):
        trajectory = conversation(turns)
        store.append_trajectories("train", turns, [trajectory])
        sizes[turns] = (tmp_path / f"trajectories/train/{turns:04d}.jsonl").stat().st_size
        assert store.read_trajectories("train", turns) == [TrajectoryGroup([trajectory])]
    assert sizes[40] / sizes[20] < 2.3
    assert sizes[40] < 40 * 2000


def test_calls_are_coded_against_siblings_too() -> None:
    prompt = list(range(5000))
    group = TrajectoryGroup([Trajectory(messages_and_choices=[choice(prompt, [i])]) for i in range(8)])
    assert len(json.dumps(encode_group(group))) < 1.5 * len(json.dumps(prompt))
    assert round_trip(group) == group


def test_loaded_messages_are_not_shared_between_histories() -> None:
    message = {"role": "user", "content": "q"}
    loaded = round_trip(TrajectoryGroup([Trajectory(messages_and_choices=[message]) for _ in range(2)]))
    loaded.trajectories[0].messages_and_choices[0]["content"] = "edited"
    assert loaded.trajectories[1].messages_and_choices[0]["content"] == "q"
    assert message["content"] == "q"


def test_encoding_leaves_the_group_alone() -> None:
    trajectory = conversation(3)
    trajectory.messages_and_choices.append({"role": "assistant", "content": "x", "prompt_token_ids": [0, 1, 2]})
    before = trajectory.model_copy(deep=True)
    encode_group(trajectory)
    assert trajectory == before


@pytest.mark.parametrize("odd", [{"ref": 0}, {"raw": 1}, "text", [1.5], [2**70], [True], None, [], [-1]])
def test_odd_prompt_ids_and_logprobs_load_back(odd: Any) -> None:
    messages = [
        {"role": "assistant", "content": "a", "prompt_token_ids": [1, 2], "token_ids": odd},
        {"role": "assistant", "content": "b", "prompt_token_ids": odd, "token_ids": [3], "logprobs": {"content": odd}},
        {"role": "assistant", "content": "c", "prompt_token_ids": [1, 2, 3], "logprobs": odd},
    ]
    trajectory = Trajectory(messages_and_choices=messages)
    assert round_trip(trajectory).trajectories == [trajectory]


def test_a_value_json_has_no_type_for_costs_no_trajectory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore(tmp_path)
    store.append_trajectories("train", 0, [Trajectory(metadata={"path": Path("a/b"), "bad": "\ud800"})])
    assert store.read_trajectories("train", 0)[0].trajectories[0].metadata == {"path": "a/b", "bad": "\ud800"}
    assert "PosixPath" in caplog.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
token_lists = st.lists(st.integers(0, 3), max_size=6)  # few ids: many shared prefixes
entries = st.builds(
    entry,
    st.text(max_size=3),
    st.none() | st.floats(allow_nan=False),
    top_logprobs=st.lists(
        st.fixed_dictionaries({"token": st.text(max_size=2), "logprob": st.floats(-9, 0)}), max_size=2
    ),
)
choices = st.builds(
    lambda prompt, sampled, logprobs, text, extra: Choice.construct(
        finish_reason="stop",
        index=0,
        message={"role": "assistant", "content": text},
        **({} if logprobs == "unset" else {"logprobs": logprobs}),
        **({} if prompt is None else {"prompt_token_ids": prompt}),
        **({} if sampled is None else {"token_ids": sampled}),
        **extra,
    ),
    st.none() | token_lists,
    st.none() | token_lists,
    st.just("unset") | st.none() | st.fixed_dictionaries({"content": st.none() | st.lists(entries, max_size=3)}),
    st.text(max_size=4),
    st.dictionaries(st.sampled_from(["call_id", "policy_version", "stop_reason", "note"]), json_values, max_size=2),
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=3)},
    optional={"prompt_token_ids": json_values | token_lists, "token_ids": token_lists, "logprobs": json_values},
)
item_lists = st.lists(messages | choices, max_size=5)
histories = st.builds(
    History, messages_and_choices=item_lists, tools=st.none() | st.lists(st.just({"t": 1}), max_size=2)
)
finite_metrics = st.dictionaries(
    st.text(max_size=4), st.booleans() | st.integers() | st.floats(allow_nan=False), max_size=2
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    main = draw(histories)
    branches = []
    for branch in draw(st.lists(histories, max_size=2)):
        keep = draw(st.integers(0, len(main.messages_and_choices)))
        shared = main.messages_and_choices[:keep]
        branches.append(History(messages_and_choices=[*shared, *branch.messages_and_choices], tools=branch.tools))
    return Trajectory(
        messages_and_choices=main.messages_and_choices,
        tools=main.tools,
        additional_histories=branches,
        reward=draw(st.none() | st.floats(allow_nan=False)),
        initial_policy_version=draw(st.none() | st.integers(0, 9)),
        metrics=draw(finite_metrics),
        metadata=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=2)),
        logs=draw(st.lists(st.text(max_size=3), max_size=2)),
    )


failures = st.builds(
    RolloutException,
    type=st.just("E"),
    message=st.text(max_size=4),
    traceback=st.just(""),
    trajectory=st.none() | trajectories(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.lists(trajectories(), max_size=3),
    st.lists(failures, max_size=1),
    st.dictionaries(st.text(max_size=4), json_values, max_size=2),
    finite_metrics,
)
def test_any_group_loads_back_equal(
    members: list[Trajectory], failed: list[RolloutException], metadata: dict[str, Any], metrics: dict[str, Any]
) -> None:
    group = TrajectoryGroup(members, exceptions=failed, metadata=metadata, metrics=metrics, logs=["l"])
    loaded = round_trip(group)
    assert loaded == group
    assert loaded.model_dump(mode="json") == group.model_dump(mode="json")


def test_a_torn_line_is_skipped_and_the_next_append_starts_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RunStore(tmp_path)
    path = tmp_path / "trajectories/train/0000.jsonl"
    store.append_trajectories("train", 0, [Trajectory(reward=1.0)])
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole + whole[:cut])
        caplog.clear()
        assert [group.trajectories[0].reward for group in store.read_trajectories("train", 0)] == [1.0]
        assert str(path) in caplog.text
        store.append_trajectories("train", 0, [Trajectory(reward=3.0)])
        assert [group.trajectories[0].reward for group in store.read_trajectories("train", 0)] == [1.0, 3.0]


def test_a_line_that_lacks_only_its_newline_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}')
    store = RunStore(tmp_path)
    store.append_history({"step": 3})
    assert [record["step"] for record in store.history()] == [1, 2, 3]
    assert not caplog.records


ENDLESS_WRITER = """
import sys
from art_core.storage import RunStore
store, step = RunStore(sys.argv[1]), 0
while True:
    store.append_history({"step": step, "pad": "x" * 20000})
    print(step, flush=True)
    step += 1
"""


def test_what_was_written_before_a_kill_is_still_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS_WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)][-1]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    store = RunStore(tmp_path)
    store.append_history({"step": "after"})
    steps = [record["step"] for record in store.history()]
    assert steps[: acknowledged + 1] == list(range(acknowledged + 1))
    assert steps[-1] == "after"


def test_state_is_replaced_atomically(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "deep" / "run")
    assert store.read_state() == {}
    store.write_state({"a": 1})
    store.write_state({"b": [1, 2]})
    assert store.read_state() == {"b": [1, 2]}
    circular: dict[str, Any] = {}
    circular["self"] = circular
    with pytest.raises(ValueError, match="Circular"):
        store.write_state(circular)
    assert store.read_state() == {"b": [1, 2]}
    assert [path.name for path in store.root.iterdir()] == ["state.json"]
    (store.root / "state.json").write_text("{")
    with pytest.raises(StorageError, match=r"state\.json is not valid JSON"):
        store.read_state()


@pytest.mark.parametrize(
    "key",
    ["api_key", "inference_api_key", "apiKey", "OPENAI-API-KEY", "hf_token", "authToken", "password", "client_secret"],
)
def test_model_json_refuses_secrets(tmp_path: Path, key: str) -> None:
    store = RunStore(tmp_path)
    with pytest.raises(ConfigError, match=key):
        store.write_model({"name": "m", "config": {"nested": [{key: "v"}]}})
    assert not (tmp_path / "model.json").exists()


def test_model_json_takes_harmless_keys(tmp_path: Path) -> None:
    description = {"name": "m", "max_tokens": 5, "eos_token": "</s>", "token_ids": [1], "keys": 1, "key_metric": "r"}
    RunStore(tmp_path).write_model(description)
    assert json.loads((tmp_path / "model.json").read_text()) == description


def test_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = RunStore(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match="cannot append to") as caught:
        store.append_trajectories("train", 0, [Trajectory()])
    assert isinstance(caught.value, OSError)
    with pytest.raises(StorageError, match="cannot write"):
        store.write_state({})
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot read"):
        list(read_lines(tmp_path / "folder.jsonl"))
    with pytest.raises(StorageError):
        append_lines(tmp_path / "folder.jsonl", [1])


@pytest.mark.parametrize("split", ["", "../x", "a/b", ".", ".."])
def test_split_must_be_a_plain_name(tmp_path: Path, split: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        RunStore(tmp_path).append_trajectories(split, 0, [])
    with pytest.raises(ConfigError, match="negative"):
        RunStore(tmp_path).append_trajectories("train", -1, [])


def test_another_format_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trajectories/train/0000.jsonl"
    append_lines(path, [{**encode_group(Trajectory()), "version": 99}])
    with pytest.raises(StorageError, match="version 99"):
        RunStore(tmp_path).read_trajectories("train", 0)


def test_write_json_leaves_no_temporary_file_behind(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": math.nan})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
