"""A decode step's inputs in one launch.

Legend: N entries, R rows, M blocks a row may have.
"""

import torch
import triton.language as tl

from penstock.kernels.gather.reference import decode_inputs
from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.sizes import cdiv

_BLOCK = 128


@jit(do_not_specialize=["num_entries"])
def _decode_inputs(
    rows_ptr, last_tokens_ptr, lengths_ptr, table_ptr,
    input_ids_ptr, positions_ptr, kv_lens_ptr, slots_ptr, num_entries, stride_table,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """position = lengths[row]; slot = table[row, position // S] * S + position % S."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < num_entries
    rows = tl.load(rows_ptr + entries, mask=inside, other=0).to(tl.int64)
    positions = tl.load(lengths_ptr + rows, mask=inside, other=0).to(tl.int64)
    tokens = tl.load(last_tokens_ptr + rows, mask=inside, other=0).to(tl.int64)
    block = tl.load(table_ptr + rows * stride_table + positions // S, mask=inside, other=0)
    tl.store(input_ids_ptr + entries, tokens, mask=inside)
    tl.store(positions_ptr + entries, positions, mask=inside)
    tl.store(kv_lens_ptr + entries, (positions + 1).to(tl.int32), mask=inside)
    tl.store(slots_ptr + entries, block.to(tl.int64) * S + positions % S, mask=inside)


@decode_inputs.impl("triton", needs=arch(80))
def decode_inputs_triton(rows_N, last_tokens_R, lengths_R, block_table_RM, block_size):
    num_entries = rows_N.shape[0]
    input_ids_N, positions_N, slots_N = torch.empty(
        (3, num_entries), dtype=torch.int64, device=rows_N.device
    ).unbind(0)
    kv_lens_N = torch.empty(num_entries, dtype=torch.int32, device=rows_N.device)
    if num_entries:
        _decode_inputs[(cdiv(num_entries, _BLOCK),)](
            rows_N, last_tokens_R, lengths_R, block_table_RM,
            input_ids_N, positions_N, kv_lens_N, slots_N, num_entries, block_table_RM.stride(0),
            S=block_size, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return input_ids_N, positions_N, kv_lens_N, slots_N
