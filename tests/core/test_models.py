"""`Model` and `TrainableModel` against a scripted endpoint, their run folder, and the versions they name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from art_core.annealing import LinearTemperatureAnnealer
from art_core.auto import capture_auto_trajectory
from art_core.backend import Backend, Endpoint, TrainResult
from art_core.calls import SampledCall, sampled_call
from art_core.capture import CaptureScope, capture
from art_core.clients import environment_proxy
from art_core.errors import ConfigError
from art_core.models import Model, TrainableModel
from art_core.summary import group_metrics
from art_core.types import Trajectory, TrajectoryGroup
from tests.scripted_server import Reply, ScriptedServer

Q: Any = [{"role": "user", "content": "2+2"}]


class EndpointBackend:
    """The client's half of a backend: an endpoint whose policy version advances by training."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.current, self.seen = base_url, 3, []

    async def register(self, model: TrainableModel) -> Endpoint:
        return Endpoint(self.base_url, "secret")

    async def step(self, model: TrainableModel) -> int:
        return self.current

    async def train(self, model: TrainableModel, groups: Iterable[TrajectoryGroup], **config: Any) -> TrainResult:
        self.current += 1
        model.served(self.current)
        self.seen.append((list(groups), config))
        return TrainResult(self.current, {"loss/train": 0.5})

    async def train_sft(self, model: TrainableModel, trajectories: Iterable[Trajectory], **config: Any) -> TrainResult:
        return await self.train(model, [TrajectoryGroup(trajectories)], **config)

    async def delete_checkpoints(
        self, model: TrainableModel, best_checkpoint_metric: str = "val/reward", **options: Any
    ) -> list[int]:
        self.asked_for = best_checkpoint_metric, options
        return [1, 2]

    async def close(self) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([Reply("4", token_ids=[5, 2], prompt_token_ids=[1, 2])]) as server:
        yield server


def make(tmp_path: Path, **options: Any) -> TrainableModel:
    return TrainableModel(name="agent", project="p", base_model="b", base_path=tmp_path, **options)


async def test_calls_that_name_the_model_get_the_newest_version(tmp_path: Path, server: ScriptedServer):
    model, backend = make(tmp_path), EndpointBackend(server.base_url)
    assert isinstance(backend, Backend)
    await model.register(backend)
    client = model.openai_client()
    assert client is model.openai_client()

    async def rollout() -> None:
        await client.chat.completions.create(model=model.name, messages=Q)

    first = await capture_auto_trajectory(rollout())
    result = await model.train([TrajectoryGroup([first])], learning_rate=1e-4)
    assert (result.step, await model.get_step(), model.get_inference_name()) == (4, 4, "agent@4")
    second = await capture_auto_trajectory(rollout())
    assert [first.final_policy_version, second.final_policy_version] == [3, 4]
    await model.backend.train(model, [])
    assert (await capture_auto_trajectory(rollout())).final_policy_version == 5, "trained behind the model's back"
    await client.chat.completions.create(model=model.get_inference_name(step=0), messages=Q)
    model.openai_client(sync=True).chat.completions.create(model="another", messages=Q)
    assert [r["model"] for r in server.requests] == ["agent@3", "agent@4", "agent@5", "agent@0", "another"]
    assert server.headers[0]["authorization"] == "Bearer secret"
    await model.http_client().aclose()
    model.http_client(sync=True).close()


async def test_train_keeps_the_groups_and_hands_on_options(tmp_path: Path, server: ScriptedServer):
    reported: list[tuple[int, dict[str, float]]] = []
    model, backend = (
        make(tmp_path, report_metrics=[lambda *row: reported.append(row)]),
        EndpointBackend(server.base_url),
    )
    await model.register(backend)
    with capture() as scope:
        await model.openai_client().chat.completions.create(model="agent", messages=Q)
    await model.http_client().aclose()
    group = TrajectoryGroup([scope.trajectory, ValueError("bad")])
    await model.train([group], learning_rate=1e-4)
    ((groups, config),) = backend.seen
    assert groups == [group]
    assert config["learning_rate"] == 1e-4
    assert config["extra_metrics"] == {"train/reward": 0.0, "train/exception_rate": 0.5}
    stored = model.store.read_trajectories("train", 3)
    assert stored == [group]
    assert sampled_call(stored[0].trajectories[0].choices()[0]) == sampled_call(scope.trajectory.choices()[0])
    assert reported == [(4, {"loss/train": 0.5})]
    await model.train_sft(iter([scope.trajectory]), epochs=2)
    assert backend.seen[1] == ([TrajectoryGroup([scope.trajectory])], {"epochs": 2})
    assert model.get_inference_name() == "agent@5"


async def test_a_models_own_client_bound_to_a_rollout(tmp_path: Path, server: ScriptedServer):
    model = make(tmp_path)
    await model.register(EndpointBackend(server.base_url))
    scope = CaptureScope()
    bound = scope.client(model.openai_client(sync=True))
    bound.chat.completions.create(model="agent", messages=Q)
    assert len(scope.calls) == 1
    model.http_client(sync=True).close()


async def test_log_writes_trajectories_and_one_line_of_metrics(tmp_path: Path):
    model = Model(name="prompted", project="p", base_path=tmp_path)
    groups = [
        TrajectoryGroup([Trajectory(reward=1.0, metrics={"turns": 2}), Trajectory(reward=0.0), RuntimeError("x")]),
        TrajectoryGroup([Trajectory(reward=None, metrics={"turns": 4})]),
    ]
    await model.log(groups, split="val", metrics={"cost": 1.5, "time/total": 2.0}, step=2)
    (record,) = model.store.history()
    assert record.pop("time") > 0
    assert record == {
        "step": 2,
        "val/turns": 3.0,
        "val/reward": 0.5,
        "val/reward_std_dev": 0.5,
        "val/exception_rate": 0.25,
        "val/cost": 1.5,
        "time/total": 2.0,
    }
    assert model.store.read_trajectories("val", 2) == groups
    await model.log([Trajectory(reward=1.0), ValueError("y")])
    await model.log(metrics={"x": 1})
    assert [len(g.exceptions) for g in model.store.read_trajectories("val", 0)] == [1]
    assert model.store.history()[-1]["val/x"] == 1
    assert model.path == tmp_path / "p" / "models" / "prompted"


def test_unscored_and_failed_rollouts_are_never_averaged_as_zero():
    groups = [TrajectoryGroup([Trajectory(reward=None), ValueError("a")]), TrajectoryGroup([])]
    assert group_metrics(groups, "val") == {"val/exception_rate": 0.5}
    assert group_metrics([], "val") == {}


async def test_state_and_model_json_without_secrets(tmp_path: Path):
    model = Model(
        name="m",
        project="p",
        base_path=tmp_path,
        inference_api_key="sk-secret",
        inference_base_url="http://x/v1",
        inference_model_name="openai/m",
        config={"k": 1},
    )
    assert model.read_state() == {}
    assert model.merge_state({"a": 1, "b": 1}) == {"a": 1, "b": 1}
    assert model.merge_state({"b": 2}) == {"a": 1, "b": 2}
    model.overwrite_state({"c": 3})
    assert model.read_state() == {"c": 3}
    await model.register()
    text = (model.path / "model.json").read_text()
    assert json.loads(text)["config"] == {"k": 1}
    assert "sk-secret" not in text + repr(model)
    assert model.get_inference_name(step=9) == "openai/m"
    params = model.litellm_completion_params()
    assert params == {"model": "openai/openai/m", "base_url": "http://x/v1", "api_key": "sk-secret"}
    assert await model.get_step() == 0


async def test_litellm_params_of_a_trainable_model_ask_for_tokens(tmp_path: Path, server: ScriptedServer):
    model = make(tmp_path)
    await model.register(EndpointBackend(server.base_url))
    params = model.litellm_completion_params(step=2)
    assert params["model"] == "openai/agent@2"
    assert params["base_url"] == server.base_url
    assert (params["logprobs"], params["extra_body"]) == (True, {"return_token_ids": True})
    assert json.loads((model.path / "model.json").read_text())["base_model"] == "b"


async def test_delete_checkpoints_is_the_backends_work(tmp_path: Path, server: ScriptedServer):
    model, backend = make(tmp_path), EndpointBackend(server.base_url)
    await model.register(backend)
    assert await model.delete_checkpoints() == [1, 2]
    assert backend.asked_for == ("val/reward", {"keep_recent": 1, "higher_is_better": True, "dry_run": False})
    await model.delete_checkpoints("loss/train", keep_recent=3, higher_is_better=False, dry_run=True)
    assert backend.asked_for == ("loss/train", {"keep_recent": 3, "higher_is_better": False, "dry_run": True})


async def test_train_sft_reads_a_chat_file(tmp_path: Path, server: ScriptedServer):
    model, backend = make(tmp_path), EndpointBackend(server.base_url)
    await model.register(backend)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 2))
    for path in (tmp_path / "chats.jsonl", str(tmp_path / "chats.jsonl")):
        await model.train_sft(path, epochs=2)
    for (group,), config in backend.seen:
        assert [trajectory.messages() for trajectory in group] == [turns, turns]
        assert config == {"epochs": 2}
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        await model.train_sft(tmp_path / "missing.jsonl")


async def test_the_annealers_temperature_goes_where_a_request_names_none(tmp_path: Path, server: ScriptedServer):
    model = make(tmp_path)
    await model.register(EndpointBackend(server.base_url))  # at version 3
    client = model.openai_client(sync=True)

    def sampled_at(**asked: Any) -> tuple[Any, float]:
        with capture() as scope:
            client.chat.completions.create(model="agent", messages=Q, **asked)
        call = sampled_call(scope.trajectory.choices()[0])
        assert isinstance(call, SampledCall)
        return server.requests[-1].get("temperature"), call.temperature

    assert sampled_at() == (None, 1.0)
    model.set_temperature_annealer(LinearTemperatureAnnealer(1.0, 0.5, 10))
    assert sampled_at() == (0.85, 0.85)
    assert sampled_at(temperature=0.2) == (0.2, 0.2)
    model.served(4)
    assert sampled_at() == (0.8, 0.8)
    model.set_temperature_annealer(None)
    assert sampled_at() == (None, 1.0)
    model.http_client(sync=True).close()


async def test_what_is_wrong_is_said_with_its_remedy(tmp_path: Path):
    model = make(tmp_path)
    for wrong in (model.openai_client, model.get_inference_name, lambda: model.backend):
        with pytest.raises(ConfigError, match="register"):
            wrong()
    with pytest.raises(ConfigError, match="register"):
        await model.register()
    for name in ("", "a/b", "a@1", ".."):
        with pytest.raises(ConfigError, match="name"):
            Model(name=name, project="p")
    with pytest.raises(ConfigError, match="report_metrics"):
        Model(name="m", project="p", report_metrics=["wandb"])  # type: ignore[list-item]


def test_clients_are_generous_and_honour_the_environments_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    assert environment_proxy("https://api.example/v1") == "http://proxy:3128"
    assert environment_proxy(None) == "http://proxy:3128"
    assert environment_proxy("https://inside.example/v1") is None
    assert environment_proxy("https://127.0.0.1:8000/v1") is None
    model = Model(name="m", project="p", inference_api_key="x", base_path=tmp_path)
    client = model.openai_client()
    assert isinstance(client, openai.AsyncOpenAI)
    assert client.timeout == httpx.Timeout(600, connect=15)
    assert client.max_retries == 4
