"""`LocalBackend`: one machine serves a model and trains it, in turns.

A step is: train, write the checkpoint (with the step's metrics in it) to a temporary folder, rename it, publish it to the
engine, record the metrics. The checkpoint folder is the truth: `history.jsonl` and the served name follow from it, so a
process killed anywhere resumes at the newest complete step and repairs what came after.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError

from art_backend.base_model import eos_token_ids, load_tokenizer, resolve
from art_backend.chat.tokenize import sequences_from_messages
from art_backend.checkpoints import Checkpoints
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.protocols import InferenceEngine, Trainer, TrainSequence
from art_backend.samples import build_samples
from art_backend.threads import in_own_thread
from art_backend.trainer_choice import TrainerName, check_trainer, make_trainer
from art_backend.vllm.choice import EngineName, VLLMOptions, check_engine, make_engine
from art_core.backend import Endpoint, TrainResult
from art_core.errors import ConfigError, EngineError, TrainingError
from art_core.files import write_json
from art_core.storage import RunStore

if TYPE_CHECKING:
    from art_backend.unsloth_model import UnslothOptions
    from art_core.models import TrainableModel
    from art_core.types import Trajectory, TrajectoryGroup

C = TypeVar("C", GRPOConfig, SFTConfig)

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.json"
SERVED_STEPS = 2
"""Newest steps that stay published: the current one, and the one that rollouts in flight may still use."""


@dataclass
class _Run:
    """One registered model: its folder, its trainer and the engine that serves it."""

    folder: Path
    base_model: str
    checkpoints: Checkpoints
    trainer: Trainer
    engine: InferenceEngine
    step: int = 0
    published: list[str] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


def parse_config(kind: type[C], options: dict[str, Any]) -> C:
    """Options as a typed object. Raises ConfigError naming the first option that is unknown or out of range."""
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"]) or "options"
        known = ", ".join(sorted(kind.model_fields))
        raise ConfigError(f"{option}: {first['msg']} (known options: {known}).") from None


class LocalBackend:
    """Serves and trains on this machine.

    Args:
        path: where models are kept; None: each model's own `base_path`.
        engine: `transformers` runs embedded, wherever torch runs, `vllm` in a process of its own, `auto` picks what fits this
            machine, and `VLLMOptions(reasoning_parser="qwen3", ...)` stands for `vllm` with those options. Or an engine of
            your own, which several backends may share: it is started where need be, and left running.
        trainer: `peft` runs wherever torch runs, `unsloth` is faster on a GPU, `auto` picks what fits this machine, and
            `UnslothOptions(load_in_4bit=True, ...)` stands for `unsloth` with those options.
        adapter: shape of the LoRA adapter of models that have no checkpoint yet.
        max_batch_size: requests that the engine computes at once.
        max_model_len: longest prompt plus reply, in tokens.
        seed: initial adapter weights and the order of supervised batches.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        engine: EngineName | VLLMOptions | InferenceEngine = "auto",
        trainer: TrainerName | UnslothOptions = "auto",
        adapter: AdapterConfig | None = None,
        max_batch_size: int = 32,
        max_model_len: int = 2048,
        seed: int = 0,
    ) -> None:
        self._shared_engine = engine if isinstance(engine, InferenceEngine) else None
        self._engine_asked: EngineName | VLLMOptions = "auto" if isinstance(engine, InferenceEngine) else engine
        check_engine(self._engine_asked)
        check_trainer(trainer)
        self.path = Path(path) if path is not None else None
        self.adapter = adapter or AdapterConfig()
        self.seed = seed
        self._trainer = trainer
        self._max_batch_size, self._max_model_len = max_batch_size, max_model_len
        self._engines: dict[str, InferenceEngine] = {}
        self._runs: dict[Path, _Run] = {}
        self._locks = ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> Endpoint:
        """Load `model`, resume its newest complete step, serve it. Registering again returns the same endpoint."""
        folder = self._folder(model)
        if folder not in self._runs:
            self._lock(folder)
            self._runs[folder] = await self._open(model, folder)
        engine = self._runs[folder].engine
        return Endpoint(engine.base_url, engine.api_key)

    async def serve_base(self, model: TrainableModel, name: str) -> Endpoint:
        """Serve the bare base model of the registered `model` as `name`, beside its policy versions."""
        engine = self._run(model).engine
        await engine.publish(name, None)
        return Endpoint(engine.base_url, engine.api_key)

    async def step(self, model: TrainableModel) -> int:
        """The policy version that is being served."""
        return self._run(model).step

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        *,
        extra_metrics: dict[str, float] | None = None,
        **options: Any,
    ) -> TrainResult:
        """One GRPO step on `groups` (options: `GRPOConfig`).

        Only calls that `model` sampled are trained: where several models serve the roles of one rollout, train each of
        them on the same groups. The step number advances also when there is nothing to learn from; `result.reason` then
        says why.
        `extra_metrics` are stored with the step's own, in the checkpoint: they survive whatever happens next.
        """
        config, run = parse_config(GRPOConfig, options), self._run(model)
        samples = build_samples(
            groups,
            scale_rewards=config.scale_rewards,
            baseline=config.baseline,
            normalize_advantages=config.normalize_advantages,
            advantage_balance=config.advantage_balance,
            eos_token_ids=eos_token_ids(resolve(run.base_model)),
            model=model.name,
            train_only=config.train_only,
        )
        async with run.busy:
            compared = config.kl_penalty_reference_step
            reference = None if compared is None else run.checkpoints.path(compared)
            metrics = {**(extra_metrics or {}), **samples.report.metrics()}
            started = time.perf_counter()
            if samples.sequences:
                await run.engine.sleep()
                metrics |= await in_own_thread(run.trainer.step, samples.sequences, config, reference)
            metrics["time/step_trainer_s"] = time.perf_counter() - started
            return await self._complete(model, run, metrics, reason=samples.report.reason())

    async def train_sft(
        self,
        model: TrainableModel,
        trajectories: Iterable[Trajectory],
        *,
        extra_metrics: dict[str, float] | None = None,
        **options: Any,
    ) -> TrainResult:
        """Cross-entropy on the assistant turns of `trajectories` (options: `SFTConfig`): one policy version, however
        many optimizer steps."""
        config, run = parse_config(SFTConfig, options), self._run(model)
        examples = await asyncio.to_thread(_sft_sequences, run.base_model, list(trajectories))
        if not any(examples):
            raise TrainingError(
                "train_sft got no assistant turn to learn from: give trajectories with assistant messages."
            )
        async with run.busy:
            started = time.perf_counter()
            await run.engine.sleep()
            order = random.Random(f"{self.seed}/{run.step}")
            history = [
                await in_own_thread(run.trainer.sft_step, batch, config) for batch in _batches(examples, config, order)
            ]
            metrics = {**(extra_metrics or {}), **history[-1], "loss/train_first": history[0]["loss/train"]}
            metrics["sft/optimizer_steps"] = len(history)
            metrics["time/step_trainer_s"] = time.perf_counter() - started
            return await self._complete(model, run, metrics, reason=None)

    async def close(self) -> None:
        """Stop the engines, but for one that was given, and free the models. Idempotent."""
        for run in self._runs.values():
            run.trainer.close()
            if run.engine is self._shared_engine:
                with suppress(EngineError):  # it may be closed
                    for name in run.published:
                        await run.engine.retire(name)
        for engine in self._engines.values():
            await engine.close()
        self._runs.clear()
        self._engines.clear()
        self._locks.close()

    async def delete_checkpoints(self, model: TrainableModel, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """Delete all checkpoints but the newest and, by the history, the best in `best_checkpoint_metric`.

        Returns the deleted steps; none while the metric is known for no step, since the best could be among them.
        """
        run = self._run(model)
        served = {int(name.rpartition("@")[2]) for name in run.published}
        history = RunStore(run.folder).history()
        return await asyncio.to_thread(run.checkpoints.prune, history, metric=best_checkpoint_metric, leased=served)

    def checkpoints(self, model: TrainableModel) -> Checkpoints:
        """The checkpoints of a registered model."""
        return self._run(model).checkpoints

    def _folder(self, model: TrainableModel) -> Path:
        return (model.path if self.path is None else self.path / model.project / "models" / model.name).resolve()

    def _run(self, model: TrainableModel) -> _Run:
        run = self._runs.get(self._folder(model))
        if run is None:
            raise ConfigError(f"{model.name} is not registered: call `await model.register(backend)` first.")
        return run

    def _lock(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._locks.enter_context(FileLock(folder / ".lock", timeout=0))
        except Timeout:
            raise ConfigError(
                f"{folder} is being trained by another process: stop that one or use another name."
            ) from None

    async def _open(self, model: TrainableModel, folder: Path) -> _Run:
        # Before the engine: Unsloth is to be imported before Transformers.
        trainer = await in_own_thread(make_trainer, self._trainer, self._max_model_len)
        checkpoints = Checkpoints(folder / "checkpoints")
        run = _Run(folder, model.base_model, checkpoints, trainer, await self._engine(model.base_model))
        newest = await asyncio.to_thread(checkpoints.newest)
        await in_own_thread(trainer.load, model.base_model, self.adapter, self.seed)
        if newest is None:
            await in_own_thread(checkpoints.write, 0, trainer.save)
        else:
            run.step = newest
            await in_own_thread(trainer.restore, checkpoints.path(newest))
        _repair_history(run)
        await self._publish(model, run)
        return run

    async def _engine(self, base_model: str) -> InferenceEngine:
        """One engine a base model, shared by all models trained on it. Raises ConfigError when the one given has another."""
        if (shared := self._shared_engine) is not None:
            if await asyncio.to_thread(lambda: resolve(shared.base_model) != resolve(base_model)):
                raise ConfigError(f"The engine serves {shared.base_model}, the model is trained on {base_model}.")
            await shared.start()
            return shared
        if base_model not in self._engines:
            engine = await asyncio.to_thread(
                make_engine,
                self._engine_asked,
                base_model,
                max_batch_size=self._max_batch_size,
                max_model_len=self._max_model_len,
                lora_rank=self.adapter.r,
            )
            await engine.start()
            self._engines[base_model] = engine
        return self._engines[base_model]

    async def _publish(self, model: TrainableModel, run: _Run) -> None:
        name = f"{model.name}@{run.step}"
        await run.engine.publish(name, run.checkpoints.path(run.step))
        model.served(run.step)
        run.published.append(name)
        while len(run.published) > SERVED_STEPS:
            await run.engine.retire(run.published.pop(0))

    async def _complete(
        self, model: TrainableModel, run: _Run, metrics: dict[str, float], *, reason: str | None
    ) -> TrainResult:
        step, trained = run.step + 1, reason is None
        record = {"step": step, "trained": int(trained), **({"reason": reason} if reason else {}), **metrics}

        def save(folder: Path) -> None:
            run.trainer.save(folder)
            write_json(folder / METRICS_FILE, record)

        started = time.perf_counter()
        path = await in_own_thread(run.checkpoints.write, step, save)
        run.step = step
        await self._publish(model, run)
        RunStore(run.folder).append_history(record)
        return TrainResult(
            step, {**metrics, "time/step_publish_s": time.perf_counter() - started}, path, trained, reason
        )


def _sft_sequences(base_model: str, trajectories: Iterable[Trajectory]) -> list[list[TrainSequence]]:
    """The assistant turns of each trajectory as sequences. Turns that cannot be rendered are counted in a warning."""
    path = resolve(base_model)
    tokenizer, eos = load_tokenizer(path), eos_token_ids(path)
    examples, skipped = [], []
    for trajectory in trajectories:
        example: list[TrainSequence] = []
        for history in trajectory.histories():
            tokenized = sequences_from_messages(tokenizer, history.messages(), history.tools, eos_token_ids=eos)
            example += tokenized.sequences
            skipped += tokenized.skipped
        examples.append(example)
    if skipped:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in Counter(s.reason for s in skipped).items())
        log.warning("%d assistant turns are not trained (%s); the first: %s", len(skipped), reasons, skipped[0].detail)
    return examples


def _batches(
    examples: list[list[TrainSequence]], config: SFTConfig, rng: random.Random
) -> Iterable[list[TrainSequence]]:
    """Shuffled batches of `config.batch_size` trajectories, flattened to sequences, for every epoch."""
    examples = [example for example in examples if example]
    for _ in range(config.epochs):
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), config.batch_size):
            yield [sequence for example in order[start : start + config.batch_size] for sequence in example]


def _repair_history(run: _Run) -> None:
    """Record steps whose checkpoint was completed but whose line in `history.jsonl` was not written before a kill."""
    store = RunStore(run.folder)
    known = {record.get("step") for record in store.history() if "trained" in record}
    for step in run.checkpoints.steps():
        metrics = run.checkpoints.path(step) / METRICS_FILE
        if step not in known and metrics.exists():
            store.append_history(json.loads(metrics.read_text()))
