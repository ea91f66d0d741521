"""`LocalBackend`: one machine serves a model and trains it, in turns.

A step is: train, write the checkpoint (with the step's metrics in it) to a temporary folder, rename it, publish it to the
engine, record the metrics. The checkpoint folder is the truth: `history.jsonl` and the served name follow from it, so a
process killed anywhere resumes at the newest complete step and repairs what came after.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from art_backend.base_model import eos_token_ids, resolve
from art_backend.checkpoints import Checkpoints
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig, parse_config
from art_backend.export import export_run
from art_backend.fork import fork
from art_backend.protocols import InferenceEngine
from art_backend.run import REFERENCE_STEP, Run, repair_history
from art_backend.samples import build_samples
from art_backend.supervised import optimizer_steps, sft_batches, sft_examples
from art_backend.threads import in_own_thread
from art_backend.trainer_choice import TrainerName, check_trainer, make_trainer
from art_backend.vllm.choice import EngineAsked, check_engine, make_engine
from art_core.backend import Endpoint, TrainResult
from art_core.errors import ConfigError, EngineError
from art_core.progress import SlowSteps
from art_core.storage import RunStore

if TYPE_CHECKING:
    from art_backend.unsloth_model import UnslothOptions
    from art_core.models import TrainableModel
    from art_core.types import Trajectory, TrajectoryGroup


class LocalBackend:
    """Serves and trains on this machine.

    Args:
        path: where models are kept; None: each model's own `base_path`.
        engine: `transformers` runs embedded, wherever torch runs, `vllm` in a process of its own, `auto` picks what fits this
            machine, and `TransformersOptions(reasoning_parser="qwen3", ...)` or `VLLMOptions(...)` stands for that engine with
            options. Or an engine of your own, which several backends may share: it is started where need be, and left running.
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
        engine: EngineAsked | InferenceEngine = "auto",
        trainer: TrainerName | UnslothOptions = "auto",
        adapter: AdapterConfig | None = None,
        max_batch_size: int = 32,
        max_model_len: int = 2048,
        seed: int = 0,
    ) -> None:
        self._shared_engine = engine if isinstance(engine, InferenceEngine) else None
        self._engine_asked: EngineAsked = "auto" if isinstance(engine, InferenceEngine) else engine
        check_engine(self._engine_asked)
        check_trainer(trainer)
        self.path = Path(path) if path is not None else None
        self.adapter = adapter or AdapterConfig()
        self.seed = seed
        self._trainer = trainer
        self._max_batch_size, self._max_model_len = max_batch_size, max_model_len
        self._engines: dict[str, InferenceEngine] = {}
        self._runs: dict[Path, Run] = {}
        self._locks = ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: TrainableModel) -> Endpoint:
        """Load `model`, resume its newest complete step, serve it. Registering again returns the same endpoint."""
        folder = self._folder(model)
        if folder not in self._runs:
            self._lock(folder, self._locks)
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
            without_logprobs=config.allow_training_without_logprobs,
        )
        async with run.busy:
            compared = config.kl_penalty_reference_step
            reference = None if compared is None else run.checkpoints.path(compared)
            metrics = {**(extra_metrics or {}), **samples.report.metrics()}
            if compared is not None:
                metrics[REFERENCE_STEP] = float(compared)
            started = time.perf_counter()
            if samples.sequences:
                await run.engine.sleep()
                metrics |= await in_own_thread(run.trainer.step, samples.sequences, config, reference)
            metrics["time/step_trainer_s"] = time.perf_counter() - started
            return await run.complete(model, metrics, reason=samples.report.reason())

    async def train_sft(
        self,
        model: TrainableModel,
        trajectories: Iterable[Trajectory],
        *,
        extra_metrics: dict[str, float] | None = None,
        **options: Any,
    ) -> TrainResult:
        """Cross-entropy on the assistant turns of `trajectories` (options: `SFTConfig`): one policy version, however
        many optimizer steps. Messages with `"weight": 0` are context."""
        config, run = parse_config(SFTConfig, options), self._run(model)
        examples = await asyncio.to_thread(sft_examples, run.base_model, trajectories)
        async with run.busy:
            started = time.perf_counter()
            await run.engine.sleep()
            progress = SlowSteps("train_sft", optimizer_steps(examples, config))
            history = []
            async with run.undone_on_error():
                for batch in sft_batches(examples, config, random.Random(f"{self.seed}/{run.step}")):
                    history.append(await in_own_thread(run.trainer.sft_step, batch, config))
                    progress.advance(f"loss {history[-1]['loss/train']:.3f}")
            metrics = {**(extra_metrics or {}), **history[-1], "loss/train_first": history[0]["loss/train"]}
            metrics["sft/optimizer_steps"] = len(history)
            metrics["time/step_trainer_s"] = time.perf_counter() - started
            return await run.complete(model, metrics, reason=None)

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

    async def delete_checkpoints(
        self,
        model: TrainableModel,
        best_checkpoint_metric: str = "val/reward",
        *,
        keep_recent: int = 1,
        higher_is_better: bool = True,
        dry_run: bool = False,
    ) -> list[int]:
        """Delete all checkpoints but the `keep_recent` newest, the best in `best_checkpoint_metric` by the history, those
        that are served, and the one that a training step last named as `kl_penalty_reference_step`.

        A training step under way ends first. Returns the deleted steps (`dry_run`: those that would be); none while the
        metric is known for no step, since the best could be among them.
        """
        run = self._run(model)
        async with run.busy:
            history = RunStore(run.folder).history()
            return await asyncio.to_thread(
                run.checkpoints.prune,
                history,
                metric=best_checkpoint_metric,
                higher_is_better=higher_is_better,
                keep_recent=keep_recent,
                leased=run.leased(history),
                dry_run=dry_run,
            )

    async def fork_checkpoint(
        self,
        model: TrainableModel,
        from_model: str | TrainableModel,
        *,
        from_project: str | None = None,
        not_after_step: int | None = None,
        optimizer: bool = False,
    ) -> int:
        """Let `model`, which has no checkpoint yet and is registered afterwards, start from one of `from_model`.

        Args:
            from_model: a model, or the name of one beside `model`.
            from_project: the project of that name; None: that of `model`.
            not_after_step: take the newest complete step up to this one; None: the newest.
            optimizer: also take the optimizer's state and the place in the learning rate schedule.

        Returns the step that was taken; it is step 0 of `model`. Raises ConfigError or CheckpointError when it cannot be.
        """
        target = self._folder(model)
        if isinstance(from_model, str):
            source = target.parents[2] / (from_project or model.project) / "models" / from_model
        else:
            source = self._folder(from_model)
        if target in self._runs:
            raise ConfigError(f"{model.name} is registered already: fork into it before.")
        with ExitStack() as lock:
            self._lock(target, lock)
            return await in_own_thread(
                partial(
                    fork,
                    source,
                    target,
                    base_model=model.base_model,
                    not_after_step=not_after_step,
                    optimizer=optimizer,
                    seed=self.seed,
                )
            )

    async def export_merged(self, model: TrainableModel, folder: str | Path, step: int | None = None) -> Path:
        """Write `model` at a step (None: the newest) to `folder` as a model of its own: the adapter merged into the base
        weights, with tokenizer and chat template, to be loaded by Transformers or vLLM.

        `model` need not be registered. Raises ConfigError when `folder` exists, CheckpointError when there is no such step.
        """
        return await in_own_thread(export_run, self._folder(model), Path(folder), step)

    def checkpoints(self, model: TrainableModel) -> Checkpoints:
        """The checkpoints of a registered model."""
        return self._run(model).checkpoints

    def _folder(self, model: TrainableModel) -> Path:
        return (model.path if self.path is None else self.path / model.project / "models" / model.name).resolve()

    def _run(self, model: TrainableModel) -> Run:
        run = self._runs.get(self._folder(model))
        if run is None:
            raise ConfigError(f"{model.name} is not registered: call `await model.register(backend)` first.")
        return run

    def _lock(self, folder: Path, until: ExitStack) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            until.enter_context(FileLock(folder / ".lock", timeout=0))
        except Timeout:
            raise ConfigError(
                f"{folder} is being trained by another process: stop that one or use another name."
            ) from None

    async def _open(self, model: TrainableModel, folder: Path) -> Run:
        # Before the engine: Unsloth is to be imported before Transformers.
        trainer = await in_own_thread(make_trainer, self._trainer, self._max_model_len)
        checkpoints = Checkpoints(folder / "checkpoints")
        newest = await asyncio.to_thread(checkpoints.newest)
        rank = self.adapter.r if newest is None else max(self.adapter.r, checkpoints.rank(newest))
        run = Run(folder, model.base_model, checkpoints, trainer, await self._engine(model.base_model, rank))
        await in_own_thread(trainer.load, model.base_model, self.adapter, self.seed)
        if newest is None:
            await in_own_thread(checkpoints.write, 0, trainer.save)
        else:
            run.step = newest
            await in_own_thread(trainer.restore, checkpoints.path(newest))
        repair_history(run)
        await run.publish(model)
        return run

    async def _engine(self, base_model: str, lora_rank: int) -> InferenceEngine:
        """One engine a base model, shared by all models trained on it; `lora_rank` is what a new one must take. Raises
        ConfigError when the one given has another base model."""
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
                lora_rank=lora_rank,
            )
            await engine.start()
            self._engines[base_model] = engine
        return self._engines[base_model]
