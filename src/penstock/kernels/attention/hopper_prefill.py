"""`triton_prefill` for Hopper, warp-specialized: 16-bit caches, heads of 128.

A producer warp copies keys and values into shared memory by TMA, a block of the table at a time;
two consumer warpgroups attend, 64 rows each, and the QK GEMM of one tile overlaps with the PV GEMM
of the tile before. Tiles are taken from the last to the
first, so those that need a mask come first and the others need no test.

A row of (query, head of the kv head) is what it is in `triton_prefill`, and so are the results, up
to rounding. Triton's interpreter cannot run this: tests/gpu compares it.

Legend: T tokens, N sequences, H query heads, K kv heads, G = H / K, D head size, B blocks, S tokens
per block.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.attention.triton_decode import LOG2_E
from penstock.kernels.attention.triton_prefill import num_slots, tile_of
from penstock.kernels.gluon_launch import jit as gluon_jit
from penstock.kernels.gluon_tools import copy, descriptor, view
from penstock.kernels.pdl import launch_options

HEAD_SIZE = 128
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
_LOG2_E = gl.constexpr(LOG2_E)
_PANEL = gl.constexpr(64)  # channels that lie side by side in shared memory: 128 bytes
_ATOM = gl.constexpr(8)  # rows after which the order of a panel's bytes repeats
_HALF = gl.constexpr(64)  # rows of a warpgroup
_ROWS = gl.constexpr(128)


@gluon.jit
def _copy_tile(
    desc, boxes, barrier, stage, table_ptr, first, seen_from, num_blocks, head_row, rows_per_block,
    S: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Start the copies of the blocks [first, first + BN / S) of a sequence. In place of those
    outside of [seen_from, num_blocks) come the rows behind the cache, which read as zeros."""
    BLOCKS: gl.constexpr = BN // S
    PANELS: gl.constexpr = D // _PANEL
    for b in gl.static_range(BLOCKS):
        inside = (first + b >= seen_from) & (first + b < num_blocks)
        block = gl.load(table_ptr + first + b, mask=inside, other=0)
        row = gl.where(inside, block * rows_per_block + head_row, desc.shape[0])
        for p in gl.static_range(PANELS):
            box = boxes.index((stage * PANELS + p) * BLOCKS + b)
            copy(desc, [row, p * _PANEL], barrier, box)


@gluon.jit
def _clear_tail(v_atoms, first_key, kv_len, S: gl.constexpr, D: gl.constexpr, BN: gl.constexpr):
    """Zeros for the values from kv_len to its block's end: of no sequence, they may be NaN, and the
    weight 0 does not undo that. `v_atoms`: the tile of stage 0, `first_key` its first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    PANELS: gl.constexpr = D // _PANEL
    end = (kv_len + S - 1) // S * S - first_key
    for i in range((kv_len - first_key) // _ATOM, end // _ATOM):
        rows = first_key + i * _ATOM + gl.arange(0, _ATOM, layout=gl.SliceLayout(1, LAYOUT))
        for p in gl.static_range(PANELS):
            atom = v_atoms.index(p * (BN // _ATOM) + i)
            v = atom.load(LAYOUT)
            atom.store(gl.where((rows < kv_len)[:, None], v, gl.zeros_like(v)))


@gluon.jit
def _load(
    k_desc, v_desc, k_boxes, v_boxes, v_atoms, k_full, v_full, v_tail, k_empty, v_empty, table_ptr,
    last_tile, num_tiles, kv_len, seen_from, head_row, rows_per_block,
    S: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    TILE_BYTES: gl.constexpr = BN * D * 2
    num_blocks = (kv_len + S - 1) // S
    first_key = last_tile * BN
    has_tail = (kv_len < first_key + BN) & (kv_len % S != 0)
    for j in range(num_tiles):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        first = (last_tile - j) * (BN // S)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), TILE_BYTES)
        _copy_tile(
            k_desc, k_boxes, k_full.index(stage), stage, table_ptr, first, seen_from, num_blocks,
            head_row, rows_per_block, S, D, BN,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        if (j == 0) & has_tail:
            mbarrier.expect(v_tail, TILE_BYTES)
            _copy_tile(
                v_desc, v_boxes, v_tail, 0, table_ptr, first, seen_from, num_blocks,
                head_row, rows_per_block, S, D, BN,
            )  # fmt: skip
            mbarrier.wait(v_tail, 0)
            _clear_tail(v_atoms, first_key, kv_len, S, D, BN)
            fence_async_shared()
            mbarrier.arrive(v_full.index(0), count=1)
        else:
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            _copy_tile(
                v_desc, v_boxes, v_full.index(stage), stage, table_ptr, first, seen_from,
                num_blocks, head_row, rows_per_block, S, D, BN,
            )  # fmt: skip


@gluon.jit
def _softmax(
    s, m, total, positions, first_key, window, scale_log2,
    DTYPE: gl.constexpr, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """(weights, running maximum and total, what the values so far are to be multiplied with)."""
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        age = positions[:, None] - keys[None, :]
        # Finite, and after the scaling, as `triton_prefill._attend` explains.
        seen = (age >= 0) & (age < window) if HAS_WINDOW else age >= 0
        s = gl.where(seen, s * scale_log2, -1.0e30)
        m_new = gl.maximum(m, gl.max(s, axis=1))
        p = gl.exp2(s - m_new[:, None])
    else:
        m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
        p = gl.exp2(s * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    total = total * alpha + gl.sum(p, axis=1)
    p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, s.type.layout, 2))
    return p, m_new, total, alpha


@gluon.jit
def _step(
    q, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, j, o, p, m, total, positions, last_tile,
    window, scale_log2, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tile j, while the values of the tile before are added to `o`."""
    BN: gl.constexpr = k_tiles.shape[1]
    stage = j % STAGES
    before = (j - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
    zeros = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    k = k_tiles.index(stage).permute((1, 0))
    s_token = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_tiles.index(before), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p_next, m, total, alpha = _softmax(
        s, m, total, positions, (last_tile - j) * BN, window, scale_log2,
        q.dtype, MASKED, HAS_WINDOW,
    )  # fmt: skip
    o, p = warpgroup_mma_wait(0, deps=(o_token, p))
    mbarrier.arrive(v_empty.index(before), count=1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return o, p_next, m, total


@gluon.jit
def _attend(
    q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, out_ptr, sinks_ptr,
    start, num_queries, num_before, first_row, kv_head, last_tile, num_tiles, num_masked,
    scale_log2, v_scale, window,
    PART: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup."""
    BN: gl.constexpr = k_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    first_row += PART * _HALF
    rows = first_row + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    positions = num_before + rows // G
    q = q_tiles.index(PART)
    m = gl.full([_HALF], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([_HALF], gl.float32, gl.SliceLayout(1, LAYOUT))
    o = gl.zeros([_HALF, D], gl.float32, O_LAYOUT)

    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    s = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, total, _ = _softmax(
        s, m, total, positions, last_tile * BN, window, scale_log2, q.dtype, True, HAS_WINDOW
    )
    for j in range(1, num_masked):
        o, p, m, total = _step(
            q, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, j, o, p, m, total, positions,
            last_tile, window, scale_log2, True, HAS_WINDOW, STAGES, LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for j in range(gl.maximum(num_masked, 1), num_tiles):
        o, p, m, total = _step(
            q, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, j, o, p, m, total, positions,
            last_tile, window, scale_log2, False, HAS_WINDOW, STAGES, LAYOUT, O_LAYOUT,
        )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    o = warpgroup_mma(p, v_tiles.index(last % STAGES), o)

    if HAS_SINKS:
        total += gl.exp2(gl.load(sinks_ptr + kv_head * G + rows % G) * _LOG2_E - m)
    factor = gl.convert_layout(v_scale / total, gl.SliceLayout(1, O_LAYOUT))
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    out = gl.convert_layout((o * factor[:, None]).to(q.dtype), STORE)
    rows = first_row + gl.arange(0, _HALF, layout=gl.SliceLayout(1, STORE))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, STORE))
    queries = rows // G
    at = ((start + queries).to(gl.int64) * (K * G) + kv_head * G + rows % G) * D
    gl.store(out_ptr + at[:, None] + cols[None, :], out, mask=(queries < num_queries)[:, None])


@gluon.jit
def _clear_padding(
    out_ptr, first_token, num_tokens, first_row, kv_head,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Zeros for the rows of a tile whose tokens are behind all entries."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    tokens = first_token + rows // G
    at = (tokens.to(gl.int64) * (K * G) + kv_head * G + rows % G) * D
    nothing = gl.zeros([_ROWS, D], out_ptr.dtype.element_ty, LAYOUT)
    gl.store(out_ptr + at[:, None] + cols[None, :], nothing, mask=(tokens < num_tokens)[:, None])


@gluon_jit(do_not_specialize=["first_entry", "end_entry", "num_tokens"])
def _prefill(
    q_ptr, k_desc, v_desc, out_ptr, rows_ptr, starts_ptr, kv_lens_ptr, table_ptr, sinks_ptr,
    first_entry, end_entry, num_tokens, scale_log2, v_scale, window, stride_qt, stride_table,
    rows_per_block,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (i, k): the i-th last slot (`triton_prefill.tile_of`), for kv head k."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = gl.program_id(1)
    slot = gl.num_programs(0) - 1 - gl.program_id(0)
    entry, tile = tile_of(slot, starts_ptr, first_entry, end_entry, G, _ROWS)
    start = gl.load(starts_ptr + entry)
    num_queries = gl.load(starts_ptr + entry + 1) - start
    if tile * _ROWS < num_queries * G:
        kv_len = gl.load(kv_lens_ptr + entry)
        table_ptr += gl.load(rows_ptr + entry).to(gl.int64) * stride_table
        num_before = kv_len - num_queries
        first_row = tile * _ROWS
        first_position = num_before + first_row // G
        last_query = gl.minimum((first_row + _ROWS - 1) // G, num_queries - 1)
        last_tile = (num_before + last_query) // BN
        if HAS_WINDOW:
            first_key = gl.maximum(0, first_position - window + 1)
            num_tiles = last_tile + 1 - first_key // BN
            num_masked = num_tiles
        else:
            first_key = 0
            num_tiles = last_tile + 1
            num_masked = num_tiles - (first_position + 1) // BN

        DTYPE: gl.constexpr = q_ptr.dtype.element_ty
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        q_tiles = gl.allocate_shared_memory(DTYPE, [2, _HALF, D], SHARED)
        k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], SHARED)
        v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], SHARED)
        PANELS: gl.constexpr = STAGES * (D // _PANEL)
        k_boxes = view(k_tiles, DTYPE, [PANELS * (BN // S), S, _PANEL], SHARED)
        v_boxes = view(v_tiles, DTYPE, [PANELS * (BN // S), S, _PANEL], SHARED)
        v_atoms = view(v_tiles, DTYPE, [PANELS * (BN // _ATOM), _ATOM, _PANEL], SHARED)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(v_tail, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)

        LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
        cols = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
        for part in gl.static_range(2):
            rows = first_row + part * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LOAD))
            queries = rows // G
            at = (start + queries).to(gl.int64) * stride_qt + (kv_head * G + rows % G) * D
            inside = (queries < num_queries)[:, None]
            q = gl.load(q_ptr + at[:, None] + cols[None, :], mask=inside, other=0.0)
            q_tiles.index(part).store(q)
        fence_async_shared()

        gl.warp_specialize(
            [
                (_attend, (
                    q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, out_ptr, sinks_ptr,
                    start, num_queries, num_before, first_row, kv_head, last_tile, num_tiles,
                    num_masked, scale_log2, v_scale, window,
                    0, K, G, D, STAGES, HAS_WINDOW, HAS_SINKS,
                )),
                (_attend, (
                    q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, out_ptr, sinks_ptr,
                    start, num_queries, num_before, first_row, kv_head, last_tile, num_tiles,
                    num_masked, scale_log2, v_scale, window,
                    1, K, G, D, STAGES, HAS_WINDOW, HAS_SINKS,
                )),
                (_load, (
                    k_desc, v_desc, k_boxes, v_boxes, v_atoms, k_full, v_full, v_tail, k_empty,
                    v_empty, table_ptr, last_tile, num_tiles, kv_len, first_key // S, kv_head * S,
                    rows_per_block, S, D, BN, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    elif entry == end_entry - 1:
        _clear_padding(out_ptr, start, num_tokens, tile * _ROWS, kv_head, K, G, D)


def describe(cache_BKSD: Tensor) -> TensorDescriptor:
    """The cache as rows of one head each; copied at once are the rows of a block of one kv head."""
    num_blocks, num_kv_heads, block_size, head_size = cache_BKSD.shape
    rows_per_block = cache_BKSD.stride(0) // head_size
    num_rows = (num_blocks - 1) * rows_per_block + num_kv_heads * block_size
    layout = gl.NVMMASharedLayout(128, 16)
    return descriptor(cache_BKSD, (num_rows, head_size), (block_size, _PANEL.value), layout)


def fits(q_THD: Tensor, k_cache_BKSD: Tensor) -> bool:
    """Whether the kernel can attend to these, on a Hopper GPU."""
    _, _, block_size, head_size = k_cache_BKSD.shape
    return (
        q_THD.dtype in DTYPES
        and k_cache_BKSD.dtype == q_THD.dtype
        and head_size == HEAD_SIZE
        and block_size in BLOCK_SIZES
        and k_cache_BKSD.stride(0) % head_size == 0
        and k_cache_BKSD.data_ptr() % 16 == 0
    )


def prefill(
    q_THD: Tensor,
    k_cache_BKSD: Tensor,
    v_cache_BKSD: Tensor,
    rows_N: Tensor,
    query_starts_N1: Tensor,
    kv_lens_N: Tensor,
    block_table_RM: Tensor,
    out_THD: Tensor,
    params: AttentionParams,
    first_entry: int,
    sinks_H: Tensor | None = None,
) -> None:
    """As `triton_prefill.prefill`, of what `fits`."""
    _, num_heads, head_size = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_BKSD.shape
    group = num_heads // num_kv_heads
    num_entries = len(rows_N)
    slots = num_slots(len(q_THD) - first_entry, num_entries - first_entry, group, _ROWS.value)
    # H200: 1x8192 0.85 ms, with 64 keys in 3 stages 0.92; 8x1024 0.20 with either.
    _prefill[slots, num_kv_heads](
        q_THD, describe(k_cache_BKSD), describe(v_cache_BKSD), out_THD, rows_N, query_starts_N1,
        kv_lens_N, block_table_RM, kv_lens_N if sinks_H is None else sinks_H,
        first_entry, num_entries, len(q_THD), params.scale * LOG2_E, params.v_scale,
        params.window or 0, q_THD.stride(0), block_table_RM.stride(0),
        k_cache_BKSD.stride(0) // head_size,
        K=num_kv_heads, G=group, D=head_size, S=block_size, BN=128, STAGES=2,
        HAS_WINDOW=params.window is not None, HAS_SINKS=sinks_H is not None,
        num_warps=4, maxnreg=168, **launch_options(q_THD),
    )  # fmt: skip
