"""How a step of any mix lies in a captured one: `StepShape`, and the numbers the host sends for it.

Entries: decodes, padded with decodes of the padding row; then chunks, padded with entries without
tokens. Every decode has a token of its own, padding as well: kernels take decode i for token i, and
chunks begin behind the last of them. Tokens behind the last chunk belong to the last entry, which
has none as far as kernels see.
"""

# N entries, T tokens, padding included

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.types.step import FROM_DEVICE, Int32s, StepPlan

MAX_CHUNKS = 15  # of prompts in a captured step; one more entry is padding
_ALIGNED = 4  # numbers in 16 bytes, at whose multiples every field begins: see `all_to_device`


@dataclass(frozen=True, slots=True)
class StepShape:
    """Of a captured step. One without decodes has prompts alone."""

    num_decodes: int
    num_prompt_tokens: int

    @property
    def num_entries(self) -> int:
        return self.num_decodes + MAX_CHUNKS + 1

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    @property
    def _sizes(self) -> list[int]:
        """Of entries: row, start, tokens, (one more) first token, and which of them have logits;
        of tokens: id, entry, offset."""
        entries, tokens = self.num_entries, self.num_tokens
        return [*[entries] * 3, entries + 1, entries, *[tokens] * 3]

    @property
    def packed_size(self) -> int:
        return sum(map(_aligned, self._sizes))

    def holds(self, num_decodes: int, num_prompt_tokens: int) -> bool:
        return (
            (num_decodes > 0) == (self.num_decodes > 0)
            and num_decodes <= self.num_decodes
            and num_prompt_tokens <= self.num_prompt_tokens
        )

    def pack(
        self, plan: StepPlan, padding_row: int, prefill_ids: Callable[[int], Int32s]
    ) -> Int32s:
        """The step as `unpack` reads it. `prefill_ids`: what a row must prefill."""
        num_decodes, num_chunks = plan.num_decodes, plan.num_entries - plan.num_decodes
        assert num_chunks <= MAX_CHUNKS, (self, plan)
        packed = self.padding(padding_row)
        rows, starts, counts, query_starts, logit_entries, ids, entries, offsets = self._fields(
            packed
        )
        rows[:num_decodes] = plan.rows[:num_decodes]
        starts[:num_decodes] = plan.starts[:num_decodes]
        first = token = self.num_decodes  # entry and token where chunks begin
        numbers = (plan.rows, plan.starts, plan.num_tokens)
        chunks = zip(*(column[num_decodes:].tolist() for column in numbers), strict=True)
        for entry, (row, start, size) in enumerate(chunks, first):
            here = slice(token, token + size)
            rows[entry], starts[entry], counts[entry] = row, start, size
            ids[here] = prefill_ids(row)[start : start + size]
            entries[here], offsets[here] = entry, np.arange(size)
            token += size
            query_starts[entry + 1] = token
        query_starts[first + num_chunks + 1 :] = token
        sampling = np.flatnonzero(plan.num_logit_rows)
        is_chunk = sampling >= num_decodes
        logit_entries[: len(sampling)] = sampling + is_chunk * (first - num_decodes)
        return packed

    def places(self, plan: StepPlan) -> list[slice]:
        """Of the plan's tokens among those of the shape. Without entries it has one of padding, as
        outside graphs."""
        if not plan.num_entries:
            return [slice(0, 1)]
        first, num_tokens = self.num_decodes, int(plan.num_tokens.sum())
        return [slice(0, plan.num_decodes), slice(first, first + num_tokens - plan.num_decodes)]

    def padding(self, padding_row: int) -> Int32s:
        """A step of padding alone, from which one is captured."""
        return _padding(self, padding_row).copy()

    def unpack(self, packed: Tensor) -> tuple[list[Tensor], Tensor]:
        """(what `Rows` makes a batch of, the entry of each logit row, of which there are N)."""
        sizes = self._sizes
        places = packed.split(list(map(_aligned, sizes)))
        *entries, logit_entries_N, ids_T, entries_T, offsets_T = (
            place[:size] for place, size in zip(places, sizes, strict=True)
        )
        return [*entries, ids_T, entries_T, offsets_T], logit_entries_N

    def _fields(self, packed: Int32s) -> list[Int32s]:
        """Views."""
        return [packed[place] for place in _places(self)]


@functools.cache
def _places(shape: StepShape) -> list[slice]:
    sizes = shape._sizes
    firsts = itertools.accumulate(map(_aligned, sizes[:-1]), initial=0)
    return [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


@functools.cache
def _padding(shape: StepShape, padding_row: int) -> Int32s:
    packed = np.zeros(shape.packed_size, np.int32)
    rows, starts, counts, query_starts, _, _, entries, _ = shape._fields(packed)
    rows.fill(padding_row)
    starts[: shape.num_decodes], counts[: shape.num_decodes] = FROM_DEVICE, 1
    query_starts[1:] = np.cumsum(counts)
    entries.fill(shape.num_entries - 1)
    entries[: shape.num_decodes] = np.arange(shape.num_decodes)
    return packed


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
