"""From observed calls to tasks in words.

A step of a task is one observed call. Its arguments are quoted verbatim, so that a small model can copy them, or they
are described as something that an earlier step returns ("the last of the tables"), and then the task cannot be solved
without that step. Tools are called by what their description says, never by name: to choose is part of the task. A
draft is refused when its task gives away an answer or the value that a step should find out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice
from typing import Any

from mcp_rl.scenarios.facts import Path, Question, as_text, contains, normalise, pattern, place, questions
from mcp_rl.scenarios.model import ExpectedCall, Kind, Scenario, Split, scenario_id
from mcp_rl.scenarios.names import READS, affinity, noun, words
from mcp_rl.scenarios.probe import Findings, Observation
from mcp_rl.scenarios.turns import grouped, turns
from mcp_rl.tools import Tool

KIND_OF: dict[int, Kind] = {1: "single", 2: "chain2", 3: "chain3"}
MAX_ACTION = 90
MAX_QUESTIONS = 4
MAX_LINKS = 3
ASKING = ("{}", "{}", "Then answer: {}", "Tell me: {}")


@dataclass(frozen=True)
class Link:
    """An argument of a step whose value, or a part of it, an earlier step returns."""

    argument: str
    value: str
    whole: bool
    words: str


@dataclass(frozen=True)
class Step:
    """One call of a task; `link` is None when all its arguments are given in the task."""

    seen: Observation
    link: Link | None = None


@dataclass(frozen=True)
class Draft:
    """The steps of a task and what is asked about the last of them (None: nothing that stays true)."""

    steps: tuple[Step, ...]
    question: Question | None
    rank: int = 0

    @property
    def kind(self) -> Kind:
        return KIND_OF[len(self.steps)]

    @property
    def dependent(self) -> bool:
        """Whether every step but the first needs an earlier one."""
        return all(step.link for step in self.steps[1:])

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(step.seen.tool.name for step in self.steps)

    @property
    def key(self) -> str:
        """Equal for the same calls and the same question."""
        return " ".join([*(step.seen.key for step in self.steps), self.question.text if self.question else ""])

    @property
    def calls(self) -> list[ExpectedCall]:
        return [ExpectedCall(tool=step.seen.tool.name, arguments=step.seen.arguments) for step in self.steps]


class Composer:
    """Makes drafts out of `observations` of one split, and scenarios out of drafts."""

    def __init__(self, findings: Findings, observations: Sequence[Observation], today: date, seed: int) -> None:
        self._changing = findings.changing
        self._seen = observations
        self._questions = {
            seen.number: questions(
                seen.data, noun(seen.tool), findings.changing.get(seen.tool.name, frozenset()), today
            )
            for seen in findings.observations
        }
        self._answers: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        for seen in findings.observations:
            for question in self._questions[seen.number]:
                self._answers.setdefault((seen.tool.name, question.text), []).append(question.facts)
        self._seed = seed
        self._links = {second.number: list(self._links_to(second)) for second in observations}
        self._places = {
            seen.number: {f"the {place(seen.data, leaf.path, noun(seen.tool))}" for leaf in seen.leaves}
            for seen in observations
        }

    def drafts(self, kind: Kind, limit: int) -> list[Draft]:
        """At most `limit` drafts of one kind, in a seeded order in which all combinations of tools take turns."""
        chains: list[tuple[Step, ...]] = [(Step(seen),) for seen in self._seen]
        if kind != "single":
            chains = [chain for first in chains for chain in self._extend(first)]
        if kind == "chain3":
            rng = random.Random(f"{self._seed}/chains")
            chains = [chain for pair in rng.sample(chains, min(400, len(chains))) for chain in self._extend(pair)]
        random.Random(f"{self._seed}/{kind}").shuffle(chains)
        by_tools = grouped(chains, lambda chain: tuple(step.seen.tool.name for step in chain))
        fair = turns([iter(same) for same in by_tools])
        return list(islice((draft for chain in fair for draft in self._ask(chain)), limit))

    def _extend(self, chain: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
        """`chain` with one more step: those that need it first, then some that merely follow."""
        used = {step.seen.number for step in chain}
        for second in self._seen:
            if second.number in used:
                continue
            links = [
                link
                for first, link in self._links[second.number]
                if first.number in used
                and not any(link.words in self._places[other] for other in used - {first.number})
            ]
            yield from ((*chain, Step(second, link)) for link in links[-MAX_LINKS:])
        others = [seen for seen in self._seen if seen.tool.name not in {step.seen.tool.name for step in chain}]
        rng = random.Random(f"{self._seed}/{chain[-1].seen.key}")
        yield from ((*chain, Step(other)) for other in rng.sample(others, min(3, len(others))))

    def _links_to(self, second: Observation) -> Iterator[tuple[Observation, Link]]:
        """Where values in the arguments of `second` come from."""
        for name, value in second.arguments.items():
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                continue
            for first in self._seen:
                if first.number != second.number and not _mentions(first.arguments, value):
                    yield from ((first, link) for link in self._links_between(first, name, value))

    def _links_between(self, first: Observation, name: str, value: str | int | float) -> Iterator[Link]:
        about, changing = noun(first.tool), self._changing.get(first.tool.name, frozenset())
        for leaf in first.leaves:
            if isinstance(leaf.value, bool) or pattern(leaf.path) in changing:
                continue
            whole = leaf.value == value
            if isinstance(value, str):
                if not isinstance(leaf.value, str) or len(leaf.value) < 2:
                    continue
                if not whole and not re.search(rf"(?<!\w){re.escape(leaf.value)}(?!\w)", value):
                    continue
            elif not whole or not affinity(name, "", _keys(leaf.path), about):
                continue  # equal numbers are mostly a coincidence
            if located := place(first.data, leaf.path, about):
                yield Link(name, str(leaf.value), whole, f"the {located}")

    def _ask(self, chain: tuple[Step, ...]) -> Iterator[Draft]:
        """Drafts that ask about the last step of `chain`, by what neither the task nor the earlier results tell."""
        last = chain[-1].seen
        told = [step.seen.text for step in chain[:-1]] + [json.dumps(step.seen.arguments) for step in chain]
        told += [as_text(value) for step in chain for value in step.seen.arguments.values() if _scalar(value)]
        found = [
            question
            for question in self._questions[last.number]
            if not any(contains(text, fact) for fact in question.facts for text in told)
        ]
        # A question with the same answer for every call can be answered without looking: only if there is no other.
        open_ones = [question for question in found if not self._always_same(last, question)]
        for rank, question in enumerate((open_ones or found)[:MAX_QUESTIONS]):
            yield Draft(chain, question, rank)
        if not found:
            yield Draft(chain, None)

    def _always_same(self, seen: Observation, question: Question) -> bool:
        answers = self._answers[seen.tool.name, question.text]
        return len(answers) > 1 and len(set(answers)) == 1

    def scenario(self, draft: Draft, split: Split) -> Scenario | None:
        """`draft` in words, or None when the words would give an answer away."""
        calls = draft.calls
        rng = random.Random(f"{self._seed}/{scenario_id(draft.question.text if draft.question else '', calls)}")
        task = _wording(draft, rng)
        facts = list(draft.question.facts) if draft.question else []
        hidden = [*facts, *(step.link.value for step in draft.steps if step.link)]
        if any(contains(task, value) for value in hidden):
            return None
        results = [step.seen.text for step in draft.steps]
        return Scenario(
            id=scenario_id(task, calls),
            task=task,
            kind=draft.kind,
            calls=calls,
            results=results,
            facts=facts,
            answer=draft.question.answer if draft.question else f"It returns: {' '.join(results[-1].split())[:80]}",
            split=split,
        )


def _wording(draft: Draft, rng: random.Random) -> str:
    marks = iter("XYZ")
    parts = [_describe(step, marks) for step in draft.steps]
    question = draft.question.text if draft.question else "What does it return?"
    if len(parts) > 1:
        joined = f"First {parts[0]}. " + " ".join(
            f"{rng.choice(('Then', 'Next,', 'After that,'))} {part}." for part in parts[1:]
        )
        return f"{joined} {rng.choice(ASKING).format(question)}"
    form = rng.choice(("{0}. {1}", "{0}. {1}", "Please {2}. {1}", "{1} {0}.", "{1} To find out, {2}."))
    return form.format(parts[0][:1].upper() + parts[0][1:], question, parts[0])


def _describe(step: Step, marks: Iterable[str]) -> str:
    """A step in words, e.g. `show a table: table_name 'staff'` or `...: table_name is the last of the tables`."""
    described, where = [], ""
    link = step.link
    for name, value in step.seen.arguments.items():
        if link is None or link.argument != name:
            described.append(f"{name} {_quote(value)}")
        elif link.whole:
            described.append(f"{name} is {link.words}")
        else:
            mark = f"<{next(iter(marks))}>"
            hidden = mark.join(re.split(rf"(?<!\w){re.escape(link.value)}(?!\w)", str(value)))
            described.append(f"{name} {_quote(hidden)}")
            where = f", where {mark} is {link.words}"
    text = action(step.seen.tool)
    return f"{text}: {', '.join(described)}{where}" if described else text


def action(tool: Tool) -> str:
    """What a tool does, as an order: the first sentence of its description, else the words of its name."""
    spoken = " ".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", tool.name).replace("-", " ").replace("_", " ").split())
    lines = [line.strip() for line in tool.description.splitlines() if line.strip()]
    text = re.split(r"(?<=[.!?:])\s", lines[0])[0].rstrip(".!?: ") if lines else spoken
    if len(text) > MAX_ACTION:
        head = re.split(r"[,;(]", text)[0].strip()
        text = head if 10 <= len(head) <= MAX_ACTION else text[:MAX_ACTION].rsplit(" ", 1)[0]
    if len(words(tool.name)) > 1:
        text = re.sub(rf"(?<!\w){re.escape(tool.name)}(?!\w)", spoken, text)
    first, _, rest = text.partition(" ")
    (stem, *_) = words(first) or ("",)
    if stem in READS and first.lower() not in (stem, f"{stem}e") and first.isalpha():
        first = stem
    if not first[1:].isupper():
        first = first[:1].lower() + first[1:]
    return f"{first} {rest}".strip() or spoken.lower()


def _quote(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    mark = next((mark for mark in "'\"`" if mark not in value), "'")
    return f"{mark}{value}{mark}"


def _scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _keys(path: Path) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _mentions(arguments: dict[str, Any], value: str | int | float) -> bool:
    return any(normalise(str(value)) == normalise(str(given)) for given in arguments.values())
