"""A `TrajectoryGroup` as one JSON object, lossless, whose size grows with the new tokens only.

A conversation repeats itself: the prompt of turn k+1 holds turn k, and a framework that rewrites its history makes
every turn a history of its own. Written plainly that is quadratic in the turns. So the prompt tokens of a call are
stored as the difference to the earlier call of the group (its prompt and sampled tokens) that shares the longest
prefix, a history as the difference to the earlier history of the group, and tool definitions once. A message or choice
that was written before is just its number.

Items, calls and histories are numbered in the order in which they are written: trajectories first, then the partial
trajectories of exceptions; in each the main history first.
"""

from __future__ import annotations

import copy
from typing import Any

from art_core.calls import Extra
from art_core.files import to_json
from art_core.storage import columns, prefix
from art_core.types import History, RolloutException, Trajectory, TrajectoryGroup, is_choice

VERSION = 1
LOGPROB_LISTS = ("content", "refusal")


def encode_group(group: TrajectoryGroup | Trajectory) -> dict[str, Any]:
    """`group` as a JSON-ready object; a bare trajectory is marked as such and loads as a group of one."""
    encoder = _Encoder()
    if isinstance(group, Trajectory):
        return encoder.group(TrajectoryGroup([group]), bare=True)
    return encoder.group(group, bare=False)


def decode_group(value: dict[str, Any]) -> TrajectoryGroup:
    """The inverse of `encode_group`. Raises KeyError or ValueError when `value` was written by another version."""
    if value["version"] != VERSION:
        raise ValueError(f"format version {value['version']}, this release reads {VERSION}")
    return _Decoder(value["tools"]).group(value)


def _dump(item: Any) -> dict[str, Any]:
    # Not mode="json": it would turn an infinity in an extra field into null.
    raw: dict[str, Any] = item.model_dump(exclude_unset=True) if is_choice(item) else item
    return raw


def _sampled(item: dict[str, Any]) -> bytes:
    return prefix.as_bytes(item.get(Extra.TOKEN_IDS)) or b""


class _Encoder:
    """State while one group is written."""

    def __init__(self) -> None:
        self._calls = prefix.PrefixIndex()
        self._histories = prefix.PrefixIndex()
        self._tools: list[Any] = []
        self._tool_numbers: dict[bytes, int] = {}
        self._item_numbers: dict[bytes, int] = {}
        self._written = 0
        self._seen: dict[int, tuple[Any, int, dict[str, Any]]] = {}

    def group(self, group: TrajectoryGroup, *, bare: bool) -> dict[str, Any]:
        trajectories = [self._trajectory(trajectory) for trajectory in group.trajectories]
        exceptions = [
            {
                **error.model_dump(exclude={"trajectory"}),
                "trajectory": None if error.trajectory is None else self._trajectory(error.trajectory),
            }
            for error in group.exceptions
        ]
        rest = group.model_dump(exclude={"trajectories", "exceptions"})
        kind = {"version": VERSION, "bare": bare, "tools": self._tools}
        return {**kind, "trajectories": trajectories, "exceptions": exceptions, **rest}

    def _trajectory(self, trajectory: Trajectory) -> dict[str, Any]:
        rest = trajectory.model_dump(exclude={"messages_and_choices", "tools", "additional_histories"})
        return {"histories": [self._history(history) for history in trajectory.histories()], **rest}

    def _history(self, history: History) -> dict[str, Any]:
        numbered = [self._number(item) for item in history.messages_and_choices]
        sequence = prefix.as_bytes([number for number, _ in numbered]) or b""
        items = prefix.encode(self._histories, sequence, numbered)
        self._histories.add(sequence)
        new = items if isinstance(items, list) else items["add"]
        new[:] = [self._pack(number, item) for number, item in new]
        return {"tools": self._tools_number(history), "items": items}

    def _number(self, item: Any) -> tuple[int, dict[str, Any]]:
        """The number of an item (equal items have equal numbers) and its JSON form. An object is dumped only once."""
        if id(item) not in self._seen:
            raw = _dump(item)
            number = self._item_numbers.setdefault(to_json(raw), len(self._item_numbers))
            self._seen[id(item)] = (item, number, raw)  # the item itself too, so that its id stays taken
        _, number, raw = self._seen[id(item)]
        return number, raw

    def _tools_number(self, history: History) -> int | None:
        if history.tools is None:
            return None
        number = self._tool_numbers.setdefault(to_json(history.tools), len(self._tools))
        if number == len(self._tools):
            self._tools.append(history.tools)
        return number

    def _pack(self, number: int, item: dict[str, Any]) -> dict[str, Any] | int:
        if number < self._written:
            return number
        self._written += 1  # new items are packed in the order in which they were numbered
        packed = dict(item)
        prompt = item.get(Extra.PROMPT_TOKEN_IDS)
        if prompt is not None and (sequence := prefix.as_bytes(prompt)) is not None:
            packed[Extra.PROMPT_TOKEN_IDS] = prefix.encode(self._calls, sequence, prompt)
            self._calls.add(sequence + _sampled(item))
        elif isinstance(prompt, dict):
            packed[Extra.PROMPT_TOKEN_IDS] = {"raw": prompt}
        if isinstance(logprobs := item.get("logprobs"), dict):
            packs = {name: columns.pack(logprobs[name]) for name in LOGPROB_LISTS if name in logprobs}
            packed["logprobs"] = {**logprobs, **packs}
        return packed


class _Decoder:
    """State while one group is read."""

    def __init__(self, tools: list[Any]) -> None:
        self._tools = tools
        self._items: list[Any] = []
        self._calls: list[list[int]] = []
        self._histories: list[list[Any]] = []

    def group(self, value: dict[str, Any]) -> TrajectoryGroup:
        trajectories = [self._trajectory(trajectory) for trajectory in value["trajectories"]]
        exceptions = [
            RolloutException(**{**error, "trajectory": error["trajectory"] and self._trajectory(error["trajectory"])})
            for error in value["exceptions"]
        ]
        rest = {name: value[name] for name in ("metadata", "metrics", "logs")}
        return TrajectoryGroup(trajectories, exceptions=exceptions, **rest)

    def _trajectory(self, value: dict[str, Any]) -> Trajectory:
        main, *additional = [self._history(history) for history in value["histories"]]
        rest = {name: field for name, field in value.items() if name != "histories"}
        return Trajectory(
            messages_and_choices=main.messages_and_choices, tools=main.tools, additional_histories=additional, **rest
        )

    def _history(self, value: dict[str, Any]) -> History:
        items = value["items"]
        new = items if isinstance(items, list) else items["add"]
        new[:] = [self._unpack(item) for item in new]
        decoded = prefix.decode(items, self._histories)
        self._histories.append(decoded)
        # A message shared by two histories is a dict of its own in each, so that editing one leaves the other alone.
        own = [item if is_choice(item) else copy.deepcopy(item) for item in decoded]
        tools = None if value["tools"] is None else copy.deepcopy(self._tools[value["tools"]])
        return History(messages_and_choices=own, tools=tools)

    def _unpack(self, item: dict[str, Any] | int) -> Any:
        if isinstance(item, int):
            return self._items[item]
        self._items.append(self._load(item))
        return self._items[-1]

    def _load(self, item: dict[str, Any]) -> Any:
        prompt = item.get(Extra.PROMPT_TOKEN_IDS)
        if isinstance(prompt, dict):
            item[Extra.PROMPT_TOKEN_IDS] = prompt["raw"] if "raw" in prompt else prefix.decode(prompt, self._calls)
            prompt = item[Extra.PROMPT_TOKEN_IDS]
        if isinstance(prompt, list) and prefix.as_bytes(prompt) is not None:
            sampled: list[int] = item[Extra.TOKEN_IDS] if _sampled(item) else []
            self._calls.append(prompt + sampled)
        if isinstance(logprobs := item.get("logprobs"), dict):
            for name in LOGPROB_LISTS:
                if name in logprobs:
                    logprobs[name] = columns.unpack(logprobs[name])
        return _as_choice(item) if "finish_reason" in item and "message" in item else item


def _as_choice(item: dict[str, Any]) -> Any:
    from openai.types.chat.chat_completion import Choice  # 1.5 s to import: only where a choice is loaded

    return Choice.construct(**item)  # as the client itself does: a null logprob must not make a stored call unreadable
