"""`generate_scenarios`: tasks from a list of tools alone, without a server. For judged training, where no solution is
needed. With a server, `generate_by_llm` makes scenarios that check themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_core.errors import ConfigError
from art_core.llm import StructuredLLM
from mcp_rl.offers import Offers, Resource
from mcp_rl.scenarios.brief import RULES, TOOL_RULES, data_block, request
from mcp_rl.scenarios.drafting import Draft, collect
from mcp_rl.schema import normalise as normalise_schema
from mcp_rl.tools import Tool

PREVIEWED = 5


class GeneratedScenario(BaseModel):
    """A task for an agent, how hard it is (1 to 5), and the tools that its author thought of."""

    model_config = ConfigDict(frozen=True)

    task: str = Field(min_length=1)
    difficulty: int = Field(ge=1, le=5)
    tools: tuple[str, ...] = ()


class GeneratedScenarioCollection(Sequence[GeneratedScenario]):
    """Scenarios in order. Never changed: what rearranges it returns a new one."""

    def __init__(self, scenarios: Iterable[GeneratedScenario]) -> None:
        self._scenarios = tuple(scenarios)

    def __len__(self) -> int:
        return len(self._scenarios)

    @overload
    def __getitem__(self, index: int) -> GeneratedScenario: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> GeneratedScenario | Self:
        return type(self)(self._scenarios[index]) if isinstance(index, slice) else self._scenarios[index]

    def __iter__(self) -> Iterator[GeneratedScenario]:
        return iter(self._scenarios)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratedScenarioCollection) and self._scenarios == other._scenarios

    def __hash__(self) -> int:
        return hash(self._scenarios)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} scenarios)"

    def shuffle(self, seed: int | None = None) -> Self:
        """The same in another order; a seed makes it the same order each time."""
        return type(self)(random.Random(seed).sample(self._scenarios, len(self)))

    def split(self, train_size: int) -> tuple[Self, Self]:
        """The first `train_size`, and the rest. Raises ConfigError when there are fewer."""
        if not 0 <= train_size <= len(self):
            raise ConfigError(f"train_size={train_size} cannot be taken from {len(self)} scenarios.")
        return self[:train_size], self[train_size:]

    def filter_by_difficulty(self, min_difficulty: int = 1, max_difficulty: int = 5) -> Self:
        """Those whose difficulty lies in the range, both ends included."""
        return type(self)(s for s in self if min_difficulty <= s.difficulty <= max_difficulty)

    def to_json(self, indent: int | None = 2) -> str:
        """A JSON list, for `from_json`."""
        return json.dumps([s.model_dump(mode="json") for s in self], indent=indent, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The collection in `text`. Raises ConfigError when it is none."""
        try:
            return cls(GeneratedScenario.model_validate(item) for item in json.loads(text))
        except (ValueError, TypeError, ValidationError) as error:
            raise ConfigError(f"This is no JSON list of scenarios: {str(error).splitlines()[0]}.") from None


class _Task(Draft):
    tools: list[str] = Field(min_length=1, description="names of the tools that solve the task")


async def generate_scenarios(
    tools: Sequence[Any],
    resources: Sequence[Any] = (),
    num_scenarios: int = 24,
    show_preview: bool = True,
    custom_instructions: str | None = None,
    generator_model: str = "openai/gpt-4.1-mini",
    generator_api_key: str | None = None,
    generator_base_url: str | None = None,
) -> GeneratedScenarioCollection:
    """Exactly `num_scenarios` distinct tasks for an agent with `tools`, written by a language model.

    Args:
        tools: as an MCP server lists them (`inputSchema`), as OpenAI functions, or anything with a name, a description
            and `parameters`.
        resources: what the server offers to read: URIs, or anything with a `uri`, a name and a description.
        show_preview: print the first few.
        custom_instructions: what the tasks should be like.
        generator_model: litellm's name; with a `generator_base_url` any OpenAI-compatible server's.

    Raises:
        ConfigError: there are no tools, or `num_scenarios` is below 1.
        ShortfallError: fewer came; they are its `items`.
    """
    known = [read_tool(tool) for tool in tools]
    if not known or num_scenarios < 1:
        raise ConfigError(f"{num_scenarios} scenarios for {len(known)} tools: give at least one of each.")
    names = {tool.name for tool in known}
    data = data_block(known, offers=Offers(resources=[read_resource(resource) for resource in resources]))

    async def accept(drafts: Sequence[_Task]) -> list[GeneratedScenario | str]:
        return [
            f"there is no tool {unknown[0]!r}"
            if (unknown := [name for name in draft.tools if name not in names])
            else GeneratedScenario(task=draft.task, difficulty=draft.difficulty, tools=tuple(draft.tools))
            for draft in drafts
        ]

    made = await collect(
        StructuredLLM(generator_model, base_url=generator_base_url, api_key=generator_api_key),
        _Task,
        num_scenarios,
        lambda wanted, told, dropped: request(
            data, f"{RULES}\n{TOOL_RULES}", wanted, told, dropped, custom_instructions
        ),
        accept,
    )
    if show_preview:
        for scenario in made[:PREVIEWED]:
            print(f"[difficulty {scenario.difficulty}] {scenario.task}")
    return GeneratedScenarioCollection(made)


def read_tool(tool: Any) -> Tool:
    """A tool in any of the usual forms. Raises ConfigError when it has no name."""
    if isinstance(tool, Tool):
        return tool
    described = _field(tool, "function") or tool
    name = _field(described, "name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"A tool without a name cannot be used: {str(tool)[:100]}.")
    keys = ("inputSchema", "input_schema", "parameters")
    schema = next((found for key in keys if (found := _field(described, key)) is not None), None)
    return Tool(name, _field(described, "description") or "", normalise_schema(schema, name))


def read_resource(resource: Any) -> Resource:
    """A resource in any of the usual forms."""
    if isinstance(resource, str):
        return Resource(resource, resource)
    uri = str(_field(resource, "uri") or "")
    return Resource(uri, str(_field(resource, "name") or uri), str(_field(resource, "description") or ""))


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)
