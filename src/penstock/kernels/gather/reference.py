"""What a decode step reads, gathered from the rows of the running sequences.

Legend: N entries, R rows, M blocks a row may have.
"""

from torch import Tensor

from penstock.kernels.op import op


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
