"""Experts with low-bit weights on Hopper, by the kernel of `gemm.wna16_hopper`.

Up to two tokens, which seldom share an expert, have a block for each pair.

Legend: T tokens, S slots, K experts of a token, P = T * K pairs, B blocks of M pairs, D hidden
size, F intermediate size of an expert.
"""

from torch import Tensor

from penstock.kernels.gemm.reduce import combine
from penstock.kernels.gemm.wna16_hopper import (
    CONFIGS,
    HopperConfig,
    can_read,
    choose_splits,
    multiply,
)
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight
from penstock.kernels.moe.align import sorted_pairs
from penstock.kernels.moe.gate import Gate
from penstock.kernels.moe.mxfp4_hopper import block_rows, in_order_of_blocks
from penstock.kernels.moe.split_k_gate import gated_partials

_MAX_UNSORTED = 2  # tokens; so few seldom share an expert
# Experts have more programs than SMs: four at a time, where registers are enough for it.
_SMALL_M = HopperConfig(stages=4, registers=64, programs=4, band=1)


def fits(x_TD: Tensor, gate_up: GpuPackedWeight, down: GpuPackedWeight) -> bool:
    """Whether the kernel can compute these; GPTQ's act-order is left to the other kernel."""
    return (
        can_read(x_TD, gate_up)
        and can_read(x_TD, down)
        and gate_up.order_I is None
        and down.order_I is None
    )


def experts(
    x_TD: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up: GpuPackedWeight,
    down: GpuPackedWeight,
    gate_up_bias_S2F: Tensor | None,
    down_bias_SD: Tensor | None,
    gate: Gate,
    rows: int | None = None,
    config: HopperConfig | None = None,
    splits: int | None = None,
    is_sorted: bool | None = None,
) -> Tensor:
    """As `weight_only_experts`, of what `fits`."""
    assert slots_TK.is_contiguous() and weights_TK.is_contiguous()
    num_tokens, num_pairs = x_TD.shape[0], slots_TK.numel()
    if is_sorted is None:
        is_sorted = num_tokens > _MAX_UNSORTED
    if is_sorted:
        rows = rows or block_rows(num_pairs, down.num_slots)
        pairs_BM, slots_B = sorted_pairs(slots_TK, down.num_slots, rows)
        x = in_order_of_blocks(x_TD, pairs_BM, num_pairs)
    else:
        rows = rows or min(CONFIGS)
        pairs_BM, slots_B, x = None, slots_TK.view(-1), x_TD.contiguous()
    c = config or (_SMALL_M if rows == min(CONFIGS) else CONFIGS[rows])

    def num_splits(weight: GpuPackedWeight) -> int:
        return splits or (1 if is_sorted else choose_splits(num_pairs, weight, c))

    # Slots are known to what starts after the gathering kernel has waited, or after this one has.
    parts = multiply(
        x, gate_up, gate_up_bias_S2F, num_pairs, rows, c, num_splits(gate_up),
        slots_B=slots_B, pairs_BM=pairs_BM, is_early=is_sorted,
    )  # fmt: skip
    h = gated_partials(parts, gate, x_TD.dtype, pairs_BM, num_pairs)
    parts = multiply(
        h, down, down_bias_SD, num_pairs, rows, c, num_splits(down),
        slots_B=slots_B, pairs_BM=pairs_BM, weights_P=weights_TK.view(-1),
    )  # fmt: skip
    return combine(parts, num_tokens, x_TD.dtype, slots_TK, down.num_slots)
