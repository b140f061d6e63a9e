"""`ForwardBatch`: what a model's forward may know about one step (`runtime/input_batch.py`).

Legend: T tokens in the step, N sequences (entries), R rows, M blocks a row may have.
Tokens of entry i are [query_starts[i], query_starts[i + 1]). Decode entries come first, one token
each.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
    max_query_len: int  # host; longest entry
    max_kv_len: int  # host; upper bound of kv_lens_N
    others: tuple["ForwardBatch", ...] = ()  # the step as the layers of further groups see it
    plans: dict[Any, Any] = field(default_factory=dict)  # worked out by one layer for those behind
    cached_lens: tuple[int, ...] = ()  # host; of the entries behind the decodes: tokens before T

    def of_group(self, group: int) -> "ForwardBatch":
        """The step with the slots and the block table of one cache group."""
        return self if group == 0 else self.others[group - 1]

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.shape[0]

    @property
    def num_entries(self) -> int:
        return self.rows_N.shape[0]
