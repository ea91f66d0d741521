"""`Model` and `TrainableModel`: a name, a run folder, an endpoint, and the calls an agent script makes.

A model knows no framework and no trainer. A trainable one is served by its backend as `name@step`, one name for each
policy version; calls that just say `name` get the newest version at the moment of the request, so a script that runs
across training steps never samples from an old adapter by accident.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from typing_extensions import TypeVar

from art_core.annealing import LinearTemperatureAnnealer
from art_core.backend import Backend, TrainResult
from art_core.chat_file import read_chat_file
from art_core.clients import CaptureClients
from art_core.errors import ConfigError
from art_core.storage import RunStore
from art_core.summary import group_metrics
from art_core.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import httpx
    from openai import AsyncOpenAI, OpenAI

logger = logging.getLogger("art_core.models")
ConfigT = TypeVar("ConfigT", default=Any)
Reporter = Callable[[int, dict[str, float]], None]
"""Called with the step and the metrics of every `log`."""


class Model(Generic[ConfigT]):
    """A prompted model, for comparison: its calls are captured and logged, and never trained.

    Args:
        name: names the run folder; no "/" and no "@".
        project: groups models that are compared.
        entity: team or user that the run belongs to.
        config: anything the agent wants to keep with the model; stored in `model.json` when it is a dict or a pydantic
            object.
        inference_api_key, inference_base_url: the endpoint; None: the OpenAI SDK's environment variables.
        inference_model_name: the name that the endpoint knows; None: `name`.
        base_path: where run folders are kept.
        report_metrics: called with (step, metrics) on every `log`, beside the record in the run folder.
    """

    trainable = False

    def __init__(
        self,
        *,
        name: str,
        project: str,
        entity: str | None = None,
        config: ConfigT | None = None,
        inference_api_key: str | None = None,
        inference_base_url: str | None = None,
        inference_model_name: str | None = None,
        base_path: str | Path = ".art",
        report_metrics: Sequence[Reporter] | None = None,
    ) -> None:
        for what, value in (("name", name), ("project", project)):
            if not value or value in (".", "..") or any(mark in value for mark in "/\\@"):
                raise ConfigError(f"{what}={value!r} names a folder and a served model: give one without '/' and '@'.")
        for reporter in report_metrics or ():
            if not callable(reporter):
                raise ConfigError(f"report_metrics={reporter!r}: give callables that take (step, metrics).")
        self.name = name
        self.project = project
        self.entity = entity
        self.config = config
        self.inference_api_key = inference_api_key
        self.inference_base_url = inference_base_url
        self.inference_model_name = inference_model_name
        self.base_path = Path(base_path)
        self.report_metrics = tuple(report_metrics or ())
        self._clients: CaptureClients | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, project={self.project!r})"

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.base_path / self.project / "models" / self.name

    @property
    def store(self) -> RunStore:
        """What is kept in the run folder."""
        return RunStore(self.path)

    async def register(self, backend: Backend | None = None) -> None:
        """Make the run folder. A prompted model is served elsewhere, so `backend` has nothing to do."""
        self._write_model()

    async def get_step(self) -> int:
        """Always 0: a prompted model does not change."""
        return 0

    def get_inference_name(self, step: int | None = None) -> str:
        """The name to put into requests; a prompted model has the same at every step."""
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Arguments for `litellm.completion` / `acompletion`.

        Such a call is captured only when it is also given `client=model.openai_client()` (for `completion` with
        `sync=True`).
        """
        params = {"base_url": self.inference_base_url, "api_key": self.inference_api_key}
        named = {"model": f"openai/{self.get_inference_name(step)}"}
        return named | {key: value for key, value in params.items() if value is not None}

    @overload
    def openai_client(self, *, sync: Literal[False] = False) -> AsyncOpenAI: ...
    @overload
    def openai_client(self, *, sync: Literal[True]) -> OpenAI: ...
    def openai_client(self, *, sync: bool = False) -> AsyncOpenAI | OpenAI:
        """The SDK client of the model's endpoint. Its calls go to the capture scope of the running code; for code that
        loses its context in threads of its own, bind it to the rollout: `scope.client(model.openai_client())`."""
        return self.clients.sync_openai if sync else self.clients.async_openai

    @overload
    def http_client(self, *, sync: Literal[False] = False) -> httpx.AsyncClient: ...
    @overload
    def http_client(self, *, sync: Literal[True]) -> httpx.Client: ...
    def http_client(self, *, sync: bool = False) -> httpx.AsyncClient | httpx.Client:
        """The capturing `httpx` client, for frameworks that build their own SDK client around one."""
        return self.clients.sync_http if sync else self.clients.async_http

    @property
    def clients(self) -> CaptureClients:
        """All clients of the model's endpoint, made once."""
        if self._clients is None:
            self._clients = self._make_clients()
        return self._clients

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Append `trajectories` to the run folder, and their figures with `metrics` as one line to its history.

        Args:
            trajectories: groups, or loose trajectories, which are kept as one group.
            split: names files and metrics; a metric whose name has no "/" becomes `{split}/{name}`.
            step: policy version they belong to; None: the current one.
        """
        step = await self.get_step() if step is None else step
        groups = _as_groups(trajectories)
        if groups:
            self.store.append_trajectories(split, step, groups)
        self.log_metrics(groups, split, metrics=metrics, step=step)

    def log_metrics(
        self, groups: Sequence[TrajectoryGroup], split: str, *, metrics: dict[str, float] | None = None, step: int
    ) -> None:
        """`log` for groups whose trajectories were put into the run folder while they finished."""
        named = {name if "/" in name else f"{split}/{name}": value for name, value in (metrics or {}).items()}
        record = group_metrics(groups, split) | named
        if record:
            self.store.append_history({"step": step, "time": time.time(), **record})
        self._report(step, record)

    def read_state(self) -> dict[str, Any]:
        """The agent's own state (`state.json`), {} when there is none."""
        return self.store.read_state()

    def overwrite_state(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        self.store.write_state(state)

    def merge_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Set the given keys of the state, keep the others, and return all."""
        merged = {**self.read_state(), **state}
        self.overwrite_state(merged)
        return merged

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        for reporter in self.report_metrics:
            try:
                reporter(step, metrics)
            except Exception:  # a dashboard that is down must not end a training run
                logger.exception("the metrics of step %d could not be reported by %r", step, reporter)

    def _make_clients(self) -> CaptureClients:
        return CaptureClients(self.inference_base_url, self.inference_api_key, train=False)

    def _write_model(self) -> None:
        self.store.write_model(self._description())

    def _description(self) -> dict[str, Any]:
        """What `model.json` says. No API key."""
        dump = getattr(self.config, "model_dump", None)
        config = dump(mode="json") if dump else self.config
        return {
            "name": self.name,
            "project": self.project,
            "entity": self.entity,
            "trainable": self.trainable,
            "inference_model_name": self.inference_model_name,
            "config": config if isinstance(config, dict) else None,
        }


class TrainableModel(Model[ConfigT]):
    """A model that a backend serves and trains.

    Args:
        base_model: the model to start from, as the backend understands it. The other arguments are those of `Model`,
            without the endpoint, which the backend provides.
    """

    trainable = True

    def __init__(
        self,
        *,
        name: str,
        project: str,
        base_model: str,
        entity: str | None = None,
        config: ConfigT | None = None,
        base_path: str | Path = ".art",
        report_metrics: Sequence[Reporter] | None = None,
    ) -> None:
        super().__init__(
            name=name, project=project, entity=entity, config=config, base_path=base_path, report_metrics=report_metrics
        )
        self.base_model = base_model
        self._backend: Backend | None = None
        self._step: int | None = None
        self._annealer: LinearTemperatureAnnealer | None = None

    @property
    def backend(self) -> Backend:
        """The backend that serves the model. Raises ConfigError before `register`."""
        if self._backend is None:
            raise ConfigError(f"{self.name} is not registered: call `await model.register(backend)` first.")
        return self._backend

    def registered_with(self, backend: Backend) -> bool:
        """Whether `backend` serves the model."""
        return self._backend is backend

    async def register(self, backend: Backend | None = None) -> None:
        """Load the model in `backend`, resume its newest step, and serve it."""
        if backend is None:
            raise ConfigError(f"{self.name} needs a backend to train it: call `await model.register(LocalBackend())`.")
        endpoint = await backend.register(self)
        self.inference_base_url, self.inference_api_key = endpoint.base_url, endpoint.api_key
        self._backend, self._clients = backend, None
        await self.get_step()
        self._write_model()

    async def get_step(self) -> int:
        """The policy version that is being served."""
        step = await self.backend.step(self)
        self.served(step)
        return step

    def get_inference_name(self, step: int | None = None) -> str:
        """`name@step`, as the backend serves it; None: the newest step that this process knows."""
        if step is None and self._step is None:
            raise ConfigError(f"{self.name} is not served yet: call `await model.register(backend)` first.")
        return f"{self.name}@{self._step if step is None else step}"

    def served(self, step: int) -> None:
        """The backend says that `name@step` answers now: calls that just name the model go there from here on."""
        self._step = step

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """As for `Model`, and asking for what training needs."""
        asked = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        return {**super().litellm_completion_params(step), **asked}

    async def train(self, groups: Iterable[TrajectoryGroup], **config: Any) -> TrainResult:
        """Keep `groups` in the run folder (split `train`), take one GRPO step on them, and serve the new adapter.

        Args:
            config: options of the backend's training step; unknown ones are refused.
        """
        groups = list(groups)
        self.store.append_trajectories("train", await self.get_step(), groups)
        return await self.train_recorded(groups, **config)

    async def train_recorded(self, groups: Sequence[TrajectoryGroup], **config: Any) -> TrainResult:
        """`train` for groups whose trajectories were put into the run folder while they finished."""
        extra = {**group_metrics(groups, "train"), **config.pop("extra_metrics", {})}
        result = await self.backend.train(self, groups, extra_metrics=extra, **config)
        return self._advance(result)

    async def train_sft(self, trajectories: Iterable[Trajectory] | str | Path, **config: Any) -> TrainResult:
        """Supervised training on the assistant turns of `trajectories`; then serve the new adapter.

        Args:
            trajectories: conversations, or the path of a file with one a line (see `art_core.chat_file`). An assistant
                message with `"weight": 0` is context.
            config: options of the backend's supervised training; unknown ones are refused.
        """
        shown = read_chat_file(trajectories) if isinstance(trajectories, (str, Path)) else trajectories
        return self._advance(await self.backend.train_sft(self, shown, **config))

    async def delete_checkpoints(
        self,
        best_checkpoint_metric: str = "val/reward",
        *,
        keep_recent: int = 1,
        higher_is_better: bool = True,
        dry_run: bool = False,
    ) -> list[int]:
        """Delete all checkpoints but the `keep_recent` newest, the best by that metric of the history, and those in use
        (served, or the reference policy of the KL penalty).

        Returns the deleted steps; with `dry_run` those that would be.
        """
        return await self.backend.delete_checkpoints(
            self,
            best_checkpoint_metric,
            keep_recent=keep_recent,
            higher_is_better=higher_is_better,
            dry_run=dry_run,
        )

    def set_temperature_annealer(self, annealer: LinearTemperatureAnnealer | None) -> None:
        """Let requests that name no temperature be sampled at the annealer's for the policy version that serves; None: at
        the server's default again."""
        self._annealer = annealer

    def _advance(self, result: TrainResult) -> TrainResult:
        self.served(result.step)
        self._report(result.step, result.metrics)
        return result

    def _make_clients(self) -> CaptureClients:
        if self.inference_base_url is None:
            raise ConfigError(f"{self.name} is not served yet: call `await model.register(backend)` first.")
        return CaptureClients(self.inference_base_url, self.inference_api_key, train=True, amend=self._amend)

    def _amend(self, body: dict[str, Any]) -> None:
        """Let a request that just names the model go to its newest version, and give it the temperature it does not name."""
        if body.get("model") == self.name:
            body["model"] = self.get_inference_name()
        if self._annealer is not None and self._step is not None and body.get("temperature") is None:
            body["temperature"] = self._annealer.temperature(self._step)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "base_model": self.base_model}


def _as_groups(trajectories: Iterable[Any] | None) -> list[TrajectoryGroup]:
    """Groups as they are, loose trajectories (and failures among them) as one group."""
    items = list(trajectories or ())
    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
    loose = [item for item in items if not isinstance(item, TrajectoryGroup)]
    return groups + ([TrajectoryGroup(loose)] if loose else [])
