"""One attempt at a scenario: an ordinary tool loop over an MCP server, captured as a `Trajectory`.

The loop is what any agent does: ask the model, run the tools it calls (parallel calls side by side), show it the results,
until it answers. Whatever is the policy's doing (a malformed call, an unknown tool, a tool error, running out of turns
or context) comes back as a tool message or ends the rollout with a named reason, and is scored. Whatever is not (a lost
server, an engine that fails) raises, and is never scored.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from art_core.auto import auto_trajectory, capture_auto_trajectory
from art_core.errors import EngineError
from art_core.types import Message, Trajectory, choice_message
from mcp_rl.arguments import parse_arguments
from mcp_rl.results import cut, error_result
from mcp_rl.reward import score
from mcp_rl.scenarios import Scenario
from mcp_rl.tools import Caller, Tool, ToolResult

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SYSTEM_PROMPT = "Use the tools to find the answer, then reply with the answer in one short sentence."


class EndReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    """The model replied without calling a tool."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached while the model was still calling tools."""
    TRUNCATED = "truncated"
    """A reply was cut at the token limit."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation no longer fits the model's context. Scored as it stands."""


def opening(scenario: Scenario, system_prompt: str = SYSTEM_PROMPT) -> list[Message]:
    """The messages that every attempt at `scenario` begins with."""
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": scenario.task}]


@dataclass(frozen=True)
class RolloutConfig:
    """Limits of a rollout, and how it samples."""

    max_turns: int = 5
    max_tokens: int = 96
    """Sampled tokens a turn."""
    temperature: float = 1.0
    max_result_tokens: int = 256
    """Tokens of one tool result that the model is shown."""
    system_prompt: str = SYSTEM_PROMPT


async def load_agent(
    client: AsyncOpenAI, model_name: str, tools: Sequence[Tool], base_model: str, config: RolloutConfig
) -> Agent:
    """The agent that is served as `model_name`, with the tokenizer of `base_model`."""
    from art_backend.base_model import load_tokenizer, resolve
    from art_backend.threads import in_own_thread

    tokenizer = await in_own_thread(lambda: load_tokenizer(resolve(base_model)))

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    return Agent(client, model_name, tools, encode, tokenizer.decode, config)


@dataclass(frozen=True)
class Agent:
    """The model under training as a tool-calling agent over one server's tools.

    `encode` and `decode` are the model's own tokenizer: tool results are cut by its count.
    """

    client: AsyncOpenAI
    model_name: str
    tools: Sequence[Tool]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    config: RolloutConfig = RolloutConfig()

    async def rollout(self, session: Caller, scenario: Scenario, seed: int, greedy: bool = False) -> Trajectory:
        """Attempt `scenario` once and score it. `seed` fixes the sampling of every turn."""
        trajectory = await capture_auto_trajectory(self._attempt(session, scenario, seed, greedy))
        cut_off = trajectory.metadata["end_reason"] == EndReason.TRUNCATED
        result = score(scenario, trajectory.messages(), self.tools, cut_off=cut_off)
        trajectory.reward = result.reward
        trajectory.metrics |= {"solved": int(result.solved), **{f"reward/{k}": v for k, v in result.parts.items()}}
        return trajectory.finish()

    async def _attempt(self, session: Caller, scenario: Scenario, seed: int, greedy: bool) -> None:
        messages = opening(scenario, self.config.system_prompt)
        trajectory = auto_trajectory(required=True)
        trajectory.metadata |= {"scenario_id": scenario.id, "kind": scenario.kind, "seed": seed, "tool_results": []}
        end, turn, tokens, invalid = EndReason.MAX_TURNS, 0, 0, 0
        for turn in range(1, self.config.max_turns + 1):
            completion = await self._complete(messages, seed=(seed * 31 + turn) % 2**31, greedy=greedy)
            if completion is None:
                end = EndReason.CONTEXT_OVERFLOW
                break
            choice = completion.choices[0]
            tokens += completion.usage.completion_tokens if completion.usage else 0
            messages.append(choice_message(choice))
            calls = choice.message.tool_calls or []
            if choice.finish_reason == "length" or not calls:
                end = EndReason.TRUNCATED if choice.finish_reason == "length" else EndReason.ANSWERED
                break
            results = await asyncio.gather(*[self._call(session, call) for call in calls])
            invalid += sum(parse_arguments(call.function.arguments).arguments is None for call in calls)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": result.text}
                for call, result in zip(calls, results, strict=True)
            ]
            trajectory.metadata["tool_results"] += [{"is_error": r.is_error, "size": r.size} for r in results]
        # The last tool results were never part of a request when the turn limit ends the loop: the trajectory then
        # ends with the call, which is what the model did.
        trajectory.metadata["end_reason"] = end.value
        trajectory.metrics |= {"turns": turn, "completion_tokens": tokens, "invalid_args": invalid}

    async def _complete(self, messages: list[Message], *, seed: int, greedy: bool) -> Any:
        """The model's next turn, or None when the conversation does not fit its context."""
        from openai import APIError, BadRequestError

        tools: list[Any] = [tool.openai() for tool in self.tools]
        try:
            return await self.client.chat.completions.create(
                model=self.model_name,
                messages=cast("list[Any]", messages),
                tools=tools,
                max_tokens=self.config.max_tokens,
                temperature=0.0 if greedy else self.config.temperature,
                seed=seed,
            )
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                return None
            raise EngineError(f"the engine refused the request: {error.message}") from error
        except APIError as error:
            raise EngineError(f"the engine did not answer: {error.message}") from error

    async def _call(self, session: Caller, call: Any) -> ToolResult:
        """Run one tool call of the model. Its own mistakes come back as text that it can learn from."""
        parsed = parse_arguments(call.function.arguments)
        if parsed.arguments is None:
            return error_result(parsed.error or "Invalid arguments.")
        result = await session.call(call.function.name, parsed.arguments)
        return dataclasses.replace(result, text=self.shown(result.text))

    def shown(self, result: str) -> str:
        """A tool result as the model sees it: cut to the limit."""
        return cut(result, self.config.max_result_tokens, self.encode, self.decode)
