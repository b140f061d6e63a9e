"""The words that open a tool call, in text that arrives in pieces.

A head is a few steps that follow each other: a tag, blanks, a name. Each step decides by what is
there and is bounded in length, so a head is found, missed or not yet complete, the last of these
only for a bounded number of characters, and more text never changes what was found or missed.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

BLANKS = re.compile(r"[ \t\r\n]{0,64}")
# In a group: it is one of the words that were found.
NAME = re.compile(r"([^\s<>\[\]{}()`\"']{1,256})")


class Maybe(NamedTuple):
    """A tag that may be left out."""

    tag: str


class Before(NamedTuple):
    """What follows begins with one of these, which are not part of the head."""

    tags: tuple[str, ...]


Step = str | re.Pattern[str] | Maybe | Before


class Miss(Enum):
    NOT_HERE = auto()
    NOT_YET = auto()  # the text ends within it


class Found(NamedTuple):
    end: int
    words: tuple[str, ...]


def follow(steps: Sequence[Step], text: str, at: int) -> Found | Miss:
    """Whether `text` goes on with `steps` from `at`."""
    words: list[str] = []
    for step in steps:
        match step:
            case re.Pattern():
                if (run := step.match(text, at)) is None:
                    return Miss.NOT_YET if at == len(text) else Miss.NOT_HERE
                if run.end() == len(text):
                    return Miss.NOT_YET
                words += run.groups()
                at = run.end()
            case Before(tags):
                if (miss := _miss(tags, text, at)) is not None:
                    return miss
            case Maybe(tag):
                miss = _miss((tag,), text, at)
                if miss is Miss.NOT_YET:
                    return miss
                at += len(tag) if miss is None else 0
            case str():
                if (miss := _miss((step,), text, at)) is not None:
                    return miss
                at += len(step)
    return Found(at, tuple(words))


def _miss(tags: Sequence[str], text: str, at: int) -> Miss | None:
    if any(text.startswith(tag, at) for tag in tags):
        return None
    is_cut = any(len(text) - at < len(tag) and tag.startswith(text[at:]) for tag in tags)
    return Miss.NOT_YET if is_cut else Miss.NOT_HERE
