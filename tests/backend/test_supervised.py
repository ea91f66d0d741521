"""Supervised training from a chat file: what is learnt, what is context, what is refused before anything changes."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest

import art_core as art
from art_backend.base_model import load_tokenizer
from art_backend.config import SFTConfig
from art_backend.supervised import optimizer_steps, sft_batches, sft_examples
from art_core.chat_file import read_chat_file
from art_core.errors import ConfigError, TrainingError
from art_core.progress import SlowSteps
from tests.backend.test_local import backend, trainable

TALK = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "red", "weight": 0},
    {"role": "user", "content": "Another one."},
    {"role": "assistant", "content": "blue"},
]


def chats(folder: Path, *conversations: list[dict[str, object]]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def test_only_assistant_turns_with_weight_are_learnt(tmp_path: Path, tiny_llama: Path) -> None:
    ((row,),) = sft_examples(str(tiny_llama), read_chat_file(chats(tmp_path, TALK)))
    tokenizer = load_tokenizer(tiny_llama)
    assert tokenizer.decode(row.token_ids[row.prompt_length :]) == "blue<|im_end|>"
    prompt = tokenizer.decode(row.token_ids[: row.prompt_length])
    assert "red<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "weight" not in prompt


async def test_a_file_and_its_trajectories_train_the_same(tmp_path: Path, tiny_llama: Path) -> None:
    path = chats(tmp_path, TALK, TALK[2:])
    adapters = []
    async with backend() as local:
        for name, shown in (("one", path), ("two", list(read_chat_file(path)))):
            model = trainable(tmp_path, tiny_llama, name)
            await model.register(local)
            result = await model.train_sft(shown, learning_rate=5e-2, batch_size=1, epochs=4)
            assert result.metrics["sft/optimizer_steps"] == 8
            assert result.metrics["loss/train"] < result.metrics["loss/train_first"]
            assert result.checkpoint_path is not None
            adapters.append((result.checkpoint_path / "adapter_model.safetensors").read_bytes())
        assert adapters[0] == adapters[1]
        path.write_text(path.read_text() + '{"messages": []}\n')
        with pytest.raises(ConfigError, match=r"chats\.jsonl, line 3"):
            await model.train_sft(path)
        assert await model.get_step() == 1
        path.write_text("")
        with pytest.raises(TrainingError, match="no assistant turn"):
            await model.train_sft(path)


def test_a_weight_is_respected_in_a_trajectory_too(tiny_llama: Path) -> None:
    with pytest.raises(TrainingError, match="no assistant turn"):
        sft_examples(str(tiny_llama), [art.Trajectory(messages_and_choices=TALK[:2])])


def test_the_number_of_steps_is_known_before(tiny_llama: Path) -> None:
    example = sft_examples(str(tiny_llama), [art.Trajectory(messages_and_choices=TALK)])[0]
    for count, size in ((1, 8), (7, 3), (6, 3)):
        config, examples = SFTConfig(batch_size=size, epochs=2), [example] * count
        assert optimizer_steps(examples, config) == len(list(sft_batches(examples, config, random.Random(0))))


def test_a_long_run_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "art_core.gather"):
        slow, quick = SlowSteps("train_sft", 3, seconds=0), SlowSteps("quick", 3)
        for loss in ("loss 3", "loss 2", "loss 1"):
            slow.advance(loss)
            quick.advance(loss)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(", about")[0] for line in lines] == [
        "train_sft: 1/3 steps, loss 3",
        "train_sft: 2/3 steps, loss 2",
    ]


async def test_steps_before_one_that_fails_are_undone(tmp_path: Path, tiny_llama: Path) -> None:
    shown = [art.Trajectory(messages_and_choices=TALK)]
    adapters = []
    async with backend() as local:
        for name in ("calm", "shaken"):
            model = trainable(tmp_path, tiny_llama, name)
            await model.register(local)
            if name == "shaken":
                with pytest.raises(TrainingError, match="not finite"):
                    await model.train_sft(shown, learning_rate=1e30, epochs=4)
                assert await model.get_step() == 0
            result = await model.train_sft(shown, learning_rate=1e-2, epochs=2)
            assert result.checkpoint_path is not None
            adapters.append((result.checkpoint_path / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]
