"""`LocalBackend` end to end on a tiny model: sample through the client, train, serve the new version, resume, repair."""

import json
from pathlib import Path

import pytest
import torch

import art_core as art
from art_backend import AdapterConfig, LocalBackend
from art_core.errors import ConfigError, TrainingError

ADAPTER = AdapterConfig(r=4, alpha=8)


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine, so that engine and trainer agree exactly."""
    monkeypatch.setattr("art_backend.base_model.default_dtype", lambda: torch.float32)


def backend() -> LocalBackend:
    return LocalBackend(adapter=ADAPTER, max_batch_size=8, max_model_len=256)


def trainable(folder: Path, base: Path, name: str = "agent") -> art.TrainableModel:
    return art.TrainableModel(name=name, project="p", base_model=str(base), base_path=folder)


async def attempt(model: art.TrainableModel, seed: int, reward: float) -> art.Trajectory:
    async def ask() -> None:
        await model.openai_client().chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=6, seed=seed
        )
        art.auto_trajectory(required=True).reward = reward

    return await art.capture_auto_trajectory(ask())


async def group(model: art.TrainableModel, rewards: list[float]) -> art.TrajectoryGroup:
    return await art.TrajectoryGroup(attempt(model, seed, reward) for seed, reward in enumerate(rewards))


async def test_a_step_is_trained_published_recorded_and_served(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        assert model.get_inference_name() == "agent@0"
        first = await group(model, [1.0, 0.0])
        assert [t.initial_policy_version for t in first] == [0, 0]
        result = await model.train([first], learning_rate=1e-2)
        assert (result.step, result.trained) == (1, True)
        assert result.metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert result.metrics["train/reward"] == pytest.approx(0.5)
        second = await group(model, [1.0, 0.0])
        assert [t.final_policy_version for t in second] == [1, 1]
        assert [c.token_ids for t in first for c in t.choices()]
    [record] = model.store.history()
    assert record["step"] == 1
    assert record["trained"] == 1
    assert json.loads((model.path / "model.json").read_text())["base_model"] == str(tiny_llama)
    assert "key" not in (model.path / "model.json").read_text()


async def test_ckpt_02_a_step_without_signal_advances_everywhere_and_says_why(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        result = await model.train([await group(model, [0.5, 0.5])])
        assert (result.step, result.trained) == (1, False)
        assert "equal" in (result.reason or "")
        assert model.get_inference_name() == "agent@1"
        assert await model.get_step() == 1
        assert local.checkpoints(model).steps() == [0, 1]
        assert model.store.history()[-1]["trained"] == 0


async def test_a_restart_goes_on_and_repairs_a_history_that_a_kill_cut_short(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        await model.train([await group(model, [1.0, 0.0])])
    kept = model.store.history()
    (model.path / "history.jsonl").unlink()  # killed between the checkpoint and its line
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        assert await model.get_step() == 1
        assert model.store.history() == kept
        assert (await model.train([await group(model, [1.0, 0.0])])).step == 2


async def test_supervised_steps_lower_the_loss_and_make_one_version(tmp_path: Path, tiny_llama: Path) -> None:
    talk = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "blue"}]
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        shown = [art.Trajectory(messages_and_choices=talk)] * 2
        result = await model.train_sft(shown, learning_rate=5e-2, batch_size=1, epochs=5)
        assert result.step == 1
        assert result.metrics["sft/optimizer_steps"] == 10
        assert result.metrics["loss/train"] < result.metrics["loss/train_first"]
        with pytest.raises(TrainingError, match="no assistant turn"):
            await model.train_sft([art.Trajectory(messages_and_choices=talk[:1])])


async def test_two_models_share_an_engine_and_not_their_folders(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        one, two = trainable(tmp_path, tiny_llama, "one"), trainable(tmp_path, tiny_llama, "two")
        await one.register(local)
        await two.register(local)
        assert one.inference_base_url == two.inference_base_url
        await one.train([await group(one, [1.0, 0.0])], learning_rate=1e-1)
        assert (await one.get_step(), await two.get_step()) == (1, 0)


async def test_mistakes_are_refused_with_their_remedy(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        with pytest.raises(ConfigError, match="register"):
            await local.train(model, [])
        await model.register(local)
        with pytest.raises(ConfigError, match=r"learning_rat: .*known options: .*learning_rate"):
            await model.train([], learning_rat=1e-3)
        async with backend() as other:
            with pytest.raises(ConfigError, match="another process"):
                await trainable(tmp_path, tiny_llama).register(other)
    with pytest.raises(ConfigError, match="engine='tensorrt'"):
        LocalBackend(engine="tensorrt")  # type: ignore[arg-type]


async def test_two_adapters_learn_from_one_rollout_each_its_own_calls(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        one, two = trainable(tmp_path, tiny_llama, "one"), trainable(tmp_path, tiny_llama, "two")
        await one.register(local)
        await two.register(local)

        async def ask(seed: int) -> None:
            for name, model in (("researcher", one), ("writer", two)):
                with art.role(name):
                    await model.openai_client().chat.completions.create(
                        model=model.name, messages=[{"role": "user", "content": "Hi."}], max_tokens=4, seed=seed
                    )
            art.auto_trajectory(required=True).reward = float(seed)

        crew = await art.TrajectoryGroup(art.capture_auto_trajectory(ask(seed)) for seed in range(2))
        for model in (one, two):
            result = await local.train(model, [crew])
            assert result.metrics["data/calls_trained"] == result.metrics["data/calls_other_model"] == 2
        result = await local.train(one, [crew], train_only=["researcher"])
        assert (result.trained, result.metrics["data/calls_other_role"]) == (True, 0)
        result = await local.train(one, [crew], train_only=["writer"])
        assert (result.trained, result.metrics["data/calls_other_role"]) == (False, 2)
        with pytest.raises(ConfigError, match="train_only"):
            await local.train(one, [crew], train_only="researcher")
