"""`ForwardBatch`: what a model's forward may know about one step (`runtime/input_batch.py`).

Legend: T tokens in the step, N sequences (entries), R rows, M blocks a row may have.
Tokens of entry i are [query_starts[i], query_starts[i + 1]). Decode entries come first, one token
each. A token that was drafted is an entry of its own: attention reads its sequence's cache up to
there, as for any decode. Layers whose state runs through the tokens of a sequence read `drafted`.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedSpans:
    """Batch field of a step with drafts: the tokens of one sequence, as a range.

    First come `num_single` decodes of one token, then `num_drafted` with drafts, then chunks. In a
    CUDA graph, where only the device knows which are which, all decodes are of the second kind,
    and as many as they have tokens: the last ones have none.

    Whatever a layer keeps of the second kind, it keeps as if they had not run, until it is told how
    many of their tokens count (`CachedLayer.accept`).
    """

    starts_E1: Tensor  # int32
    num_single: int
    num_drafted: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Decodes that follow one another and are tokens of one sequence, one after the other: a row's
    last token and its drafts. Attention may read the sequence's cache once for several of them."""

    offsets_N: Tensor  # int32: place of each decode in its run, from 0
    longest: int  # host; tokens of a run, at most


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """Batch field of a step with low-rank adapters (`runtime/adapters.py`)."""

    slots_T: Tensor  # int32: of each token, -1 for none
    groups_NG: Tensor | None  # int32: of the decodes, by `kernels.lora.lora_groups`

    def of(self, tokens_X: Tensor) -> "AdapterTokens":
        """Of these tokens, of which the first are the decodes as they are."""
        return AdapterTokens(self.slots_T[tokens_X], self.groups_NG)


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    input_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64: block * block_size + offset where token t's cache goes
    rows_N: Tensor  # int32: device row of each entry
    query_starts_N1: Tensor  # int32
    kv_lens_N: Tensor  # int32: true length of each sequence, this step's tokens included
    block_table_RM: Tensor  # int32, the persistent table; index it with rows_N
    num_decodes: int  # host; the first entries, one token each
    max_kv_len: int  # host; upper bound of kv_lens_N
    others: tuple["ForwardBatch", ...] = ()  # the step as the layers of further groups see it
    plans: dict[Any, Any] = field(default_factory=dict)  # worked out by one layer for those behind
    # host; of the entries behind the decodes: tokens before T. None: only the device knows
    cached_lens: tuple[int, ...] | None = None
    chunk_lens: tuple[int, ...] | None = None  # of the same entries: tokens in T
    drafted: DraftedSpans | None = None  # None: no token was drafted, or no layer has a state
    runs: Runs | None = None  # None: each decode is of another sequence, as far as is known
    adapters: AdapterTokens | None = None  # None: no token has one
    received_TE: Tensor | None = None  # what the stage before has sent; None: this is the first one
    # host; tokens of each rank that shares MLPs with this one. None: as many as here
    rank_tokens: tuple[int, ...] | None = None

    def of_group(self, group: int) -> "ForwardBatch":
        """The step with the slots and the block table of one cache group."""
        return self if group == 0 else self.others[group - 1]

    @property
    def has_fields(self) -> bool:
        """Whether a feature brings inputs of its own (`runtime/batch_fields.py`)."""
        return self.adapters is not None

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.shape[0]

    @property
    def num_entries(self) -> int:
        return self.rows_N.shape[0]
