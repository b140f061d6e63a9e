"""Questions whose answers are not written but weighed: how likely is this text after that one?"""

from collections.abc import Callable, Sequence
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


def weighed(encode: Encode, context: str, ending: str, max_len: int | None = None) -> Weighed:
    """Both encoded together, as a model reads them; beyond `max_len` the context is cut off."""
    blank = len(context) - len(context.rstrip())
    if blank:  # a blank belongs to the token after it
        context, ending = context[:-blank], context[-blank:] + ending
    ids = encode(context + ending)
    begin = len(encode(context))
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


def total(asked: Weighed, logprobs: Sequence[float | None]) -> float:
    """The sum over what was to be weighed; `logprobs` has an entry for every id."""
    return fsum(one for one in logprobs[asked.begin : len(asked.ids)] if one is not None)
