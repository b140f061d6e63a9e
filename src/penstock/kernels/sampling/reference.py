"""References of the sampling ops, and the noise they draw.

Noise is a function, not a stream: the uniform of (seed, index, token) is a hash of the three, so a
row draws the same whatever stands beside it in the batch, and again after it was preempted and
recomputed.

A draw says beside each token whether the row's logits were finite: 1; or 0 where one of them is NaN
or +inf, or all are -inf. The token is then some token of the vocabulary, and means nothing. Both
come in one tensor, so that one copy brings them to the host.

Legend: L rows of logits, V vocabulary, B blocks of it, N numbers, C candidates, S slots of seen
tokens, P rows with a bitmask, W words of one, 2 a token and whether its logits were finite.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import library
from penstock.kernels.op import native, op

_TRITON = "penstock.kernels.sampling.triton"

# First 32 bits after the point of sqrt(2), sqrt(3) and the golden ratio, as int32. The multipliers
# are odd, so the mixing is a bijection and no two tokens of a row share their bits.
MIX_1 = 0x6A09E667
MIX_2 = 0xBB67AE85 - 2**32
GOLDEN = 0x9E3779B9 - 2**32
_LARGEST_BELOW_1 = 1.0 - 2.0**-24

DRAW_BLOCK = 4096  # tokens; which token a seed draws depends on it
_FIRST_CANDIDATES = 1024  # top-p seldom needs more, and sorting all takes ten times as long


@op(gpu_module=_TRITON)
def argmax(logits_LV: Tensor) -> Tensor:
    """int64 [2, L]: the most likely token of each row, the lowest id of equals; and 1, or 0."""
    best_L, ids_L = logits_LV.max(-1)
    return torch.stack((ids_L, best_L.isfinite().long()))


@argmax.impl(
    "native",
    needs=native(),
    fits=lambda logits_LV: (
        logits_LV.dtype is torch.float32 and logits_LV.dim() == 2 and logits_LV.shape[1] > 0
    ),
)
def argmax_native(logits_LV):
    logits_LV = logits_LV.contiguous()
    num_rows, vocab_size = logits_LV.shape
    out_2L = torch.empty(2, num_rows, dtype=torch.int64)
    library().argmax(  # type: ignore[union-attr]
        logits_LV.data_ptr(), vocab_size, out_2L.data_ptr(), num_rows, vocab_size
    )
    return out_2L


@op(gpu_module=_TRITON)
def gumbel_argmax(
    logits_LV: Tensor,
    temperature_L: Tensor,
    seeds_L: Tensor,
    indices_L: Tensor,
    thresholds_L: Tensor | None = None,
) -> Tensor:
    """int64 [2, L]: one token per row, drawn from softmax(logits / temperature) over logits >=
    threshold; and 1, or 0.

    argmax(x + temperature * gumbel) of some x is a draw from softmax(x / temperature), and the
    plain argmax at temperature 0. First one of the blocks is drawn so, x being temperature *
    logsumexp(logits / temperature) of a block, then a token of that block: noise takes far longer
    than sums. Seeds are int64, indices (the new token's place in its sequence) int32 or int64.
    """
    logits_LV = logits_LV.float()
    if thresholds_L is not None:
        logits_LV = logits_LV.masked_fill(logits_LV < thresholds_L[:, None], -torch.inf)
    size = min(DRAW_BLOCK, logits_LV.shape[-1])
    padded_LV = F.pad(logits_LV, (0, -logits_LV.shape[-1] % size), value=-torch.inf)
    logits_LBN = padded_LV.unflatten(1, (-1, size))
    temperature_L1 = temperature_L[:, None]
    inverse_L11 = torch.where(temperature_L > 0, 1.0 / temperature_L, 1.0)[:, None, None]

    top_LB = logits_LBN.amax(-1)
    shift_LB1 = top_LB.masked_fill(top_LB == -torch.inf, 0.0)[..., None]
    mass_LB = ((logits_LBN - shift_LB1) * inverse_L11).exp().sum(-1).clamp(min=1.0)
    # Blocks have the numbers that no token has.
    blocks_B = -1 - torch.arange(top_LB.shape[1], device=logits_LV.device)
    noise_LB = mass_LB.log() + gumbel(seeds_L, indices_L, blocks_B)
    block_L1 = (top_LB + temperature_L1 * noise_LB).argmax(-1, keepdim=True)

    tokens_LN = block_L1 * size + torch.arange(size, device=logits_LV.device)
    logits_LN = logits_LBN.gather(1, block_L1[..., None].expand(-1, -1, size))[:, 0]
    drawn_LN = logits_LN + temperature_L1 * gumbel(seeds_L, indices_L, tokens_LN)
    ids_L = tokens_LN.gather(1, drawn_LN.argmax(-1, keepdim=True))[:, 0]
    return torch.stack((ids_L, top_LB.amax(-1).isfinite().long()))


@op(gpu_module=_TRITON)
def filter_thresholds(
    logits_LV: Tensor,
    temperature_L: Tensor,
    top_k_L: Tensor,
    top_p_L: Tensor,
    min_p_L: Tensor,
    num_candidates: int,
) -> Tensor:
    """The smallest logit each row may draw, fp32: top-k, then top-p of what is left, and min-p.

    Any value above the best token left out will do; tokens equal to the last one kept are kept.
    top_k 0, top_p 1 and min_p 0 keep everything. `num_candidates` bounds how deep the search must
    look: the largest top_k if every row with a top-p has one, else V.
    """
    logits_LV, vocab_size = logits_LV.float(), logits_LV.shape[-1]
    num_candidates = min(num_candidates, vocab_size)
    temperature_L1 = torch.where(temperature_L > 0, temperature_L, 1.0)[:, None]
    has_k_L, has_p_L = top_k_L > 0, top_p_L < 1.0
    k_L1, p_L1 = torch.where(has_k_L, top_k_L, vocab_size)[:, None], top_p_L[:, None]

    candidates_LC = _best(logits_LV, min(num_candidates, _FIRST_CANDIDATES))
    max_L1 = candidates_LC[:, :1]
    weights_LC = _weights(candidates_LC, max_L1, temperature_L1, k_L1)
    mass_L1 = weights_LC.sum(-1, keepdim=True)
    if candidates_LC.shape[-1] < num_candidates:
        has_all_L1 = k_L1 <= candidates_LC.shape[-1]
        whole_L1 = ((logits_LV - max_L1) / temperature_L1).exp().sum(-1, keepdim=True)
        has_p_inside_L1 = ~has_k_L[:, None] & (~has_p_L[:, None] | (mass_L1 >= p_L1 * whole_L1))
        if (has_all_L1 | has_p_inside_L1).all():
            mass_L1 = torch.where(has_all_L1, mass_L1, whole_L1)
        else:
            candidates_LC = _best(logits_LV, num_candidates)
            weights_LC = _weights(candidates_LC, max_L1, temperature_L1, k_L1)
            mass_L1 = weights_LC.sum(-1, keepdim=True)
    mass_before_LC = weights_LC.cumsum(-1) - weights_LC
    in_nucleus_LC = (mass_before_LC < p_L1 * mass_L1) | ~has_p_L[:, None]
    is_kept_LC = _in_k(candidates_LC, k_L1) & in_nucleus_LC

    last_L1 = (is_kept_LC.sum(-1, keepdim=True) - 1).clamp(min=0)
    thresholds_L = candidates_LC.gather(-1, last_L1)[:, 0]
    thresholds_L = torch.where(has_k_L | has_p_L, thresholds_L, -torch.inf)
    min_p_thresholds_L = (max_L1 + temperature_L1 * min_p_L[:, None].log())[:, 0]
    return torch.maximum(thresholds_L, min_p_thresholds_L)


def _best(logits_LV: Tensor, num: int) -> Tensor:
    """The `num` largest of each row, the largest first."""
    if num < logits_LV.shape[-1]:
        return logits_LV.topk(num).values
    return logits_LV.sort(-1, descending=True).values


def _in_k(candidates_LC: Tensor, k_L1: Tensor) -> Tensor:
    return torch.arange(candidates_LC.shape[-1], device=k_L1.device) < k_L1


def _weights(candidates_LC: Tensor, max_L1: Tensor, temperature_L1: Tensor, k_L1: Tensor) -> Tensor:
    """Softmax weights before normalization; 0 behind the k-th."""
    weights_LC = ((candidates_LC - max_L1) / temperature_L1).exp()
    return weights_LC * _in_k(candidates_LC, k_L1)


@op(gpu_module=_TRITON)
def apply_penalties(
    logits_LV: Tensor,
    slots_L: Tensor,
    in_prompt_SV: Tensor,
    output_counts_SV: Tensor,
    repetition_L: Tensor,
    presence_L: Tensor,
    frequency_L: Tensor,
) -> None:
    """Penalize each row of fp32 logits, in place, by what its slot has seen.

    A token of prompt or output: positive logits are divided by `repetition`, negative ones
    multiplied. A token of the output: minus `presence`, minus `frequency` times its count.
    """
    counts_LV = output_counts_SV[slots_L]
    is_output_LV = counts_LV > 0
    repetition_L1 = repetition_L[:, None]
    repeated_LV = torch.where(logits_LV > 0, logits_LV / repetition_L1, logits_LV * repetition_L1)
    penalised_LV = torch.where(is_output_LV | in_prompt_SV[slots_L], repeated_LV, logits_LV)
    penalised_LV -= presence_L[:, None] * is_output_LV + frequency_L[:, None] * counts_LV
    logits_LV.copy_(penalised_LV)


@op(gpu_module=_TRITON)
def apply_bitmask(logits_LV: Tensor, positions_P: Tensor, words_PW: Tensor) -> None:
    """Set logits of row positions[p] to -inf, in place, where their bit is 0.

    Bit v % 32 of int32 words[p, v // 32] is token v's. Rows that no position names are left alone.
    """
    bits_32 = torch.arange(32, dtype=torch.int32, device=words_PW.device)
    is_allowed_PV = ((words_PW[:, :, None] >> bits_32) & 1).flatten(1)[:, : logits_LV.shape[1]]
    positions_P = positions_P.long()
    masked_PV = logits_LV[positions_P].masked_fill(is_allowed_PV == 0, -torch.inf)
    logits_LV.index_copy_(0, positions_P, masked_PV)


def gumbel(seeds_L: Tensor, indices_L: Tensor, numbers: Tensor) -> Tensor:
    """Standard Gumbel noise [L, N], fp32: -log of an exponential, exact near its small end."""
    bits_LN = hash_bits(seeds_L, indices_L, numbers)
    # An int32 read as unsigned: the smallest uniform is 2^-33, so the largest noise is about 22.9.
    uniform_LN = (bits_LN.float() + 2.0**32 * (bits_LN < 0) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform_LN.clamp(max=_LARGEST_BELOW_1)))


def hash_bits(seeds_L: Tensor, indices_L: Tensor, numbers: Tensor) -> Tensor:
    """32 random bits [L, N] as int32: a pure function of (seed, index, number).

    `numbers` are [N] or [L, N]: tokens and blocks.
    """
    low_L, high_L = seeds_L.int(), (seeds_L >> 32).int()
    key_1_L = _mix(_mix(low_L + GOLDEN) ^ indices_L.int())
    key_2_L = _mix(key_1_L + high_L)
    return _mix(_mix(numbers.int() ^ key_1_L[:, None]) + key_2_L[:, None])


def _mix(x: Tensor) -> Tensor:
    """Let every bit of int32 x touch every bit of the result; the masks make the shifts logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX_2
    return x ^ ((x >> 16) & 0xFFFF)
