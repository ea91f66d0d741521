"""How to ask `LocalBackend` for the embedded engine with options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from art_backend.chat.call_formats import call_format
from art_backend.chat.reasoning import reasoning_parser

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TransformersOptions:
    """The engine `transformers` with options, all explained at `TransformersEngine`. Raises ConfigError for a parser that is
    not known. Importing this imports no torch."""

    dtype: torch.dtype | None = None
    chat_template: str | Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        call_format(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_parser(self.reasoning_parser)
