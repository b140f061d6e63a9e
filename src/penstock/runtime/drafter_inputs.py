"""What a step fed and drew, as a `Drafter` sees it."""

# T tokens of a step, N rows that have new ones, W most of a row, E hidden size, or several

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.transfer import to_device
from penstock.runtime.input_batch import Rows
from penstock.types.step import Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTokens:
    """The step's tokens, those that were drafted and did not count included."""

    batch: ForwardBatch
    hidden_TE: Tensor | None  # after the final norm, or behind the layers that are captured
    next_ids_T: Tensor  # int64: what follows each of them, by what was drawn or by the prompt
    last_N: Tensor  # int64: of each row the last one that counts
    chunk_rows: Int32s  # host; of the entries behind the decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInputs:
    """Row i has gained the first `num_accepted_N[i]` of its tokens, from `indices_N[i]` on."""

    rows_N: Tensor  # int64
    indices_N: Tensor
    token_ids_NW: Tensor
    num_accepted_N: Tensor
    max_drafts: int | None  # worth drafting; None: as many as the drafter likes
    max_kv_lens: Int32s  # host, of each row: it has blocks for so many tokens
    fed: FedTokens | None  # for drafters that read steps; None: not this one
    # Rows of each data-parallel rank, where ranks differ: one without any drafts for a padding row.
    rank_rows: tuple[int, ...] | None = None

    @property
    def max_kv_len(self) -> int:
        """Bounds what is in the cache; the newest token is not."""
        return int(self.max_kv_lens.max(initial=0))

    def most_drafts(self, limit: int) -> int:
        return limit if self.max_drafts is None else min(limit, self.max_drafts)

    @property
    def newest_N(self) -> Tensor:
        """Position of each row's newest token, which is not in the cache."""
        return self.indices_N.long() + self.num_accepted_N - 1

    def block_ends(self, rows: Rows) -> Tensor:
        """int64 [N]: the first position of each row that no token may have, for want of a block."""
        ends = -(-self.max_kv_lens.astype(np.int64) // rows.block_size) * rows.block_size
        return to_device(np.minimum(ends, rows.num_positions), self.rows_N.device)
