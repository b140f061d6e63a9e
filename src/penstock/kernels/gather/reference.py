"""What a decode step reads, gathered from the rows of the running sequences.

Legend: N entries, R rows, M blocks a row may have.
"""

import torch
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.op import native, op


@op(gpu_module="penstock.kernels.gather.triton")
def decode_inputs(
    rows_N: Tensor,
    last_tokens_R: Tensor,
    lengths_R: Tensor,
    block_table_RM: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids_N, positions_N, kv_lens_N int32, slots_N) of one token per entry, the rest int64.

    lengths_R counts the tokens whose cache is written, so it is the position of the row's last
    token, which is this step's input. A padding row has length 0 and a table pointing to block 0.
    """
    rows_N = rows_N.long()
    positions_N = lengths_R[rows_N].long()
    blocks_N = block_table_RM[rows_N, positions_N // block_size].long()
    return (
        last_tokens_R[rows_N].long(),
        positions_N,
        (positions_N + 1).int(),
        blocks_N * block_size + positions_N % block_size,
    )


@decode_inputs.impl("native", needs=native())
def decode_inputs_native(rows_N, last_tokens_R, lengths_R, block_table_RM, block_size):
    num_entries = rows_N.shape[0]
    ids_N, positions_N, slots_N = torch.empty((3, num_entries), dtype=torch.int64).unbind()
    kv_lens_N = torch.empty(num_entries, dtype=torch.int32)
    library().decode_inputs(  # type: ignore[union-attr]
        rows_N.data_ptr(), last_tokens_R.data_ptr(), lengths_R.data_ptr(),
        block_table_RM.data_ptr(), ids_N.data_ptr(), positions_N.data_ptr(), kv_lens_N.data_ptr(),
        slots_N.data_ptr(), num_entries, block_table_RM.shape[1], block_size,
    )  # fmt: skip
    return ids_N, positions_N, kv_lens_N, slots_N
