"""How a step of any mix lies in a captured one: `StepShape`, and the numbers the host sends for it.

Entries: decodes, padded with decodes of the padding row; then chunks, padded with entries without
tokens. Every decode has a token of its own, padding as well: kernels take decode i for token i, and
chunks begin behind the last of them. Tokens behind the last chunk belong to the last entry, which
has none as far as kernels see.
"""

# N entries, T tokens, padding included

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
        packed = np.zeros(self.packed_size, np.int32)
        rows, starts, counts, query_starts, logit_entries, ids, entries, offsets = self._fields(
            packed
        )
        first = self.num_decodes  # entry and token where chunks begin
        chunks = slice(first, first + num_chunks)
        rows.fill(padding_row)
        rows[:num_decodes], rows[chunks] = plan.rows[:num_decodes], plan.rows[num_decodes:]
        starts[:first], starts[chunks] = FROM_DEVICE, plan.starts[num_decodes:]
        starts[:num_decodes] = plan.starts[:num_decodes]
        counts[:first], counts[chunks] = 1, plan.num_tokens[num_decodes:]
        query_starts[1:] = np.cumsum(counts)
        num_tokens = int(query_starts[-1])
        entries.fill(self.num_entries - 1)
        entries[:num_tokens] = np.repeat(np.arange(self.num_entries, dtype=np.int32), counts)
        offsets[:num_tokens] = np.arange(num_tokens) - query_starts[entries[:num_tokens]]
        for i in range(num_chunks):
            start, token = int(plan.starts[num_decodes + i]), int(query_starts[first + i])
            size = int(counts[first + i])
            ids[token : token + size] = prefill_ids(int(rows[first + i]))[start : start + size]
        sampling = np.flatnonzero(plan.num_logit_rows)
        is_chunk = sampling >= num_decodes
        logit_entries[: len(sampling)] = sampling + is_chunk * (first - num_decodes)
        return packed

    def padding(self, padding_row: int) -> Int32s:
        """A step of padding alone, from which one is captured."""
        packed = np.zeros(self.packed_size, np.int32)
        rows, starts, counts, query_starts, _, _, entries, _ = self._fields(packed)
        rows.fill(padding_row)
        starts[: self.num_decodes], counts[: self.num_decodes] = FROM_DEVICE, 1
        query_starts[1:] = np.cumsum(counts)
        entries.fill(self.num_entries - 1)
        entries[: self.num_decodes] = np.arange(self.num_decodes)
        return packed

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
        firsts = np.cumsum([0, *map(_aligned, self._sizes)])
        return [packed[at : at + size] for at, size in zip(firsts, self._sizes, strict=False)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
