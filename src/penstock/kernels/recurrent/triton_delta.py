"""The gated delta rule: decodes token by token, longer entries in chunks.

A decode reads and writes its state once, which is all the time it takes; a last token with its
drafts reads it once, and once more when it is known what counts. Chunks go through two kernels. The
first sees a chunk alone, all chunks at once: it solves the triangular system of their writes. The
second walks an entry's chunks in order with the state in registers. The equations are those of
`reference._chunks`. What of them is float32 is multiplied as the sum of two numbers of 16 bits, as
tensor cores take them: an H200's states are off by 1e-5 of a number at most.

Legend: T tokens, N entries, S slots, H key heads, V value heads, R = V / H, K key size, D value
size, L tokens of a chunk.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.launch import jit
from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.recurrent.reference import UNIT_EPS, gated_delta, keep_delta
from penstock.kernels.recurrent.triton_tiles import block_of_entries, max_tiles, tile_of
from penstock.kernels.sizes import cdiv, next_power_of_2
from penstock.kernels.triton_math import dot

_CHUNK = 64
# Columns of the state in one program.
_BLOCK_D_STEP = 32
_BLOCK_D_WALK = 64  # the rows of one MMA of four warps
_MAX_K = 128  # a program holds all rows of its columns, and shared memory has room for no more

# Of float32 matrices: three TF32 MMAs instead of one keep its accuracy.
_PRECISION = tl.constexpr("tf32x3")
_UNIT_EPS = tl.constexpr(UNIT_EPS)


@triton.jit
def _written(state, k, v, g, beta):
    """exp(g) state, and what a token of key k adds to it: k (x) beta (v - k . state)."""
    k *= tl.rsqrt(tl.sum(k * k) + _UNIT_EPS)
    state *= tl.exp(g)
    write = beta * (v.to(tl.float32) - tl.sum(state * k[:, None], axis=0))
    return state + k[:, None] * write[None, :]


@triton.jit
def _read(state, q, scale):
    q *= tl.rsqrt(tl.sum(q * q) + _UNIT_EPS) * scale
    return tl.sum(state * q[:, None], axis=0)


@jit
def _step(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, slots_ptr, has_state_ptr, out_ptr,
    stride_q, stride_k, stride_v, scale,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: state = exp(g) state; state += k (x) beta (v - k . state); out = q . state.

    Program (b, v, n): the b-th block of value columns, value head v, entry n.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, entry = tl.program_id(1), tl.program_id(2)
    token = entry.to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_key, in_value = keys < K, cols < D
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    state_ptr += (slot * V + head) * (K * D) + keys[:, None] * D + cols[None, :]
    inside = in_key[:, None] & in_value[None, :]
    num_known = tl.where(tl.load(has_state_ptr + entry), K, 0)
    state = tl.load(state_ptr, mask=inside & (keys[:, None] < num_known), other=0.0)

    key_head = (head // R) * K
    q = tl.load(q_ptr + token * stride_q + key_head + keys, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * stride_k + key_head + keys, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * stride_v + head * D + cols, mask=in_value, other=0.0)
    g = tl.load(g_ptr + token * V + head)
    beta = tl.load(beta_ptr + token * V + head)
    state = _written(state, k, v, g, beta)
    out = _read(state, q, scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * V + head) * D + cols, out, mask=in_value)
    tl.store(state_ptr, state, mask=inside)


@jit(do_not_specialize=["first_entry"])
def _run(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, slots_ptr, has_state_ptr, starts_ptr,
    counts_ptr, out_ptr, first_entry, stride_q, stride_k, stride_v, scale,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, KEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A last token and its drafts, as `_step` one after the other. KEEPS: those that count go
    through the state for good, without outputs; else the state stays as it was.

    Program (b, v, n): the b-th block of value columns, value head v, entry first_entry + n.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, entry = tl.program_id(1), first_entry + tl.program_id(2)
    start = tl.load(starts_ptr + entry)
    end = tl.load(starts_ptr + entry + 1)
    if KEEPS:
        end = tl.minimum(end, start + tl.load(counts_ptr + entry).to(tl.int32))
    if start >= end:
        return
    keys = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_key, in_value = keys < K, cols < D
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    state_ptr += (slot * V + head) * (K * D) + keys[:, None] * D + cols[None, :]
    inside = in_key[:, None] & in_value[None, :]
    num_known = K
    if not KEEPS:
        num_known = tl.where(tl.load(has_state_ptr + entry), K, 0)
    state = tl.load(state_ptr, mask=inside & (keys[:, None] < num_known), other=0.0)
    key_head = (head // R) * K
    for place in tl.range(0, end - start):
        token = start.to(tl.int64) + place
        k = tl.load(k_ptr + token * stride_k + key_head + keys, mask=in_key, other=0.0)
        v = tl.load(v_ptr + token * stride_v + head * D + cols, mask=in_value, other=0.0)
        g = tl.load(g_ptr + token * V + head)
        beta = tl.load(beta_ptr + token * V + head)
        state = _written(state, k.to(tl.float32), v, g, beta)
        if not KEEPS:
            q = tl.load(q_ptr + token * stride_q + key_head + keys, mask=in_key, other=0.0)
            out = _read(state, q.to(tl.float32), scale).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (token * V + head) * D + cols, out, mask=in_value)
    if KEEPS:
        tl.store(state_ptr, state, mask=inside)


@triton.jit
def _split(x, dtype: tl.constexpr, ON_GPU: tl.constexpr):
    """The sum of two numbers of 16 bits, as tensor cores take them: 16 bits of x are left with
    bfloat16 and 22 with float16, more than a decayed sum needs."""
    high = x.to(dtype)
    low = x - high.to(tl.float32)
    if ON_GPU:  # the interpreter would cut bits off instead of rounding
        low = low.to(dtype)
    return high, low


@triton.jit
def _times(x, y, acc, ON_GPU: tl.constexpr):
    """acc + x y of a float32 x and a y of the model's dtype."""
    if y.dtype == tl.float32:
        acc = tl.dot(x, y, acc, input_precision=_PRECISION)
    else:
        high, low = _split(x, y.dtype, ON_GPU)
        acc = dot(high, y, acc, ON_GPU)
        acc = dot(low, y, acc, ON_GPU)
    return acc


@triton.jit
def _times_pair(x, y, y_low, acc, dtype: tl.constexpr, ON_GPU: tl.constexpr):
    """As `_times`, of a y that is the sum of two as well: `y` alone where `dtype` is float32."""
    if dtype == tl.float32:
        acc = tl.dot(x, y, acc, input_precision=_PRECISION)
    elif not ON_GPU:  # where nothing is rounded, low times low counts, too
        acc = tl.dot(x, y.to(tl.float32) + y_low.to(tl.float32), acc)
    else:
        high, low = _split(x, dtype, ON_GPU)
        acc = dot(high, y, acc, ON_GPU)
        acc = dot(low, y, acc, ON_GPU)
        acc = dot(high, y_low, acc, ON_GPU)
    return acc


@triton.jit
def _rows(x_ptr, stride, tokens, in_chunk, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows `tokens` of x; zeros outside the chunk."""
    keys = tl.arange(0, BLOCK_K)[None, :]
    at = tokens.to(tl.int64)[:, None] * stride + keys
    return tl.load(x_ptr + at, mask=in_chunk[:, None] & (keys < K), other=0.0)


@triton.jit
def _to_unit(x):
    """What scales each row to unit length."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + _UNIT_EPS)


@triton.jit
def _inverse(a, dtype: tl.constexpr, L: tl.constexpr, ON_GPU: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [L, L].

    The inverse x of the blocks of S on the diagonal gives that of the blocks of 2 S: between two of
    them it is -x a x. No number is larger on the way than what it is made of, as in a forward
    substitution, but there are only log L steps.
    """
    row = tl.arange(0, L)[:, None]
    col = tl.arange(0, L)[None, :]
    a_high, a_low = _split(a, dtype, ON_GPU)
    zeros = tl.zeros((L, L), tl.float32)
    x = tl.where(row == col, 1.0, 0.0) - tl.where(row // 2 == col // 2, a, 0.0)
    for i in tl.static_range(1, 6):
        if 2 << i <= L:
            y = _times_pair(x, a_high, a_low, zeros, dtype, ON_GPU)
            x_high, x_low = _split(x, dtype, ON_GPU)
            y = _times_pair(y, x_high, x_low, zeros, dtype, ON_GPU)
            x -= tl.where((row >> (i + 1) == col >> (i + 1)) & (row >> i != col >> i), y, 0.0)
    return x


@triton.jit
def _store_pair(to_ptr, x, mask, dtype: tl.constexpr, L: tl.constexpr, ON_GPU: tl.constexpr):
    """Rows of x in the dtype of `to_ptr`; behind each what that lost."""
    if dtype != tl.float32:
        x, low = _split(x, dtype, ON_GPU)
        tl.store(to_ptr + L, low, mask=mask)
    tl.store(to_ptr, x, mask=mask)


@jit(do_not_specialize=["first_entry", "num_entries"])
def _solve_chunks(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, pairs_ptr, factors_ptr,
    first_entry, num_entries, stride_q, stride_k, scale,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, L: tl.constexpr,
    BLOCK_N: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """pairs: solve = (I + A)^-1 diag(beta) and read = B, both [L, L]; see `reference._chunks`.
    factors: of tokens, what `_walk_chunks` multiplies with to get exp(c) k, exp(c) q, and what is
    left of a write at the end of the chunk; then what is left of the state.

    Program (i, v): the i-th chunk, value head v. A row of either lies at its token.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(1)
    entry, chunk = tile_of(tl.program_id(0), starts_ptr, first_entry, num_entries, L, BLOCK_N)
    if entry >= first_entry + num_entries:
        return
    row = tl.arange(0, L)[:, None]
    col = tl.arange(0, L)[None, :]
    tokens = tl.load(starts_ptr + entry) + chunk * L + tl.arange(0, L)
    in_chunk = tokens < tl.load(starts_ptr + entry + 1)
    k = _rows(k_ptr + (head // R) * K, stride_k, tokens, in_chunk, K, BLOCK_K)
    q = _rows(q_ptr + (head // R) * K, stride_q, tokens, in_chunk, K, BLOCK_K)
    at = tokens.to(tl.int64) * V + head
    beta = tl.load(beta_ptr + at, mask=in_chunk, other=0.0)
    g = tl.load(g_ptr + at, mask=in_chunk, other=0.0)
    c = tl.cumsum(g)
    total = tl.sum(g)
    k_scale, q_scale = _to_unit(k), _to_unit(q) * scale
    factors_ptr += tokens.to(tl.int64) * (4 * V) + head
    tl.store(factors_ptr, k_scale * tl.exp(c), mask=in_chunk)
    tl.store(factors_ptr + V, q_scale * tl.exp(c), mask=in_chunk)
    tl.store(factors_ptr + 2 * V, k_scale * tl.exp(total - c), mask=in_chunk)
    tl.store(factors_ptr + 3 * V, tl.exp(tl.broadcast_to(total, (L,))), mask=in_chunk)
    decay = tl.exp(tl.where(row >= col, c[:, None] - c[None, :], -float("inf")))

    # Rows are multiplied as they are, which is exact; their lengths come in afterwards.
    decay *= k_scale[None, :]
    zeros = tl.zeros((L, L), tl.float32)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    PRECISION: tl.constexpr = _PRECISION if dtype == tl.float32 else "ieee"
    if not ON_GPU:
        k, q = k.to(tl.float32), q.to(tl.float32)
    to = pairs_ptr + at[:, None] * (4 * L) + col
    mask = in_chunk[:, None]
    read = tl.dot(q, tl.trans(k), zeros, input_precision=PRECISION)
    read *= decay * q_scale[:, None]
    _store_pair(to + 2 * L, read, mask, dtype, L, ON_GPU)
    a = tl.dot(k, tl.trans(k), zeros, input_precision=PRECISION)
    a *= decay * (k_scale * beta)[:, None]
    solve = _inverse(tl.where(row > col, a, 0.0), dtype, L, ON_GPU)
    _store_pair(to, solve * beta[None, :], mask, dtype, L, ON_GPU)


@jit(do_not_specialize=["first_entry"])
def _walk_chunks(
    q_ptr, k_ptr, v_ptr, pairs_ptr, factors_ptr, state_ptr, slots_ptr, has_state_ptr,
    starts_ptr, out_ptr, first_entry, stride_q, stride_k, stride_v,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, L: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """write = solve (v - exp(c) k . state); out = exp(c) q . state + read write; then the state.

    Program (b, v, n): the b-th block of value columns, value head v, entry first_entry + n. All
    but inputs are transposed: value columns are the rows, so that what one MMA has made is the left
    operand of the next, in the registers where it is.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, entry = tl.program_id(1), first_entry + tl.program_id(2)
    start = tl.load(starts_ptr + entry)
    end = tl.load(starts_ptr + entry + 1)
    if start >= end:  # an entry without tokens leaves its slot alone
        return
    keys = tl.arange(0, BLOCK_K)[None, :]
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, L)
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    state_ptr += (slot * V + head) * (K * D) + keys * D + cols[:, None]
    inside = (keys < K) & (cols < D)[:, None]
    num_known = tl.where(tl.load(has_state_ptr + entry), K, 0)
    state = tl.load(state_ptr, mask=inside & (keys < num_known), other=0.0)
    q_ptr += (head // R) * K
    k_ptr += (head // R) * K
    v_ptr += head * D
    zeros = tl.zeros((BLOCK_D, L), tl.float32)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    IS_PAIR: tl.constexpr = dtype != tl.float32

    for first in tl.range(start, end, L):
        tokens = first + row
        in_chunk = tokens < end
        at = tokens.to(tl.int64) * V + head
        k = _rows(k_ptr, stride_k, tokens, in_chunk, K, BLOCK_K)
        v_at = tokens.to(tl.int64)[:, None] * stride_v + cols[None, :]
        mask = in_chunk[:, None] & (cols < D)[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
        pairs = pairs_ptr + at[:, None] * (4 * L) + row[None, :]
        factors = factors_ptr + tokens.to(tl.int64) * (4 * V) + head
        is_row = in_chunk[:, None]
        solve = tl.load(pairs, mask=is_row, other=0.0)
        solve_low = solve
        if IS_PAIR:
            solve_low = tl.load(pairs + L, mask=is_row, other=0.0)
        k_factor = tl.load(factors, mask=in_chunk, other=0.0)
        known = _times(state, tl.trans(k), zeros, ON_GPU) * k_factor[None, :]
        write = _times_pair(-known, tl.trans(solve), tl.trans(solve_low), zeros, dtype, ON_GPU)
        if IS_PAIR:
            write = dot(tl.trans(v), tl.trans(solve), write, ON_GPU)
            write = dot(tl.trans(v), tl.trans(solve_low), write, ON_GPU)
        else:
            write = tl.dot(tl.trans(v), tl.trans(solve), write, input_precision=_PRECISION)

        q = _rows(q_ptr, stride_q, tokens, in_chunk, K, BLOCK_K)
        q_factor = tl.load(factors + V, mask=in_chunk, other=0.0)
        out = _times(state, tl.trans(q), zeros, ON_GPU) * q_factor[None, :]
        read = tl.load(pairs + 2 * L, mask=is_row, other=0.0)
        read_low = read
        if IS_PAIR:
            read_low = tl.load(pairs + 3 * L, mask=is_row, other=0.0)
        out = _times_pair(write, tl.trans(read), tl.trans(read_low), out, dtype, ON_GPU)
        left = tl.load(factors + 2 * V, mask=in_chunk, other=0.0)
        state *= tl.load(factors_ptr + first * (4 * V) + 3 * V + head)
        state = _times(write * left[None, :], k, state, ON_GPU)
        out = tl.trans(out.to(out_ptr.dtype.element_ty))
        tl.store(out_ptr + at[:, None] * D + cols[None, :], out, mask=mask)
    tl.store(state_ptr, state, mask=inside)


def _block_k(key_size: int) -> int:
    block_k: int = max(16, next_power_of_2(key_size))
    # Triton 3.6 gets MMAs of square tiles of this size wrong on an H200.
    return 2 * block_k if block_k == _CHUNK else block_k


@gated_delta.impl("triton", needs=arch(80), fits=lambda q_THK, *rest: q_THK.shape[-1] <= _MAX_K)
def gated_delta_triton(
    q_THK,
    k_THK,
    v_TVD,
    g_TV,
    beta_TV,
    state_SVKD,
    slots_N,
    has_state_N,
    query_starts_N1,
    num_decodes,
    num_drafted=0,
):
    (num_tokens, num_heads, key_size), num_entries = q_THK.shape, slots_N.shape[0]
    _, num_value_heads, value_size = v_TVD.shape
    assert q_THK.stride()[1:] == k_THK.stride()[1:] == (key_size, 1), q_THK.stride()
    assert v_TVD.stride()[1:] == (value_size, 1), v_TVD.stride()
    assert state_SVKD.is_contiguous() and g_TV.is_contiguous() and beta_TV.is_contiguous()
    assert state_SVKD.dtype == g_TV.dtype == beta_TV.dtype == torch.float32
    out_TVD = torch.empty(v_TVD.shape, dtype=v_TVD.dtype, device=v_TVD.device)
    scale, group = key_size**-0.5, num_value_heads // num_heads
    strides = (q_THK.stride(0), k_THK.stride(0), v_TVD.stride(0))
    block_k = _block_k(key_size)
    blocks_d, options = cdiv(value_size, _BLOCK_D_STEP), launch_options(q_THK)
    on_gpu = q_THK.is_cuda
    if num_decodes:
        _step[(blocks_d, num_value_heads, num_decodes)](
            q_THK, k_THK, v_TVD, g_TV, beta_TV, state_SVKD, slots_N, has_state_N, out_TVD,
            *strides, scale, V=num_value_heads, R=group, K=key_size, D=value_size, BLOCK_K=block_k,
            BLOCK_D=_BLOCK_D_STEP, num_warps=4, **options,
        )  # fmt: skip
    if num_drafted:
        _run[(blocks_d, num_value_heads, num_drafted)](
            q_THK, k_THK, v_TVD, g_TV, beta_TV, state_SVKD, slots_N, has_state_N, query_starts_N1,
            query_starts_N1, out_TVD, num_decodes, *strides, scale, V=num_value_heads, R=group,
            K=key_size, D=value_size, BLOCK_K=block_k, BLOCK_D=_BLOCK_D_STEP, KEEPS=False,
            num_warps=4, **options,
        )  # fmt: skip
    first_longer = num_decodes + num_drafted
    num_longer = num_entries - first_longer
    if not num_longer:
        return out_TVD
    num_chunks = max_tiles(num_tokens - num_decodes, num_longer, _CHUNK)
    # The interpreter cuts bits off instead of rounding.
    pairs_dtype = torch.float32 if triton.knobs.runtime.interpret else k_THK.dtype
    pairs = g_TV.new_empty((num_tokens, num_value_heads, 4, _CHUNK), dtype=pairs_dtype)
    factors = g_TV.new_empty((num_tokens, 4, num_value_heads))
    _solve_chunks[(num_chunks, num_value_heads)](
        q_THK, k_THK, g_TV, beta_TV, query_starts_N1, pairs, factors,
        first_longer, num_longer, *strides[:2], scale, V=num_value_heads, R=group,
        K=key_size, BLOCK_K=block_k, L=_CHUNK, BLOCK_N=block_of_entries(num_longer), ON_GPU=on_gpu,
        num_warps=4, **options,
    )  # fmt: skip
    blocks_d = cdiv(value_size, _BLOCK_D_WALK)
    _walk_chunks[(blocks_d, num_value_heads, num_longer)](
        q_THK, k_THK, v_TVD, pairs, factors, state_SVKD, slots_N, has_state_N,
        query_starts_N1, out_TVD, first_longer, *strides, V=num_value_heads, R=group,
        K=key_size, D=value_size, BLOCK_K=block_k, BLOCK_D=_BLOCK_D_WALK, L=_CHUNK, ON_GPU=on_gpu,
        num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    return out_TVD


@keep_delta.impl("triton", needs=arch(80), fits=lambda k_THK, *rest: k_THK.shape[-1] <= _MAX_K)
def keep_delta_triton(
    k_THK,
    v_TVD,
    g_TV,
    beta_TV,
    state_SVKD,
    slots_N,
    query_starts_N1,
    counts_N,
    num_decodes,
    num_drafted,
):
    (_, num_heads, key_size), (_, num_value_heads, value_size) = k_THK.shape, v_TVD.shape
    assert k_THK.stride()[1:] == (key_size, 1) and v_TVD.stride()[1:] == (value_size, 1)
    assert state_SVKD.is_contiguous() and g_TV.is_contiguous() and beta_TV.is_contiguous()
    strides = (k_THK.stride(0), k_THK.stride(0), v_TVD.stride(0))
    _run[(cdiv(value_size, _BLOCK_D_STEP), num_value_heads, num_drafted)](
        k_THK, k_THK, v_TVD, g_TV, beta_TV, state_SVKD, slots_N, slots_N, query_starts_N1,
        counts_N, v_TVD, num_decodes, *strides, 1.0, V=num_value_heads,
        R=num_value_heads // num_heads, K=key_size, D=value_size, BLOCK_K=_block_k(key_size),
        BLOCK_D=_BLOCK_D_STEP, KEEPS=True, num_warps=4, **launch_options(k_THK),
    )  # fmt: skip
