"""Questions whose answers are not written but weighed: how likely is this text after that one?"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import fsum

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Choices:
    """The right ending is number `expected`; `group` is the row of the report it counts in."""

    group: str
    context: str
    endings: tuple[str, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class Weighed:
    """Token ids, of which those from `begin` on are to be weighed."""

    ids: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class Chance:
    """Of one weighed token; `is_best`: a greedy answer would have it there, too."""

    logprob: float
    is_best: bool


def weighed(encode: Encode, context: str, ending: str, max_len: int | None = None) -> Weighed:
    """Both encoded together, as a model reads them; beyond `max_len` the context is cut off."""
    blank = len(context) - len(context.rstrip())
    if blank:  # a blank belongs to the token after it
        context, ending = context[:-blank], context[-blank:] + ending
    return shortened(encode(context + ending), len(encode(context)), max_len)


def shortened(ids: Sequence[int], begin: int, max_len: int | None) -> Weighed:
    """The last `max_len` ids; the first of all cannot be weighed."""
    cut = max(0, len(ids) - max_len) if max_len is not None else 0
    return Weighed(tuple(ids[cut:]), max(1, begin - cut))


def windows(ids: Sequence[int], max_len: int) -> list[Weighed]:
    """Every token but the first weighed once, in pieces of `max_len` that do not overlap.

    Each piece begins with the last token of the one before.
    """
    found = []
    for begin in range(0, len(ids) - 1, max_len - 1):
        found.append(Weighed(tuple(ids[begin : begin + max_len]), 1))
    return found


def total(chances: Iterable[Chance]) -> float:
    return fsum(one.logprob for one in chances)
