"""What an ADK run tells about itself, on the trajectory of its rollout. The turns come from capture, not from events.

Nothing is keyed by session: an `AgentTool` opens its own, but runs in the capture scope of the rollout. A context variable
tells its run from the outer one; ADK's task for the tool call keeps it to itself.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.base_tool import BaseTool
from google.genai.types import Content, FunctionCall, Part

from art_core.capture import CaptureScope, current_scope
from art_core.capture.wire import arguments_of
from art_core.end_reason import EndReason, reason_of

JSON = dict[str, Any]
_depth: ContextVar[int] = ContextVar("art_adk_depth", default=0)  # tool calls that the running code is in
_OF_CODES = {"MALFORMED_FUNCTION_CALL": EndReason.INVALID_TOOL_CALL, "MAX_TOKENS": EndReason.LENGTH}
_BY_TOOL = "art_adk_raised_by_tool"  # set on an error: what ADK reports of it afterwards differs from case to case
_UNREADABLE = "unreadable_arguments"  # names the sampled text where the arguments of a call are no object
_streamed: ContextVar[frozenset[Any]] = ContextVar("art_adk_streamed", default=frozenset())  # ids of the calls so far


class RolloutPlugin(BasePlugin):
    """`App(plugins=[RolloutPlugin()])`: describes runs on the trajectory of the rollout they belong to, if any.

    Metadata: `session_id`, `end_reason` and `output` (final text) of the outer run, `invocation_ids` of all runs, `agents` as
    they first spoke, `error`. Metrics: `tool_calls`, `tool_errors`, `invalid_args` (replies with arguments that are no JSON
    object). `recover_tools`: answer the model with the error of a tool that raised, which else ends the run."""

    def __init__(self, *, recover_tools: bool = False) -> None:
        super().__init__("art_rollout")
        self._recover_tools = recover_tools
        self._endings: WeakKeyDictionary[CaptureScope, EndReason] = WeakKeyDictionary()

    async def before_run_callback(self, *, invocation_context: InvocationContext) -> None:
        """Name the run. Until it ends it counts as cancelled, for ADK tells no plugin when that happens."""
        _streamed.set(frozenset())
        if scope := current_scope():
            scope.trajectory.metrics = {"tool_calls": 0, "tool_errors": 0, "invalid_args": 0} | scope.trajectory.metrics
            metadata = scope.trajectory.metadata
            metadata.setdefault("invocation_ids", []).append(invocation_context.invocation_id)
            if _depth.get() == 0:
                metadata |= {"session_id": invocation_context.session.id, "end_reason": EndReason.CANCELLED.value}

    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> None:
        """Look at whole replies only: the parts of a streamed one come again as a whole."""
        if event.partial or not (scope := current_scope()):
            return
        agents = scope.trajectory.metadata.setdefault("agents", [])
        agents += {event.author} - {*agents, "user"}
        code = getattr(event.error_code, "value", event.error_code)
        ending = _OF_CODES.get(code, EndReason.MODEL_ERROR) if code else EndReason.FINISHED
        scope.trajectory.count("invalid_args", ending == EndReason.INVALID_TOOL_CALL)
        if _depth.get() == 0:
            self._endings[scope] = ending
            parts = (event.content and event.content.parts) or []
            if event.is_final_response() and (text := "".join(p.text or "" for p in parts if not p.thought)):
                scope.trajectory.metadata["output"] = text

    async def after_model_callback(self, *, callback_context: Any, llm_response: LlmResponse) -> None:
        """ADK drops the calls that it cannot read, and in a stream also those beside them. Put them back, where one of the
        reply can be read, so that each is made or answered with an error."""
        parts = (llm_response.content and llm_response.content.parts) or []
        kept = {part.function_call.id for part in parts if part.function_call}
        if llm_response.partial:
            _streamed.set(_streamed.get() | kept)
        elif kept or not parts:
            if llm_response.error_code and (scope := current_scope()):
                sampled = scope.turn_with(kept or _streamed.get())
                dropped = [_as_part(call) for call in sampled if call.id not in kept]
                if kept or any(_UNREADABLE not in part.function_call.args for part in dropped):
                    llm_response.content = Content(role="model", parts=[*parts, *dropped])
            _streamed.set(frozenset())

    async def before_tool_callback(self, *, tool: Any, tool_args: JSON, tool_context: Any) -> JSON | None:
        """Count the call, and answer one that ADK could not read."""
        _depth.set(_depth.get() + 1)
        unreadable = tool_args.keys() == {_UNREADABLE}
        if scope := current_scope():
            scope.trajectory.count("tool_calls", not unreadable)
        return {"error": "The arguments are no JSON object, so nothing was done."} if unreadable else None

    async def on_tool_error_callback(self, *, tool: Any, tool_args: Any, tool_context: Any, error: Any) -> JSON | None:
        """Count the error, and recover if asked to. A tool that does not exist ADK answers itself."""
        text, failed = f"{type(error).__name__}: {error}", isinstance(error, Exception)  # else it was cancelled
        if failed and (scope := current_scope()):
            scope.trajectory.count("tool_errors")
            scope.trajectory.log(f"tool {tool.name}: {text}")
            setattr(error, _BY_TOOL, True)
        return {"error": text} if failed and self._recover_tools and type(tool) is not BaseTool else None

    async def on_run_error_callback(self, *, invocation_context: InvocationContext, error: Exception) -> None:
        """Note what ended the outer run. ADK raises an error again in handling its wrapper, which looks like its cause."""
        if getattr(error.__context__, "error", None) is error:
            error.__suppress_context__ = True
        if _depth.get() == 0 and (scope := current_scope()):
            ending = reason_of(error, EndReason.TOOL_ERROR if hasattr(error, _BY_TOOL) else EndReason.ERROR)
            scope.trajectory.metadata |= {"end_reason": ending.value, "error": f"{type(error).__name__}: {error}"}

    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        """Note how the outer run ended, by its last reply."""
        if _depth.get() == 0 and not invocation_context.is_aborted and (scope := current_scope()):
            scope.trajectory.metadata["end_reason"] = self._endings.pop(scope, EndReason.FINISHED).value


def _as_part(call: Any) -> Any:
    args = arguments_of(text := call.function.arguments or "{}")
    args = args if isinstance(args, dict) else {_UNREADABLE: text}
    return Part(function_call=FunctionCall(id=call.id, name=call.function.name, args=args))
