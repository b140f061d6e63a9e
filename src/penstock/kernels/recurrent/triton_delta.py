"""The gated delta rule: decodes token by token, longer entries in chunks.

A decode reads and writes its state once, which is all the time it takes. Chunks go through two
kernels. The first sees a chunk alone, all chunks at once: it solves the triangular system of their
writes. The second walks an entry's chunks in order with the state in registers. The equations are
those of `reference._chunks`.

Legend: T tokens, N entries, S slots, H key heads, V value heads, R = V / H, K key size, D value
size, L tokens of a chunk.
"""

import torch
import triton
import triton.language as tl

from penstock.kernels.op import arch
from penstock.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.kernels.recurrent.reference import UNIT_EPS, gated_delta
from penstock.kernels.recurrent.triton_tiles import block_of_entries, max_tiles, tile_of

_CHUNK = 64
_BLOCK_D = 32  # of the state's columns in one program: those of one head are four programs' work
_MAX_K = 128  # a program holds all rows of its columns, and shared memory has room for no more

# Of float32 matrices: three TF32 MMAs instead of one keep its accuracy.
_PRECISION = tl.constexpr("tf32x3")
_UNIT_EPS = tl.constexpr(UNIT_EPS)


@triton.jit
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
    q *= tl.rsqrt(tl.sum(q * q) + _UNIT_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k) + _UNIT_EPS)

    state *= tl.exp(g)
    write = beta * (v.to(tl.float32) - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * write[None, :]
    out = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * V + head) * D + cols, out, mask=in_value)
    tl.store(state_ptr, state, mask=inside)


@triton.jit
def _dot(x, y, ON_GPU: tl.constexpr):
    if not ON_GPU:  # the interpreter takes bfloat16 for integers
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=_PRECISION)


@triton.jit
def _dot_wide(x, y, ON_GPU: tl.constexpr):
    """x in the model's dtype times y in float32, which is the sum of two numbers in x's dtype.

    That leaves 16 bits of y to bfloat16 and 22 to float16: more than a decayed sum needs.
    """
    if x.dtype == tl.float32:
        return tl.dot(x, y, input_precision=_PRECISION)
    high = y.to(x.dtype)
    low = (y - high.to(tl.float32)).to(x.dtype)
    return _dot(x, high, ON_GPU) + _dot(x, low, ON_GPU)


@triton.jit
def _rows(x_ptr, stride, tokens, in_chunk, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(rows `tokens` of x, what scales each to unit length); zeros outside the chunk."""
    keys = tl.arange(0, BLOCK_K)[None, :]
    at = tokens.to(tl.int64)[:, None] * stride + keys
    x = tl.load(x_ptr + at, mask=in_chunk[:, None] & (keys < K), other=0.0)
    x32 = x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(x32 * x32, axis=1) + _UNIT_EPS)


@triton.jit
def _inverse(a, L: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [L, L].

    Its blocks of 16 on the diagonal are solved row by row, all at once: d. With the rest of `a` as
    n = d a, whose fourth power is zero, the whole is (I - n) (I + n^2) d.
    """
    tl.static_assert(L == 64)
    BLOCKS: tl.constexpr = L // 16
    row = tl.arange(0, L)[:, None]
    col = tl.arange(0, L)[None, :]
    is_near = row // 16 == col // 16
    near = tl.reshape(tl.where(is_near, a, 0.0), (BLOCKS, 16, BLOCKS, 16))
    near = tl.sum(near, axis=2)  # the other blocks of a row are zero
    line = tl.arange(0, 16)[None, :, None]
    d = tl.where(line == tl.arange(0, 16)[None, None, :], 1.0, 0.0)
    d = tl.broadcast_to(d, (BLOCKS, 16, 16))
    for i in range(1, 16):  # line i: -a[i] times the lines above it
        a_i = tl.sum(tl.where(line == i, near, 0.0), axis=1)
        d_i = tl.sum(a_i[:, :, None] * d, axis=1)
        d = tl.where(line == i, d - d_i[:, None, :], d)
    d = tl.broadcast_to(d[:, :, None, :], (BLOCKS, 16, BLOCKS, 16))
    d = tl.where(is_near, tl.reshape(d, (L, L)), 0.0)
    one = tl.where(row == col, 1.0, 0.0)
    n = tl.dot(d, tl.where(is_near, 0.0, a), input_precision=_PRECISION)
    both = tl.dot(
        one - n, one + tl.dot(n, n, input_precision=_PRECISION), input_precision=_PRECISION
    )
    return tl.dot(both, d, input_precision=_PRECISION)


@triton.jit(do_not_specialize=["first_entry", "num_entries"])
def _solve_chunks(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, solve_ptr, read_ptr,
    first_entry, num_entries, stride_q, stride_k, scale,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, L: tl.constexpr,
    BLOCK_N: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """solve = (I + A)^-1 diag(beta) and read = B, both [L, L]; see `reference._chunks`.

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
    q, q_scale = _rows(q_ptr + (head // R) * K, stride_q, tokens, in_chunk, K, BLOCK_K)
    k, k_scale = _rows(k_ptr + (head // R) * K, stride_k, tokens, in_chunk, K, BLOCK_K)
    at = tokens.to(tl.int64) * V + head
    beta = tl.load(beta_ptr + at, mask=in_chunk, other=0.0)
    c = tl.cumsum(tl.load(g_ptr + at, mask=in_chunk, other=0.0))
    decay = tl.exp(tl.where(row >= col, c[:, None] - c[None, :], -float("inf")))

    # Rows are multiplied as they are, which is exact; their lengths come in afterwards.
    decay *= k_scale[None, :]
    read = _dot(q, tl.trans(k), ON_GPU) * decay * (q_scale * scale)[:, None]
    to = at[:, None] * L + col
    tl.store(read_ptr + to, read, mask=in_chunk[:, None])  # before the inverse needs its registers
    a = _dot(k, tl.trans(k), ON_GPU) * decay * (k_scale * beta)[:, None]
    solve = _inverse(tl.where(row > col, a, 0.0), L)
    tl.store(solve_ptr + to, solve * beta[None, :], mask=in_chunk[:, None])


@triton.jit(do_not_specialize=["first_entry"])
def _walk_chunks(
    q_ptr, k_ptr, v_ptr, g_ptr, solve_ptr, read_ptr, state_ptr, slots_ptr, has_state_ptr,
    starts_ptr, out_ptr, first_entry, stride_q, stride_k, stride_v, scale,
    V: tl.constexpr, R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, L: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """write = solve (v - exp(c) k . state); out = exp(c) q . state + read write; then the state.

    Program (b, v, n): the b-th block of value columns, value head v, entry first_entry + n.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, entry = tl.program_id(1), first_entry + tl.program_id(2)
    start = tl.load(starts_ptr + entry)
    end = tl.load(starts_ptr + entry + 1)
    if start >= end:  # an entry without tokens leaves its slot alone
        return
    keys = tl.arange(0, BLOCK_K)[:, None]
    cols = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    row = tl.arange(0, L)
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    state_ptr += (slot * V + head) * (K * D) + keys * D + cols
    inside = (keys < K) & (cols < D)
    num_known = tl.where(tl.load(has_state_ptr + entry), K, 0)
    state = tl.load(state_ptr, mask=inside & (keys < num_known), other=0.0)
    q_ptr += (head // R) * K
    k_ptr += (head // R) * K
    v_ptr += head * D

    for first in tl.range(start, end, L):
        tokens = first + row
        in_chunk = tokens < end
        q, q_scale = _rows(q_ptr, stride_q, tokens, in_chunk, K, BLOCK_K)
        k, k_scale = _rows(k_ptr, stride_k, tokens, in_chunk, K, BLOCK_K)
        mask = in_chunk[:, None] & (cols < D)
        v_at = tokens.to(tl.int64)[:, None] * stride_v + cols
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0).to(tl.float32)
        at = tokens.to(tl.int64) * V + head
        pairs = at[:, None] * L + row[None, :]
        solve = tl.load(solve_ptr + pairs, mask=in_chunk[:, None], other=0.0)
        read = tl.load(read_ptr + pairs, mask=in_chunk[:, None], other=0.0)
        g = tl.load(g_ptr + at, mask=in_chunk, other=0.0)
        c = tl.cumsum(g)
        total = tl.sum(g)

        decay = tl.exp(c)
        known = _dot_wide(k, state, ON_GPU) * (k_scale * decay)[:, None]
        write = tl.dot(solve, v - known, input_precision=_PRECISION)
        out = _dot_wide(q, state, ON_GPU) * (q_scale * scale * decay)[:, None]
        out = tl.dot(read, write, acc=out, input_precision=_PRECISION)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * D + cols, out, mask=mask)
        write *= (k_scale * tl.exp(total - c))[:, None]
        state = state * tl.exp(total) + _dot_wide(tl.trans(k), write, ON_GPU)
    tl.store(state_ptr, state, mask=inside)


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
    block_k = max(16, triton.next_power_of_2(key_size))
    if block_k == _CHUNK:
        block_k *= 2  # Triton 3.6 gets MMAs of square tiles of this size wrong on an H200
    blocks_d, options = triton.cdiv(value_size, _BLOCK_D), launch_options(q_THK)
    on_gpu = q_THK.is_cuda
    if num_decodes:
        _step[(blocks_d, num_value_heads, num_decodes)](
            q_THK, k_THK, v_TVD, g_TV, beta_TV, state_SVKD, slots_N, has_state_N, out_TVD,
            *strides, scale, V=num_value_heads, R=group, K=key_size, D=value_size, BLOCK_K=block_k,
            BLOCK_D=_BLOCK_D, num_warps=4, **options,
        )  # fmt: skip
    num_longer = num_entries - num_decodes
    if not num_longer:
        return out_TVD
    num_chunks = max_tiles(num_tokens - num_decodes, num_longer, _CHUNK)
    pairs = (2, num_tokens, num_value_heads, _CHUNK)
    solve_TVL, read_TVL = torch.empty(pairs, dtype=torch.float32, device=q_THK.device).unbind()
    _solve_chunks[(num_chunks, num_value_heads)](
        q_THK, k_THK, g_TV, beta_TV, query_starts_N1, solve_TVL, read_TVL,
        num_decodes, num_longer, *strides[:2], scale, V=num_value_heads, R=group, K=key_size,
        BLOCK_K=block_k, L=_CHUNK, BLOCK_N=block_of_entries(num_longer), ON_GPU=on_gpu,
        num_warps=4, **options,
    )  # fmt: skip
    _walk_chunks[(blocks_d, num_value_heads, num_longer)](
        q_THK, k_THK, v_TVD, g_TV, solve_TVL, read_TVL, state_SVKD, slots_N, has_state_N,
        query_starts_N1, out_TVD, num_decodes, *strides, scale, V=num_value_heads, R=group,
        K=key_size, D=value_size, BLOCK_K=block_k, BLOCK_D=_BLOCK_D, L=_CHUNK, ON_GPU=on_gpu,
        num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    return out_TVD
