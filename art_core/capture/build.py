"""From captured calls to a trajectory.

Each call is a turn: the request is context, the reply is what was sampled. A call that continues a conversation extends
its history; anything else (another role, a rewritten history, other tools, a second choice) opens a history of its own.
This is presentation only: training reads each choice's own token ids, so no choice is ever dropped or put down twice,
and a doubtful merge costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from art_core.calls import CallStatus, Extra, extra_field
from art_core.capture.choices import model_name
from art_core.capture.wire import arguments_of
from art_core.types import History, Message, Tools, Trajectory, choice_message

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_core.capture.call import CapturedCall


@dataclass
class _Chain:
    """A history under construction."""

    model: str
    role: str | None
    tools: Tools | None
    items: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """`message_key` of each item."""
    token_ids: list[int] | None = None
    """Prompt and sampled tokens of the newest turn, None when they are not known."""

    def continued_by(self, call: CapturedCall, keys: list[str], prompt: list[int] | None) -> bool:
        """Whether the call's prompt is this whole history, perhaps with more after it, asked by the same agent."""
        if (self.model, self.role) != (_model(call), call.role) or self.tools != _tools(call):
            return False
        if len(keys) < len(self.keys):
            return False
        if keys[: len(self.keys)] == self.keys:
            return True
        return prompt is not None and self.token_ids is not None and prompt[: len(self.token_ids)] == self.token_ids

    def extend(self, messages: list[Message], choice: Choice) -> None:
        """Add the messages that are new, and the turn sampled after them."""
        self.items += [*messages, choice]
        self.keys += [*map(message_key, messages), message_key(choice_message(choice))]
        prompt, sampled = extra_field(choice, Extra.PROMPT_TOKEN_IDS), extra_field(choice, Extra.TOKEN_IDS)
        self.token_ids = None if prompt is None or sampled is None else [*prompt, *sampled]

    def complete(self) -> bool:
        """Whether at least one of its turns was read to the end."""
        return any(_status(item) == CallStatus.COMPLETE for item in self.items if not isinstance(item, dict))


def _status(choice: Choice) -> Any:
    return extra_field(choice, Extra.STATUS)


def _model(call: CapturedCall) -> str:
    """The model asked, whatever its policy version: a rollout may see a training step go by."""
    return model_name(call.request.get("model"))


def _tools(call: CapturedCall) -> Tools | None:
    return call.request.get("tools") or None


def message_key(message: Message) -> str:
    """What makes two messages the same turn, in spite of what frameworks do to them on the way back.

    Arguments are compared as JSON values, an empty content equals none, text parts equal their joined text; call ids,
    reasoning and refusals are left out.
    """
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part.get("text") or "" for part in content)
    calls = [
        (function.get("name"), arguments_of(function.get("arguments")))
        for function in (call.get("function") or {} for call in message.get("tool_calls") or ())
    ]
    return json.dumps([message.get("role"), content, calls], sort_keys=True)


def build_trajectory(calls: Iterable[CapturedCall]) -> Trajectory:
    """The trajectory of `calls`, which are in the order in which they were made."""
    trajectory = Trajectory()
    fill_trajectory(trajectory, calls)
    return trajectory


def fill_trajectory(trajectory: Trajectory, calls: Iterable[CapturedCall]) -> None:
    """Write `calls` into `trajectory`: histories, tools, policy versions. Without an answered call it stays as it is.

    The main history is the first one with a complete turn; reward, metrics, metadata and logs are not touched.
    """
    chains: list[_Chain] = []
    versions: list[int] = []
    for call in calls:
        choices = call.choices()
        if not choices:
            continue
        _place(chains, call, choices)
        if (version := extra_field(choices[0], Extra.POLICY_VERSION)) is not None:
            versions.append(version)
    if not chains:
        return
    main = next((chain for chain in chains if chain.complete()), chains[0])
    trajectory.messages_and_choices, trajectory.tools = main.items, main.tools
    trajectory.additional_histories = [
        History(messages_and_choices=chain.items, tools=chain.tools) for chain in chains if chain is not main
    ]
    if versions:
        trajectory.initial_policy_version, trajectory.final_policy_version = versions[0], versions[-1]


def _place(chains: list[_Chain], call: CapturedCall, choices: list[Choice]) -> None:
    """Extend the longest history that the call continues by its first choice; every other choice opens its own."""
    messages: list[Message] = list(call.request.get("messages") or ())
    keys = [message_key(message) for message in messages]
    prompt = extra_field(choices[0], Extra.PROMPT_TOKEN_IDS)
    fitting = [chain for chain in chains if chain.continued_by(call, keys, prompt)]
    for choice in choices:
        chain = max(fitting, key=lambda chain: len(chain.keys), default=None)
        fitting = []
        if chain is None:
            chain = _Chain(_model(call), call.role, _tools(call))
            chains.append(chain)
        chain.extend(messages[len(chain.keys) :], choice)
