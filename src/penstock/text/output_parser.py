"""`OutputParser`: a sample's text, piece by piece -> reasoning, content for the user, tool calls.

A parser belongs to one sample. Fed with the text in pieces of any size it gives the same in sum,
takes time linear in the text, and never raises: what it cannot read is text.
"""

from typing import NamedTuple, Protocol

from penstock.text.reasoning.think import ThinkParser
from penstock.text.tools.call_parser import CallParser
from penstock.types.outputs import ToolCallDelta


class Parsed(NamedTuple):
    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def joined(self, other: "Parsed") -> "Parsed":
        """This, then `other`."""
        return Parsed(
            self.reasoning + other.reasoning,
            self.text + other.text,
            self.tool_calls + other.tool_calls,
        )


class OutputParser(Protocol):
    def push(self, text: str) -> Parsed: ...

    def flush(self) -> Parsed:
        """What was held back until now; nothing is pushed after it."""

    def is_searched(self, piece: str) -> bool:
        """Whether stop strings count in the next piece of text."""


class TextParser:
    """Reasoning first, then tool calls in what follows it; either may be left out."""

    def __init__(self, reasoning: ThinkParser | None, tools: CallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> Parsed:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        if self._tools is None:
            return Parsed(reasoning, text)
        text = self._tools.push(text)
        return Parsed(reasoning, text, self._tools.calls.take())

    def flush(self) -> Parsed:
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._tools is None:
            return Parsed(reasoning, text)
        text = self._tools.push(text) + self._tools.flush()
        return Parsed(reasoning, text, self._tools.calls.take())

    def is_searched(self, piece: str) -> bool:
        return True
