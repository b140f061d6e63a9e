"""Arguments for every op, and paged attention batches; op tests and GPU checks share them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.batch import ForwardBatch
from penstock.kernels.gather import decode_inputs
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.op import Op
from penstock.kernels.rope import rope_kv_write


@dataclass(frozen=True)
class OpCase:
    """`make` gives fresh arguments; `mutated` are the positions of those the op writes to."""

    op: Op[..., Any]
    name: str
    make: Callable[[torch.dtype, torch.device], tuple[Any, ...]]
    mutated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op.__name__}-{self.name}"


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(device, dtype)


def angles(num_positions: int, rotary: int, device: torch.device) -> Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(num_positions)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _norm(num_tokens: int, size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x, w = (randn(*s, dtype=dtype, device=device) for s in ((num_tokens, size), (size,)))
        return x, w, 1e-5

    return OpCase(rms_norm, f"{num_tokens}x{size}", make)


def _head_norm(num_tokens: int, heads: int, size: int) -> OpCase:
    """The query heads of a fused qkv projection: rows with gaps between them."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        qkv = randn(num_tokens, (heads + 4) * size, dtype=dtype, device=device)
        q = qkv[:, : heads * size].view(num_tokens, heads, size)
        return q, randn(size, dtype=dtype, device=device), 1e-6

    return OpCase(rms_norm, f"heads-{num_tokens}x{heads}x{size}", make)


def _add_norm(num_tokens: int, size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        shapes = ((num_tokens, size), (num_tokens, size), (size,))
        return (*(randn(*s, dtype=dtype, device=device) for s in shapes), 1e-5)

    return OpCase(add_rms_norm, f"{num_tokens}x{size}", make)


def _silu(num_tokens: int, size: int) -> OpCase:
    return OpCase(
        silu_mul,
        f"{num_tokens}x{size}",
        lambda dtype, device: (randn(num_tokens, 2 * size, dtype=dtype, device=device),),
    )


def _cache(
    kv_heads: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (9, kv_heads, block_size, size)
    k, v = (randn(*shape, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return k, v


def _rope_kv_write(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    *,
    block_size: int = 16,
    norm: bool = False,
    fp8: bool = False,
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        qkv = randn(num_tokens, heads + 2 * kv_heads, size, dtype=dtype, device=device)
        weights = [randn(size, dtype=dtype, device=device) if norm else None for _ in range(2)]
        positions = torch.randint(0, 64, (num_tokens,)).to(device)
        slots = torch.randperm(9 * block_size)[:num_tokens].to(device)
        cache_dtype = torch.float8_e4m3fn if fp8 else dtype
        caches = _cache(kv_heads, block_size, size, cache_dtype, device)
        scales = (0.5, 0.004) if fp8 else (1.0, 1.0)  # the second one saturates
        table = angles(64, rotary, device)
        return qkv, *weights, 1e-6, table, positions, *caches, slots, *scales

    name = f"{num_tokens}x{heads}x{kv_heads}x{size}-rot{rotary}" + "-norm" * norm + "-fp8" * fp8
    return OpCase(rope_kv_write, name, make, mutated=(6, 7))


def _decode_inputs(num_entries: int, num_rows: int, block_size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        rows = torch.randperm(num_rows)[:num_entries].int()
        lengths = torch.randint(0, 4 * block_size, (num_rows,)).int()
        table = torch.randperm(4 * num_rows).view(num_rows, 4).int()
        rows[-1], lengths[-1], table[-1] = num_rows - 1, 0, 0  # the padding row
        tokens = torch.randint(0, 1000, (num_rows,))
        return *(x.to(device) for x in (rows, tokens, lengths, table)), block_size

    return OpCase(decode_inputs, f"{num_entries}of{num_rows}-s{block_size}", make)


OP_CASES = [
    _norm(1, 64),
    _norm(3, 896),
    _norm(5, 100),
    _head_norm(4, 6, 64),
    _head_norm(17, 5, 80),
    _add_norm(1, 64),
    _add_norm(7, 1000),
    _silu(1, 64),
    _silu(5, 1500),
    _rope_kv_write(1, 8, 2, 64, 64),
    _rope_kv_write(5, 9, 3, 128, 128, block_size=32),
    _rope_kv_write(6, 5, 1, 96, 48),
    _rope_kv_write(5, 4, 4, 80, 32, norm=True),
    _rope_kv_write(13, 12, 3, 64, 64, norm=True),
    _rope_kv_write(3, 2, 1, 256, 256),
    _rope_kv_write(7, 8, 2, 64, 64, fp8=True),
    _decode_inputs(1, 4, 16),
    _decode_inputs(6, 9, 32),
    _decode_inputs(150, 160, 64),
]


@dataclass(frozen=True)
class AttentionCase:
    """Entries are (query length, kv length); the first `num_decodes` are decodes."""

    entries: tuple[tuple[int, int], ...]
    num_decodes: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    fp8: bool = False  # the cache

    def __str__(self) -> str:
        kind = {0: "prefill", len(self.entries): "decode"}.get(self.num_decodes, "mixed")
        lens = "_".join(f"{q}.{kv}" for q, kv in self.entries[:4])
        more = f"+{len(self.entries) - 4}" if len(self.entries) > 4 else ""
        heads = f"h{self.num_heads}k{self.num_kv_heads}d{self.head_size}s{self.block_size}"
        return f"{kind}-{lens}{more}-{heads}-w{self.window}" + "-fp8" * self.fp8


@dataclass
class AttentionArgs:
    q_THD: Tensor
    k_cache_BKSD: Tensor
    v_cache_BKSD: Tensor
    batch: ForwardBatch
    params: AttentionParams

    def unpack(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make_attention(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> AttentionArgs:
    """A batch of random queries over random cache contents, blocks scattered over the pool."""
    torch.manual_seed(sum(q * 31 + kv for q, kv in case.entries) + case.head_size)
    size, num_entries = case.block_size, len(case.entries)
    num_blocks = [-(-kv // size) for _, kv in case.entries]
    num_rows, width = num_entries + 2, max(num_blocks) + 1
    rows = torch.randperm(num_rows)[:num_entries].int()
    block_ids = (torch.randperm(sum(num_blocks)) + 1).int().split(num_blocks)
    table = torch.zeros(num_rows, width, dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, ids, (num_queries, kv_len) in zip(rows.tolist(), block_ids, case.entries, strict=True):
        table[row, : len(ids)] = ids
        position = torch.arange(kv_len - num_queries, kv_len)
        slots.append(ids[position // size].long() * size + position % size)
        positions.append(position)
        starts.append(starts[-1] + num_queries)
    pool = (sum(num_blocks) + 1, case.num_kv_heads, size, case.head_size)
    q = randn(starts[-1], case.num_heads, case.head_size, dtype=dtype, device=device)
    batch = ForwardBatch(
        input_ids_T=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        positions_T=torch.cat(positions).to(device),
        slots_T=torch.cat(slots).to(device),
        rows_N=rows.to(device),
        query_starts_N1=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens_N=torch.tensor([kv for _, kv in case.entries], dtype=torch.int32, device=device),
        block_table_RM=table.to(device),
        num_decodes=case.num_decodes,
        max_query_len=max(q for q, _ in case.entries),
        max_kv_len=max(kv for _, kv in case.entries) + 3,
    )
    cache_dtype = torch.float8_e4m3fn if case.fp8 else dtype
    k_cache, v_cache = (randn(*pool, dtype=cache_dtype, device=device) for _ in range(2))
    v_scale = 0.75 if case.fp8 else 1.0
    params = AttentionParams(case.head_size**-0.5, case.window, v_scale)
    return AttentionArgs(q, k_cache, v_cache, batch, params)


def decodes(*kv_lens: int, **shape: Any) -> AttentionCase:
    return AttentionCase(tuple((1, kv) for kv in kv_lens), len(kv_lens), **shape)


def prefills(*entries: tuple[int, int], **shape: Any) -> AttentionCase:
    return AttentionCase(entries, 0, **shape)


def small_attention_cases() -> Iterator[AttentionCase]:
    """Few and short: the interpreter runs them in seconds."""
    yield decodes(1)
    for block_size in (16, 32, 64):  # around the edges of a block
        edges = [k * block_size + d for k in (1, 2) for d in (-1, 0, 1)]
        yield decodes(*edges, block_size=block_size)
        yield prefills(*((kv, kv) for kv in edges[:3]), block_size=block_size)
    for group in (1, 3, 8):
        yield decodes(20, 300, num_heads=2 * group, num_kv_heads=2)
        yield prefills((20, 37), (9, 9), num_heads=2 * group, num_kv_heads=2)
    yield decodes(5, 200, num_heads=20, num_kv_heads=1)  # more query heads than one tile of 16
    for head_size in (80, 96, 128, 256):
        yield decodes(33, 130, head_size=head_size)
        yield prefills((40, 40), (3, 70), head_size=head_size)
    yield decodes(5, 16, 100, 300, window=16)
    yield decodes(90, 190, window=70, block_size=32)
    yield prefills((40, 40), (30, 150), (1, 90), window=16)
    yield prefills((70, 70), (7, 200), window=50, block_size=32)
    yield decodes(*range(1, 65), num_heads=2, num_kv_heads=1)
    yield AttentionCase(((1, 17), (1, 64), (33, 33), (5, 133), (1, 4)), 2)
    yield AttentionCase(((1, 200), (64, 128)), 1, num_heads=4, num_kv_heads=1, window=33)
    yield AttentionCase(((1, 170), (1, 20), (40, 90)), 2, fp8=True)


def gpu_attention_cases() -> Iterator[AttentionCase]:
    """Head sizes x group sizes, block sizes in turn; block edges, batches, prefixes, windows."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, group) for size in (64, 128, 256) for group in (1, 2, 4, 8)]
    for i, (head_size, group) in enumerate([*shapes, (80, 1), (96, 3), (128, 5), (64, 16)]):
        block_size = (16, 32, 64)[i % 3]
        shape = dict(
            num_heads=2 * group, num_kv_heads=2, head_size=head_size, block_size=block_size
        )
        edges = [k * block_size + d for k in (1, 2, 7) for d in (-1, 0, 1)]
        yield decodes(1, **shape)
        yield decodes(*edges, 700, 5000, **shape)
        for batch in (2, 16, 64):
            kv_lens = torch.randint(1, 900, (batch,), generator=generator).tolist()
            yield decodes(*kv_lens, **shape)
        yield prefills(*((kv, kv) for kv in edges), **shape)
        yield prefills((300, 300), (100, 900), (1, 77), (64, 64), (500, 501), **shape)
        yield AttentionCase(((1, 33), (1, 1000), (1, 64), (70, 70), (130, 400)), 3, **shape)
        if i % 3 == 0:
            yield AttentionCase(((1, 33), (1, 1000), (70, 70), (130, 400)), 2, **shape, fp8=True)
        if i % 2 == 0:
            windowed = {**shape, "window": (16, 100, 128)[i % 3]}
            yield decodes(*edges, 700, 3000, **windowed)
            yield prefills((300, 300), (100, 900), (1, 77), (7, 7), **windowed)
    kv_lens = torch.randint(1, 300, (256,), generator=generator).tolist()
    yield decodes(*kv_lens, num_heads=32, num_kv_heads=8, head_size=128, block_size=32)
