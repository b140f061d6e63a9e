"""`ForwardBatch`: all that a model's forward may know about one step. Built by `runtime/batch.py`.

Legend: T tokens in the step, N sequences (entries), R rows, M blocks a row may have.
Tokens of entry i are [query_starts[i], query_starts[i + 1]). Decode entries come first, one token
each.
"""

from dataclasses import dataclass

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

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.shape[0]

    @property
    def num_entries(self) -> int:
        return self.rows_N.shape[0]
