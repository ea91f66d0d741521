"""The demo's loop (a warm-up, then GRPO) on each engine with each trainer: what one samples, the other trains.

After every swap the engine's logprobs are held to those of the checkpoint that it claims to serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import art_core as art
from art_backend import AdapterConfig, LocalBackend
from art_backend.base_model import default_dtype
from art_backend.unsloth_model import UnslothOptions, unsloth_is_installed
from tests.backend.vllm_real.asking import USER, ask, gaps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTER = AdapterConfig(r=4, alpha=8)
NATS = 1e-3 if default_dtype() == torch.float32 else 0.1
"""The allowed mean gap: a trainer or an engine in bfloat16 rounds, by 0.03 nats a token here."""


@pytest.fixture(params=["vllm-peft", "vllm-unsloth", "transformers-peft"])
def local(request: pytest.FixtureRequest) -> LocalBackend:
    engine, _, trainer = request.param.partition("-")
    if trainer == "unsloth" and not unsloth_is_installed():
        pytest.skip("Unsloth is not installed: see docs/models.md")
    return LocalBackend(
        engine=request.getfixturevalue("engine") if engine == "vllm" else engine,
        trainer="peft" if trainer == "peft" else UnslothOptions(dtype=torch.float32),
        adapter=ADAPTER,
        max_model_len=256,
    )


def policy(base: Path, checkpoint: Path) -> Any:
    """The model of a checkpoint, by PEFT's own code."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(checkpoint)).eval()


async def attempt(agent: art.TrainableModel, reward: float) -> art.Trajectory:
    async def ask_once() -> None:
        await agent.openai_client().chat.completions.create(model=agent.name, messages=USER, max_tokens=8)
        art.auto_trajectory(required=True).reward = reward

    return await art.capture_auto_trajectory(ask_once())


async def test_three_steps_each_served_before_the_next(
    local: LocalBackend, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id  # the engine is shared: names of its models are not
    async with local:
        agent = art.TrainableModel(name=name, project="p", base_model=str(base), base_path=tmp_path)
        await agent.register(local)
        answers = [
            art.Trajectory(messages_and_choices=[*USER, {"role": "assistant", "content": c}]) for c in ("Red", "Blue")
        ]
        await agent.train_sft(answers, learning_rate=1e-2)
        texts = set()
        for step in range(1, 4):
            group = await art.TrajectoryGroup(attempt(agent, reward) for reward in (0.0, 1.0, 0.0, 1.0))
            assert {t.final_policy_version for t in group} == {step}
            result = await agent.train([group], learning_rate=3e-2)
            assert (result.trained, result.step) == (True, step + 1)
            assert result.metrics["loss/logprob_gap"] < NATS
            client = agent.openai_client()
            before, after = [await ask(client, f"{name}@{version}") for version in (step, step + 1)]
            for version, reply in ((step, before), (step + 1, after)):
                assert gaps(policy(base, local.checkpoints(agent).path(version)), reply).mean() < NATS
            assert before.choices[0].token_ids != after.choices[0].token_ids
            texts.add(tuple(after.choices[0].token_ids))
        assert len(texts) == 3


@pytest.mark.parametrize("local", ["vllm-peft", "transformers-peft"], indirect=True)
async def test_of_two_models_on_one_engine_one_is_trained_and_the_other_answers_as_before(
    local: LocalBackend, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def said(answer: str) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=[*USER, {"role": "assistant", "content": answer}])

    async with local:
        names = [f"{name}-{request.node.callspec.id}" for name in ("one", "other")]
        one, other = [
            art.TrainableModel(name=name, project="p", base_model=str(base), base_path=tmp_path) for name in names
        ]
        await one.register(local)
        await other.register(local)
        assert one.inference_base_url == other.inference_base_url
        await one.train_sft([said("Red")], learning_rate=1e-2)
        await other.train_sft([said("Blue")], learning_rate=1e-2)
        client = one.openai_client()
        before = [await ask(client, name) for name in names]
        await one.train_sft([said("Green")], learning_rate=3e-2)
        after = [await ask(client, name) for name in names]
    assert [reply.model for reply in after] == [f"{names[0]}@2", f"{names[1]}@1"]
    logprobs = [[entry.logprob for entry in reply.choices[0].logprobs.content] for reply in (before[1], after[1])]
    assert before[1].choices[0].token_ids == after[1].choices[0].token_ids
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3)
    answers = [reply.choices[0].token_ids for reply in (before[0], after[0], after[1])]
    assert len({tuple(answer) for answer in answers}) == 3
