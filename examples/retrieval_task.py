"""The task that the framework examples share: answer questions about a company from its handbook.

Nothing of a framework is in here. The answers stand in one note each, so an agent has to search for the note, read it,
and say the word or number that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NOTES = {
    "Holidays": "Everyone has 27 days of holiday a year. Unused days expire at the end of March.",
    "Remote work": "You may work from home on 3 days a week. Wednesday is the day on which all meet in the office.",
    "Expenses": "Send receipts to Marta within 30 days. Meals are paid up to 40 euros a day.",
    "Travel": "Book trains with the agency Railbird. Flights need the approval of Viktor.",
    "Security": "The door code changes every Monday. Report a lost laptop to Priya at once.",
    "Onboarding": "New colleagues get a mentor for 6 weeks. The first lunch is in the restaurant Olive.",
    "Equipment": "Laptops are replaced every 4 years. Spare keyboards are in room 212.",
    "Releases": "We release on Thursday. The release captain this year is Amina.",
}


@dataclass(frozen=True)
class Task:
    """A question and the word or number that answers it."""

    question: str
    answer: str


TASKS = [
    Task("How many days of holiday does everyone have a year?", "27"),
    Task("In which month do unused holidays expire?", "March"),
    Task("On how many days a week may I work from home?", "3"),
    Task("On which day do all meet in the office?", "Wednesday"),
    Task("Who gets the receipts for expenses?", "Marta"),
    Task("Up to how many euros a day are meals paid?", "40"),
    Task("With which agency do we book trains?", "Railbird"),
    Task("Who approves flights?", "Viktor"),
    Task("On which day does the door code change?", "Monday"),
    Task("To whom do I report a lost laptop?", "Priya"),
    Task("For how many weeks do new colleagues have a mentor?", "6"),
    Task("In which restaurant is the first lunch?", "Olive"),
    Task("After how many years are laptops replaced?", "4"),
    Task("In which room are spare keyboards?", "212"),
    Task("On which day do we release?", "Thursday"),
    Task("Who is the release captain this year?", "Amina"),
]


def search(query: str) -> list[str]:
    """Titles of the handbook notes that fit the words of the query best, at most three."""
    words = _words(query)
    fit = {title: len(words & _words(text)) + 2 * len(words & _words(title)) for title, text in NOTES.items()}
    return sorted((title for title in fit if fit[title]), key=lambda title: -fit[title])[:3]


def read(title: str) -> str:
    """The text of the handbook note of that title."""
    return NOTES.get(title.strip().capitalize(), f"There is no note {title!r}. The notes are {', '.join(NOTES)}.")


def reward(task: Task, answer_text: str, tool_names_called: Iterable[str]) -> float:
    """1 for the right word in the answer, and a little for calling a tool that exists, so that groups differ early."""
    right = task.answer.lower() in re.findall(r"\w+", answer_text.lower())
    return float(right) + 0.1 * bool({"search", "read"} & set(tool_names_called))


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.findall(r"\w+", text.lower()) if len(word) > 3}
