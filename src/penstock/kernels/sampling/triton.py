"""The sampling ops on a GPU. No kernel keeps a sorted or filtered copy of the logits.

Legend as in the reference; every kernel reads fp32, fp16 or bf16 logits and computes in fp32.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.sampling import reference
from penstock.kernels.sizes import cdiv, next_power_of_2

_MIX_1 = tl.constexpr(reference.MIX_1)
_MIX_2 = tl.constexpr(reference.MIX_2 + 2**32)
_GOLDEN = tl.constexpr(reference.GOLDEN + 2**32)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_SPLIT = 4096  # tokens per program of the argmax: one row of a 128k vocabulary keeps 32 SMs busy
_DRAW_BLOCK = reference.DRAW_BLOCK
_SEARCH_BLOCK = 16384  # H200, 256 rows of 128k bf16, top-p: 255 us; 8192 and 16 warps: 305 us
_SEARCH_WARPS = 32
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # as fp32, always zero


@triton.jit
def mix(x):
    """x uint32; see the reference."""
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    return x ^ (x >> 16)


@triton.jit
def hash_bits(seed, index, numbers):
    """32 bits per number as uint32; seed int64, index and numbers any integer type."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    key_1 = mix(mix(low + _GOLDEN) ^ index.to(tl.uint32))
    key_2 = mix(key_1 + high)
    return mix(mix(numbers.to(tl.uint32) ^ key_1) + key_2)


@triton.jit
def gumbel(bits):
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log(1 - u) has no digits left for a small u, where the winners are; four terms of its series
    # do.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * 0.25)))
    return -tl.log(tl.where(uniform < 2.0**-7, series, -tl.log(1.0 - uniform)))


@triton.jit
def _nan_to_inf(x):
    """A NaN compares with nothing; as infinity it is the largest, and reaches the end of a search
    for that."""
    return tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - false of a NaN


@triton.jit
def _is_finite(best):
    return ((best > float("-inf")) & (best < float("inf"))).to(tl.int64)


@jit
def _best_of_split(
    logits_ptr, best_scores_ptr, best_ids_ptr, vocab_size, row_stride, SPLIT: tl.constexpr
):
    """The largest logit and its token of one row's split; one program per (row, split)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = split * SPLIT + tl.arange(0, SPLIT)
    logits = tl.load(
        logits_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")
    ).to(tl.float32)
    best_score, best = tl.max(_nan_to_inf(logits), 0, return_indices=True)
    out = row * tl.num_programs(1) + split
    tl.store(best_scores_ptr + out, best_score)
    tl.store(best_ids_ptr + out, split * SPLIT + best)


@jit
def _best_of_splits(best_scores_ptr, best_ids_ptr, drawn_ptr, num_splits, SPLITS: tl.constexpr):
    """drawn[:, row] = token of the best split, the first of equals, and whether its logit is
    finite; one program per row."""
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    is_split = splits < num_splits
    scores = tl.load(
        best_scores_ptr + row * num_splits + splits, mask=is_split, other=float("-inf")
    )
    best_score, best = tl.max(scores, 0, return_indices=True)
    token = tl.load(best_ids_ptr + row * num_splits + best)
    tl.store(drawn_ptr + row, token.to(tl.int64))
    tl.store(drawn_ptr + tl.num_programs(0) + row, _is_finite(best_score))


@reference.argmax.impl("triton", needs=arch(80))
def argmax(logits_LV):
    num_rows, vocab_size = logits_LV.shape
    assert logits_LV.stride(1) == 1, logits_LV.stride()
    num_splits = cdiv(vocab_size, _SPLIT)
    scores_LS = logits_LV.new_empty((num_rows, num_splits), dtype=torch.float32)
    best_LS = logits_LV.new_empty((num_rows, num_splits), dtype=torch.int32)
    drawn_2L = logits_LV.new_empty((2, num_rows), dtype=torch.int64)
    if num_rows:
        _best_of_split[num_rows, num_splits](
            logits_LV, scores_LS, best_LS, vocab_size, logits_LV.stride(0), SPLIT=_SPLIT,
            num_warps=8,
        )  # fmt: skip
        _best_of_splits[num_rows,](
            scores_LS, best_LS, drawn_2L, num_splits,
            SPLITS=next_power_of_2(num_splits),
        )  # fmt: skip
    return drawn_2L


@triton.jit
def _allowed(
    logits_ptr, thresholds_ptr, row, tokens, vocab_size, row_stride, HAS_THRESHOLD: tl.constexpr
):
    """Logits in fp32, NaN as inf; -inf where there is no token, or one below the threshold."""
    x = tl.load(
        logits_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")
    ).to(tl.float32)
    x = _nan_to_inf(x)
    if HAS_THRESHOLD:
        x = tl.where(x >= tl.load(thresholds_ptr + row), x, float("-inf"))
    return x


@jit
def _sum_blocks(
    logits_ptr, temperature_ptr, thresholds_ptr, sums_ptr, vocab_size, row_stride,
    temperature_stride, HAS_THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[row, block] = temperature * log(sum of exp(x / temperature)), or at temperature 0 the
    largest x; one program each."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _allowed(logits_ptr, thresholds_ptr, row, tokens, vocab_size, row_stride, HAS_THRESHOLD)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top = tl.max(x, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    per_unit = _LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    mass = tl.maximum(tl.sum(tl.exp2((x - shift) * per_unit), 0), 1.0)
    total = tl.where(top == float("inf"), top, top + temperature * tl.log(mass))
    tl.store(sums_ptr + row * tl.num_programs(1) + block, total)


@jit
def _draw(
    logits_ptr, temperature_ptr, seeds_ptr, indices_ptr, thresholds_ptr, sums_ptr, drawn_ptr,
    vocab_size, num_blocks, row_stride, temperature_stride, seeds_stride,
    HAS_THRESHOLD: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """drawn[:, row] = a token of one of the blocks, both drawn as the reference says, and whether
    the block's sum is finite; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    seed, index = tl.load(seeds_ptr + row * seeds_stride), tl.load(indices_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    sums_ptr += row * num_blocks
    sums = tl.load(sums_ptr + blocks, mask=blocks < num_blocks, other=float("-inf"))
    sums += temperature * gumbel(hash_bits(seed, index, -1 - blocks))
    best_sum, block = tl.max(sums, 0, return_indices=True)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _allowed(logits_ptr, thresholds_ptr, row, tokens, vocab_size, row_stride, HAS_THRESHOLD)
    best = tl.argmax(x + temperature * gumbel(hash_bits(seed, index, tokens)), 0)
    tl.store(drawn_ptr + row, tl.minimum(block * BLOCK + best, vocab_size - 1).to(tl.int64))
    tl.store(drawn_ptr + tl.num_programs(0) + row, _is_finite(best_sum))


@reference.gumbel_argmax.impl("triton", needs=arch(80))
def gumbel_argmax(logits_LV, temperature_L, seeds_L, indices_L, thresholds_L=None):
    num_rows, vocab_size = logits_LV.shape
    assert logits_LV.stride(1) == 1, logits_LV.stride()
    assert indices_L.is_contiguous() and (thresholds_L is None or thresholds_L.is_contiguous())
    num_blocks = cdiv(vocab_size, _DRAW_BLOCK)
    sums_LB = logits_LV.new_empty((num_rows, num_blocks), dtype=torch.float32)
    drawn_2L = logits_LV.new_empty((2, num_rows), dtype=torch.int64)
    if num_rows:
        _sum_blocks[num_rows, num_blocks](
            logits_LV, temperature_L, thresholds_L, sums_LB,
            vocab_size, logits_LV.stride(0), temperature_L.stride(0),
            HAS_THRESHOLD=thresholds_L is not None, BLOCK=_DRAW_BLOCK, num_warps=4,
        )  # fmt: skip
        _draw[num_rows,](
            logits_LV, temperature_L, seeds_L, indices_L, thresholds_L, sums_LB, drawn_2L,
            vocab_size, num_blocks, logits_LV.stride(0), temperature_L.stride(0),
            seeds_L.stride(0), HAS_THRESHOLD=thresholds_L is not None,
            BLOCKS=next_power_of_2(num_blocks), BLOCK=_DRAW_BLOCK, num_warps=16,
        )  # fmt: skip
    return drawn_2L


@triton.jit
def _to_key(x, SHIFT: tl.constexpr):
    """fp32 -> int32 in the same order, without the SHIFT low bits that its values never use."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    key = key << SHIFT
    return tl.where(key < 0, (key | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, key).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _between(low, high, floor, step, SHIFT: tl.constexpr):
    """Where to look next: 16 times halve the values, then the keys, so that 48 steps always do."""
    low_value = tl.maximum(_from_key(low, SHIFT), floor)
    of_values = _to_key(0.5 * low_value + 0.5 * _from_key(high, SHIFT), SHIFT)
    of_keys = (low & high) + ((low ^ high) >> 1)  # the mean; low + high could overflow
    return tl.minimum(tl.maximum(tl.where(step < 16, of_values, of_keys), low + 1), high - 1)


@triton.jit
def _kept(
    row_ptr, vocab_size, threshold, top, inv_temperature, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many logits are >= threshold, and the sum of their exp((x - top) / temperature)."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        is_kept = (x >= threshold) & (tokens < vocab_size)
        counts += is_kept.to(tl.int32)
        if MASS:
            masses += tl.where(is_kept, tl.exp((x - top) * inv_temperature), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@jit
def _search_thresholds(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, thresholds_ptr,
    vocab_size, row_stride, param_stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bisect for the smallest logit to keep; one program per row.

    Both searches keep a low (enough is >= it) and a high (too little is) with their counts, and end
    when one logit, or several equal ones, lie between the two.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row * param_stride)
    inv_temperature = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    top_k = tl.load(top_k_ptr + row * param_stride)
    top_p = tl.load(top_p_ptr + row * param_stride)
    min_p = tl.load(min_p_ptr + row * param_stride)

    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)

    low = tl.full([], _LOWEST_KEY >> SHIFT, tl.int32)
    low_count = vocab_size
    k_high = _to_key(top, SHIFT) + 1
    k_high_count = 0
    step = 0
    if top_k > 0:
        while (low_count > top_k) & (k_high - 1 > low):
            middle = _between(low, k_high, top - 64.0, step, SHIFT)
            threshold = _from_key(middle, SHIFT)
            count, _ = _kept(row_ptr, vocab_size, threshold, top, 1.0, False, BLOCK)
            if count >= top_k:
                low, low_count = middle, count
            else:
                k_high, k_high_count = middle, count
            step += 1

    if top_p < 1.0:
        threshold = _from_key(low, SHIFT)
        _, mass = _kept(row_ptr, vocab_size, threshold, top, inv_temperature, True, BLOCK)
        if (top_k > 0) & (low_count > top_k):
            # Equals of the k-th token are kept, but only k tokens share the mass.
            threshold = _from_key(k_high, SHIFT)
            _, high_mass = _kept(row_ptr, vocab_size, threshold, top, inv_temperature, True, BLOCK)
            share = (top_k - k_high_count).to(tl.float32) / (low_count - k_high_count)
            mass = high_mass + (mass - high_mass) * share
        high = _to_key(top, SHIFT) + 1
        high_count = 0
        step = 0
        while (low_count - high_count > 1) & (high - 1 > low):
            middle = _between(low, high, top - 32.0 / inv_temperature, step, SHIFT)
            threshold = _from_key(middle, SHIFT)
            count, kept_mass = _kept(
                row_ptr, vocab_size, threshold, top, inv_temperature, True, BLOCK
            )
            if kept_mass >= top_p * mass:
                low, low_count = middle, count
            else:
                high, high_count = middle, count
            step += 1

    threshold = _from_key(low, SHIFT)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(min_p) / inv_temperature)
    tl.store(thresholds_ptr + row, threshold)


@reference.filter_thresholds.impl("triton", needs=arch(80))
def filter_thresholds(logits_LV, temperature_L, top_k_L, top_p_L, min_p_L, num_candidates):
    num_rows, vocab_size = logits_LV.shape
    params = (temperature_L, top_k_L, top_p_L, min_p_L)
    assert logits_LV.stride(1) == 1 and len({param.stride(0) for param in params}) == 1
    thresholds_L = logits_LV.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        _search_thresholds[num_rows,](
            logits_LV, *params, thresholds_L,
            vocab_size, logits_LV.stride(0), temperature_L.stride(0),
            SHIFT=_UNUSED_BITS[logits_LV.dtype],
            BLOCK=min(_SEARCH_BLOCK, next_power_of_2(vocab_size)),
            num_warps=_SEARCH_WARPS,
        )  # fmt: skip
    return thresholds_L


@jit
def _penalize(
    logits_ptr, slots_ptr, in_prompt_ptr, output_counts_ptr,
    repetition_ptr, presence_ptr, frequency_ptr,
    vocab_size, row_stride, slots_stride, param_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """In place, as the reference says; one program per (row, block of tokens)."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row * param_stride)
    presence = tl.load(presence_ptr + row * param_stride)
    frequency = tl.load(frequency_ptr + row * param_stride)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    slot = tl.load(slots_ptr + row * slots_stride).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = tokens < vocab_size
    x = tl.load(logits_ptr + row * row_stride + tokens, mask=in_row)
    count = tl.load(output_counts_ptr + slot * vocab_size + tokens, mask=in_row, other=0)
    in_prompt = tl.load(in_prompt_ptr + slot * vocab_size + tokens, mask=in_row, other=0) != 0
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where((count > 0) | in_prompt, repeated, x)
    x -= tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32)
    tl.store(logits_ptr + row * row_stride + tokens, x, mask=in_row)


@reference.apply_penalties.impl("triton", needs=arch(80))
def apply_penalties(
    logits_LV, slots_L, in_prompt_SV, output_counts_SV, repetition_L, presence_L, frequency_L
):
    params = (repetition_L, presence_L, frequency_L)
    num_rows, vocab_size = logits_LV.shape
    assert logits_LV.dtype == torch.float32 and logits_LV.stride(1) == 1
    assert in_prompt_SV.is_contiguous() and output_counts_SV.is_contiguous()
    assert len({param.stride(0) for param in params}) == 1
    if num_rows:
        _penalize[num_rows, cdiv(vocab_size, _SPLIT)](
            logits_LV, slots_L, in_prompt_SV, output_counts_SV, *params,
            vocab_size, logits_LV.stride(0), slots_L.stride(0), repetition_L.stride(0),
            BLOCK=_SPLIT, num_warps=8,
        )  # fmt: skip


@jit
def _mask(
    logits_ptr, positions_ptr, words_ptr, vocab_size, row_stride, num_words, BLOCK: tl.constexpr
):
    """In place, as the reference says; one program per (masked row, block of tokens). Only what is
    forbidden is written, nothing is read."""
    p = tl.program_id(0).to(tl.int64)
    row = tl.load(positions_ptr + p).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = tokens < vocab_size
    words = tl.load(words_ptr + p * num_words + tokens // 32, mask=in_row, other=-1)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + tokens, float("-inf"), mask=in_row & is_forbidden)


@reference.apply_bitmask.impl("triton", needs=arch(80))
def apply_bitmask(logits_LV, positions_P, words_PW):
    vocab_size, (num_masked, num_words) = logits_LV.shape[1], words_PW.shape
    assert logits_LV.stride(1) == 1 and words_PW.is_contiguous() and num_words * 32 >= vocab_size
    if num_masked:
        _mask[num_masked, cdiv(vocab_size, _SPLIT)](
            logits_LV, positions_P, words_PW, vocab_size, logits_LV.stride(0), num_words,
            BLOCK=_SPLIT, num_warps=8,
        )  # fmt: skip
