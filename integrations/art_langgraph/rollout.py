"""`wrap_rollout`: a function that runs a graph on `init_chat_model()` becomes a rollout that returns its trajectory.

What the function returns is about the reward only: the turns are those that were captured.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial, wraps
from numbers import Real
from typing import Any, ParamSpec

from art_core.capture import CaptureScope, capture
from art_core.end_reason import EndReason, reason_of
from art_core.errors import ConfigError, RolloutError
from art_core.models import Model
from art_core.types import Trajectory
from art_langgraph.chat import ChatART, reads

P = ParamSpec("P")
_model: ContextVar[Model[Any] | None] = ContextVar("art_langgraph_model", default=None)


def init_chat_model(model_name: str | None = None, **options: Any) -> ChatART:
    """The chat model of the running rollout, made with `options`: its newest version unless `model_name` is `name@step`."""
    model = _model.get()
    if model is None:
        raise RolloutError("No rollout is running here: use wrap_rollout(model, fn), or ChatART(model).")
    name, _, step = (model_name or model.name).partition("@")
    if name != model.name:
        raise ConfigError(f"This rollout samples from {model.name}, not {model_name}: call init_chat_model().")
    return ChatART(model, **({"model_name": model_name} if step else {}), **options)


def wrap_rollout(model: Model[Any], fn: Callable[P, Any]) -> Callable[P, Coroutine[Any, Any, Trajectory]]:
    """`fn` as a rollout of `model`: call it with the arguments of `fn` and await the trajectory of the captured turns.

    `fn` runs the agent, asynchronously, or blocking (in a thread then). It returns a trajectory, whose reward, metrics,
    metadata and logs are kept; or a number, the reward; or None: unscored, unless it set `auto_trajectory().reward`.
    `metadata["end_reason"]` is an `EndReason`, `metrics["invalid_args"]` counts tool calls that could not be read.
    What `fn` raises is passed on, with the unscored trajectory of the calls made until then as `error.trajectory`.
    """
    run = fn if inspect.iscoroutinefunction(fn) else partial(asyncio.to_thread, fn)

    @wraps(fn)
    async def rollout(*args: P.args, **kwargs: P.kwargs) -> Trajectory:
        token = _model.set(model)
        try:
            with capture(Trajectory(reward=None)) as scope:
                result = await run(*args, **kwargs)
                _take(scope, await result if inspect.isawaitable(result) else result)
            return _finish(scope, EndReason.FINISHED)
        except BaseException as error:
            scope.trajectory.reward = None
            scope.trajectory.metadata["error"] = f"{type(error).__name__}: {error}"
            error.trajectory = _finish(scope, reason_of(error))  # type: ignore[attr-defined]
            raise
        finally:
            _model.reset(token)

    return rollout


def _take(scope: CaptureScope, result: Any) -> None:
    live = scope.trajectory
    if isinstance(result, Trajectory):
        result.metrics, result.metadata = live.metrics | result.metrics, live.metadata | result.metadata
        result.logs = result.logs if result is live else [*live.logs, *result.logs]
        scope.trajectory = result  # the captured turns are written there
    elif isinstance(result, Real):
        live.reward = float(result)
    elif result is not None:
        raise ConfigError(f"The rollout returned {result!r:.80}: return a Trajectory, a number (the reward) or None.")


def _finish(scope: CaptureScope, reason: EndReason) -> Trajectory:
    """Write end reason and counts into the trajectory. What the agent wrote there itself stays."""
    turns = [[bool(reads(t)) for c in call.choices() for t in c.message.tool_calls or ()] for call in scope.calls]
    if reason is EndReason.FINISHED and turns and turns[-1] and not any(turns[-1]):
        reason = EndReason.INVALID_TOOL_CALL
    scope.trajectory.metadata.setdefault("end_reason", reason.value)
    scope.trajectory.metrics.setdefault("invalid_args", sum(turn.count(False) for turn in turns))
    return scope.trajectory.finish()
