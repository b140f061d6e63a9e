"""Arguments for every op, and paged attention batches; op tests and GPU checks share them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.batch import ForwardBatch
from penstock.kernels.fp8 import fp8_linear, quantize_fp8, rms_norm_fp8, silu_mul_fp8
from penstock.kernels.gather import decode_inputs
from penstock.kernels.gemm.codes import (
    FORMS,
    Codes,
    Form,
    PackedWeight,
    pack,
    packed_linear,
    packed_rows,
)
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.gemm.few import gated_linear
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.op import Op
from penstock.kernels.rope import rope_kv_write

FP8 = torch.float8_e4m3fn


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


def _linear(num_tokens: int, outputs: int, inputs: int, *, bias: bool = False) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, inputs, dtype=dtype, device=device)
        weight = randn(outputs, inputs, dtype=dtype, device=device) * inputs**-0.5
        return x, weight, randn(outputs, dtype=dtype, device=device) if bias else None

    return OpCase(dense_linear, f"{num_tokens}x{outputs}x{inputs}" + "-bias" * bias, make)


def _gated(
    num_tokens: int, features: int, inputs: int, *, bias: bool = False, fp8: str = ""
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, inputs, dtype=dtype, device=device)
        weight = randn(2 * features, inputs, dtype=dtype, device=device) * inputs**-0.5
        b = randn(2 * features, dtype=dtype, device=device) if bias else None
        if not fp8:
            return x, None, weight, None, b, dtype, None
        values, scale = quantize_fp8.reference(x, None, 0)
        weight_scale = torch.rand(2 * features, device=device) * 0.01 + 0.001
        weight = (weight.float() / weight_scale[:, None]).clamp(-448, 448).to(FP8)
        out_scale = torch.full((1,), 0.02, device=device) if fp8 == "out" else None
        return values, scale, weight, weight_scale, b, dtype, out_scale

    name = f"{num_tokens}x{features}x{inputs}" + "-bias" * bias + f"-fp8{fp8}" * bool(fp8)
    return OpCase(gated_linear, name, make)


def _decode_inputs(num_entries: int, num_rows: int, block_size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        rows = torch.randperm(num_rows)[:num_entries].int()
        lengths = torch.randint(0, 4 * block_size, (num_rows,)).int()
        table = torch.randperm(4 * num_rows).view(num_rows, 4).int()
        rows[-1], lengths[-1], table[-1] = num_rows - 1, 0, 0  # the padding row
        tokens = torch.randint(0, 1000, (num_rows,))
        return *(x.to(device) for x in (rows, tokens, lengths, table)), block_size

    return OpCase(decode_inputs, f"{num_entries}of{num_rows}-s{block_size}", make)


_SCALINGS = ("whole", "rows", "groups")


def _static(scaling: str, value: float, device: torch.device) -> tuple[Tensor | None, int]:
    """(scale, group) of a way to quantise: "whole", "rows" or "groups"."""
    scale = torch.tensor([value], device=device) if scaling == "whole" else None
    return scale, 128 if scaling == "groups" else 0


def _quantize(num_tokens: int, size: int, scaling: str) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, size + 16, dtype=dtype, device=device)[:, :size]
        x[0, : min(size, 128)] = 0.0
        return x, *_static(scaling, 0.005, device)  # a few values are too large

    return OpCase(quantize_fp8, f"{num_tokens}x{size}-{scaling}", make)


def _norm_fp8(num_tokens: int, size: int, scaling: str, *, residual: bool = True) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        shapes = ((num_tokens, size), (num_tokens, size), (size,))
        x, other, weight = (randn(*shape, dtype=dtype, device=device) for shape in shapes)
        return x, other if residual else None, weight, 1e-5, *_static(scaling, 0.02, device)

    name = f"{num_tokens}x{size}-{scaling}" + "-alone" * (not residual)
    return OpCase(rms_norm_fp8, name, make)


def _silu_fp8(num_tokens: int, size: int, scaling: str) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)
        return x, *_static(scaling, 0.02, device)

    return OpCase(silu_mul_fp8, f"{num_tokens}x{size}-{scaling}", make)


def _fp8_linear(
    num_tokens: int, inputs: int, outputs: int, scaling: str, weights: str, *, bias: bool = False
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, inputs, dtype=dtype, device=device)
        values, scale = quantize_fp8.reference(x, *_static(scaling, 0.02, device))
        weight = (30 * torch.randn(outputs, inputs)).to(torch.float8_e4m3fn).to(device)
        shape = {
            "whole": (1,),
            "outputs": (outputs,),
            "blocks": (-(-outputs // 128), -(-inputs // 128)),
        }[weights]
        weight_scale = (torch.rand(shape) + 0.5).to(device) / (30 * inputs**0.5)
        bias_O = randn(outputs, dtype=dtype, device=device) if bias else None
        return values, scale, weight, weight_scale, bias_O, dtype

    name = f"{num_tokens}x{inputs}x{outputs}-{scaling}-{weights}" + "-bias" * bias
    return OpCase(fp8_linear, name, make)


def random_weight(form: Form, num_outputs: int, num_inputs: int) -> PackedWeight:
    """Of exactly this form, its values of a weight's size."""
    low, high = (0, 16) if form.bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (num_outputs, num_inputs), dtype=torch.int8)
    shape = (num_outputs, num_inputs // form.group)
    scales, minima = torch.rand(shape) / high**1.5, torch.rand(shape) * (-0.3 if low == 0 else 0.1)
    weight = pack([Codes(codes, *(x.to(form.meta).float() for x in (scales, minima)))])
    assert weight is not None and weight.form == form
    return weight


def _packed_linear(
    form: Form, num_tokens: int, num_outputs: int, num_inputs: int, bias: bool = False
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * num_inputs, dtype=dtype, device=device)[:, :num_inputs]
        b = randn(num_outputs, dtype=dtype, device=device) if bias else None
        return x / num_inputs**0.5, random_weight(form, num_outputs, num_inputs), b

    kind = f"{form.bits}-{form.meta}".replace("torch.", "")
    return OpCase(packed_linear, f"{kind}-{num_tokens}x{num_inputs}x{num_outputs}", make)


def _packed_rows(form: Form, num_tokens: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return torch.randint(0, 70, (num_tokens,)), random_weight(form, 70, 96)

    kind = f"{form.bits}-{form.meta}".replace("torch.", "")
    return OpCase(packed_rows, f"{kind}-{num_tokens}", make)


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
    *(_quantize(*shape, way) for shape in ((1, 128), (5, 1408)) for way in _SCALINGS),
    _quantize(3, 5000, "rows"),
    _quantize(2, 1000, "whole"),
    *(_norm_fp8(*shape, way) for shape in ((1, 128), (3, 896)) for way in _SCALINGS),
    _norm_fp8(4, 1000, "rows", residual=False),
    _norm_fp8(4, 1000, "whole", residual=False),
    *(_silu_fp8(*shape, way) for shape in ((1, 128), (5, 1408)) for way in _SCALINGS),
    _silu_fp8(3, 4500, "rows"),
    _fp8_linear(1, 256, 64, "whole", "whole"),
    _fp8_linear(33, 128, 176, "whole", "whole", bias=True),
    _fp8_linear(5, 256, 80, "whole", "outputs"),
    _fp8_linear(7, 384, 144, "rows", "outputs", bias=True),
    _fp8_linear(2, 256, 128, "rows", "whole"),
    _fp8_linear(3, 200, 72, "rows", "outputs"),
    _fp8_linear(150, 256, 320, "rows", "outputs"),
    _fp8_linear(1, 128, 128, "groups", "blocks"),
    _fp8_linear(6, 384, 320, "groups", "blocks", bias=True),
    _fp8_linear(40, 512, 256, "groups", "blocks"),
    _linear(1, 70, 300),
    _linear(1, 33, 5000, bias=True),
    _linear(3, 64, 256, bias=True),
    _linear(4, 100, 2100),
    _gated(1, 35, 300),
    _gated(3, 33, 2500, bias=True),
    _gated(1, 24, 512, fp8="in"),
    _gated(4, 25, 4500, fp8="out", bias=True),
    _decode_inputs(1, 4, 16),
    _decode_inputs(6, 9, 32),
    _decode_inputs(150, 160, 64),
]
# Of ops that only a CPU has.
CPU_OP_CASES = [
    *(_packed_linear(form, rows, 100, 320) for form in FORMS for rows in (1, 2, 3, 8, 37)),
    _packed_linear(FORMS[0], 1, 7, 32, bias=True),
    _packed_linear(FORMS[0], 20, 48, 544, bias=True),
    *(_packed_rows(form, 9) for form in FORMS),
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
