"""Arguments for every op, and paged attention batches; op tests and GPU checks share them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.activation import gelu_mul, sigmoid_mul, silu_mul
from penstock.kernels.all_reduce import sum_add_rms_norm, sum_parts
from penstock.kernels.attention.backend import AttentionParams, CacheScales
from penstock.kernels.attention.mla import mla_attend, mla_decode, mla_project, mla_write
from penstock.kernels.attention.partial import partial_decode
from penstock.kernels.formats import Fp8Groups, Fp8Rows, Fp8Static, InputFormat
from penstock.kernels.forward_batch import ForwardBatch, Runs
from penstock.kernels.gather import decode_inputs
from penstock.kernels.gemm.block_scaled import ScaledWeight, scaled_linear
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.gemm.gated import gated_linear
from penstock.kernels.gemm.int8 import int8_linear
from penstock.kernels.gemm.quantized_cpu import (
    FORMS,
    CpuPackedWeight,
    Form,
    pack_cpu,
    packed_linear,
    packed_rows,
)
from penstock.kernels.gemm.w4a8 import pack_w4a8, w4a8_linear
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight, pack_gpu, stack_packed
from penstock.kernels.lora import lora, lora_groups
from penstock.kernels.moe import (
    SILU,
    ExpertWeights,
    Gate,
    Routing,
    add_shared,
    experts,
    gated,
    pack_mxfp4,
    plain_weights,
    route,
    router_logits,
)
from penstock.kernels.moe.block_scaled import scaled_experts
from penstock.kernels.moe.wna16 import weight_only_experts
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.op import Op
from penstock.kernels.quantize import quantize_fp8, rms_norm_fp8, silu_mul_fp8
from penstock.kernels.quantize.block_scaled import quantize_mxfp8, quantize_nvfp4
from penstock.kernels.quantize.reference import quantize_int8
from penstock.kernels.quantized_weight import Kind, QuantizedWeight
from penstock.kernels.recurrent import (
    causal_conv,
    delta_gates,
    gated_delta,
    keep_conv,
    keep_delta,
    rms_norm_gated,
)
from penstock.kernels.rope import rope_kv_write
from penstock.kernels.sampling import apply_bitmask

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class OpCase:
    """`make` gives fresh arguments; `mutated` are the positions of those the op writes to.

    `rounds_inside`: fp32 results may be sums of numbers that were rounded to the dtype.
    `quantizes_inside`: results are sums of numbers that became 8-bit floats on the way, where those
    in the middle between two fall to either side.
    """

    op: Op[..., Any]
    name: str
    make: Callable[[torch.dtype, torch.device], tuple[Any, ...]]
    mutated: tuple[int, ...] = ()
    rounds_inside: bool = False
    quantizes_inside: bool = False

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


def _bitmask(num_rows: int, vocab_size: int, *positions: int) -> OpCase:
    """The last word has bits of tokens that there are not."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        words = torch.randint(-(2**31), 2**31, (len(positions), -(-vocab_size // 32)))
        rows = torch.tensor(positions, dtype=torch.int32, device=device)
        logits = randn(num_rows, vocab_size, dtype=dtype, device=device)
        return logits, rows, words.int().to(device)

    return OpCase(apply_bitmask, f"{num_rows}x{vocab_size}", make, mutated=(0,))


def _lora(
    slots: tuple[int, ...],
    in_size: int,
    part_sizes: tuple[int, ...],
    ranks: tuple[tuple[int, ...], ...],
    size: int = 16,
    num_single: int | None = None,
) -> OpCase:
    """`ranks`: of each slot, for each part. Rows behind them are NaN: nobody may read them."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        both = randn(len(slots), in_size + 8, dtype=dtype, device=device)
        y = randn(len(slots), sum(part_sizes), dtype=dtype, device=device)
        a = torch.full((len(ranks), len(part_sizes), size, in_size), math.nan)
        b = torch.full((len(ranks), size, sum(part_sizes)), math.nan)
        for slot, own in enumerate(ranks):
            for part, rank in enumerate(own):
                begin = sum(part_sizes[:part])
                a[slot, part, :rank] = torch.randn(rank, in_size) * in_size**-0.5
                b[slot, :rank, begin : begin + part_sizes[part]] = (
                    torch.randn(rank, part_sizes[part]) * 0.4
                )
        ints = (torch.tensor(one, dtype=torch.int32, device=device) for one in (ranks, slots))
        num = len(slots) if num_single is None else num_single
        a, b = a.to(device, dtype), b.to(device, dtype)
        groups = lora_groups.reference(torch.tensor(slots[:num], dtype=torch.int32), 4)
        given = groups.to(device) if num else None
        return both[:, :in_size], y, a, b, *ints, part_sizes, given

    name = f"{len(slots)}x{in_size}x{'+'.join(map(str, part_sizes))}-r{size}-{num_single}"
    return OpCase(lora, name, make, mutated=(1,))


def _lora_groups(size: int, *slots: int) -> OpCase:
    return OpCase(
        lora_groups,
        f"{len(slots)}-{size}",
        lambda dtype, device: (torch.tensor(slots, dtype=torch.int32, device=device), size),
    )


def _head_norm(num_tokens: int, heads: int, size: int) -> OpCase:
    """The query heads of a fused qkv projection: rows with gaps between them."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        qkv = randn(num_tokens, (heads + 4) * size, dtype=dtype, device=device)
        q = qkv[:, : heads * size].view(num_tokens, heads, size)
        return q, randn(size, dtype=dtype, device=device), 1e-6

    return OpCase(rms_norm, f"heads-{num_tokens}x{heads}x{size}", make)


def _add_norm(num_tokens: int, size: int, *, exact: bool = False) -> OpCase:
    """`exact`: the weight is fp32, whatever the rest is."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x, other = (randn(num_tokens, size, dtype=dtype, device=device) for _ in range(2))
        weight = randn(size, dtype=torch.float32 if exact else dtype, device=device)
        return x, other, weight, 1e-5

    return OpCase(add_rms_norm, f"{num_tokens}x{size}" + "-exact" * exact, make)


def _sum_parts(num_ranks: int, num_tokens: int, size: int, *, norm: bool) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        parts = randn(num_ranks, num_tokens, size, dtype=dtype, device=device)
        if not norm:
            return (parts,)
        residual = randn(num_tokens, size, dtype=dtype, device=device)
        return parts, residual, randn(size, dtype=dtype, device=device), 1e-5

    op: Op[..., Any] = sum_add_rms_norm if norm else sum_parts
    return OpCase(op, f"{num_ranks}x{num_tokens}x{size}", make)


def _activation(op: Op[..., Any], num_tokens: int, size: int) -> OpCase:
    return OpCase(
        op,
        f"{num_tokens}x{size}",
        lambda dtype, device: (randn(num_tokens, 2 * size, dtype=dtype, device=device),),
    )


def sigmoid_case(num_tokens: int, heads: int, size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, heads, size, dtype=dtype, device=device)
        both = randn(num_tokens, 2 * heads + 3, size, dtype=dtype, device=device)
        return x, both[:, 1 : 2 * heads : 2]

    return OpCase(sigmoid_mul, f"{num_tokens}x{heads}x{size}", make)


def _cache(
    kv_heads: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (9, kv_heads, block_size, size)
    k, v = (randn(*shape, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return k, v


def rope_case(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    *,
    block_size: int = 16,
    norm: bool = False,
    fp8: bool = False,
    int8: bool = False,
    nvfp4: bool = False,
    gates: bool = False,
) -> OpCase:
    """With `gates` the weights of the norms are fp32, as of norms that add one."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        num_all = heads * (1 + gates) + 2 * kv_heads
        qkv = randn(num_tokens, num_all, size, dtype=dtype, device=device)
        weight_dtype = torch.float32 if gates else dtype
        weights = [
            randn(size, dtype=weight_dtype, device=device) if norm else None for _ in range(2)
        ]
        positions = torch.randint(0, 64, (num_tokens,)).to(device)
        slots = torch.randperm(9 * block_size)[:num_tokens].to(device)
        cache_dtype = torch.float8_e4m3fn if fp8 else torch.int8 if int8 else dtype
        cache_dtype = torch.uint8 if nvfp4 else cache_dtype
        caches = _cache(kv_heads, block_size, size // 2 if nvfp4 else size, cache_dtype, device)
        scales = (0.5, 0.004) if fp8 else (1.0, 1.0)  # the second one saturates
        scales = (0.125, 0.0005) if nvfp4 else scales  # so it does here
        table = angles(64, rotary, device)
        found = [torch.zeros(9, kv_heads, block_size, device=device) for _ in "kv" * int8]
        if nvfp4:
            found = list(_cache(kv_heads, block_size, size // 16, FP8, device))
        return qkv, *weights, 1e-6, table, positions, *caches, slots, *scales, gates, *found

    name = f"{num_tokens}x{heads}x{kv_heads}x{size}-rot{rotary}"
    name += "-norm" * norm + "-fp8" * fp8 + "-int8" * int8 + "-nvfp4" * nvfp4 + "-gates" * gates
    mutated = (6, 7, 12, 13) if int8 or nvfp4 else (6, 7)
    return OpCase(rope_kv_write, name, make, mutated=mutated, quantizes_inside=int8 or nvfp4)


def mla_write_case(
    num_tokens: int,
    heads: int,
    latent: int,
    rotary: int,
    *,
    interleaved: bool = True,
    fp8: bool = False,
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        q = randn(num_tokens, heads, 24 + rotary, dtype=dtype, device=device)[:, :, 24:]
        kv = randn(num_tokens, 40 + latent + rotary, dtype=dtype, device=device)[:, 40:]
        weight = randn(latent, dtype=dtype, device=device)
        positions = torch.randint(0, 64, (num_tokens,)).to(device)
        slots = torch.randperm(9 * 16)[:num_tokens].to(device)
        cache = randn(9, 16, latent + rotary, dtype=FP8 if fp8 else dtype, device=device)
        table = angles(64, rotary, device)
        return q, kv, weight, 1e-6, table, positions, cache, slots, interleaved

    name = f"{num_tokens}x{heads}x{latent}+{rotary}" + "-halves" * (not interleaved) + "-fp8" * fp8
    return OpCase(mla_write, name, make, mutated=(6,))


def mla_decode_case(
    *kv_lens: int,
    heads: int,
    latent: int,
    rotary: int,
    block_size: int = 16,
    fp8: bool = False,
    lse: bool = False,
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        case = decodes(*kv_lens, block_size=block_size)
        batch = make_attention(case, torch.float32, device).batch
        num_blocks = int(batch.block_table_RM.max()) + 1
        shape = (num_blocks, block_size, latent + rotary)
        cache = randn(*shape, dtype=FP8 if fp8 else dtype, device=device)
        q = randn(heads, len(kv_lens), latent, dtype=dtype, device=device).transpose(0, 1)
        q_rotated = randn(len(kv_lens), heads, rotary, dtype=dtype, device=device)
        scale = (latent + rotary) ** -0.5
        lens = (batch.rows_N, batch.kv_lens_N, batch.block_table_RM)
        found = torch.zeros(len(kv_lens), heads, device=device)
        return q, q_rotated, cache, *lens, scale, batch.max_kv_len, *([found] if lse else [])

    lens = "_".join(map(str, kv_lens[:4])) + f"+{len(kv_lens) - 4}" * (len(kv_lens) > 4)
    name = f"{lens}-{heads}x{latent}+{rotary}" + "-fp8" * fp8 + "-lse" * lse
    return OpCase(mla_decode, name, make, mutated=(8,) if lse else ())


def partial_decode_case(*kv_lens: int, **shape: Any) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        if device.type == "cpu" and dtype == torch.bfloat16:
            dtype = torch.float16  # Triton's interpreter multiplies the other as integers
        inputs = make_attention(decodes(*kv_lens, **shape), dtype, device)
        batch, scales = inputs.batch, inputs.scales or (None, None)
        lens = (batch.rows_N, batch.kv_lens_N, batch.block_table_RM)
        caches = inputs.k_cache_BKSD, inputs.v_cache_BKSD
        return inputs.q_THD, *caches, *lens, inputs.params, batch.max_kv_len, *scales

    name = "_".join(map(str, kv_lens)) + "".join(f"-{key}{value}" for key, value in shape.items())
    return OpCase(partial_decode, name, make)


def mla_project_case(
    num_tokens: int, heads: int, inputs: int, outputs: int, *, sees: int, transposed: bool = False
) -> OpCase:
    """`sees`: how many of the tokens, the last ones, see something."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, heads, inputs + 24, dtype=dtype, device=device)[:, :, :inputs]
        shape = (heads, inputs, outputs) if transposed else (heads, outputs, inputs)
        weight = inputs**-0.5 * randn(*shape, dtype=dtype, device=device)
        kv_lens = (torch.arange(num_tokens) >= num_tokens - sees).int().to(device)
        out = randn(num_tokens, heads, outputs, dtype=dtype, device=device)
        return x, weight.transpose(1, 2) if transposed else weight, kv_lens, out

    name = f"{sees}of{num_tokens}-{heads}x{inputs}x{outputs}" + "-transposed" * transposed
    return OpCase(mla_project, name, make, mutated=(3,), rounds_inside=True)


def mla_attend_case(
    entries: tuple[tuple[int, int], ...],
    heads: int,
    sizes: tuple[int, int, int],
    *,
    causal: bool = False,
    merges: bool = False,
) -> OpCase:
    """`entries` are (queries, keys); `sizes` unrotated, rotated and of a value."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        size, rotary, value = sizes
        counts = torch.tensor([(0, 0), *entries]).cumsum(0).int().to(device)
        num_tokens, num_keys = counts[-1].tolist()
        q = randn(num_tokens, heads, size + rotary, dtype=dtype, device=device)[:, :, :size]
        q_rotated = randn(num_tokens, heads, rotary, dtype=dtype, device=device)
        kv = randn(num_keys, heads, size + value, dtype=dtype, device=device)
        key = randn(num_keys, 8 + rotary, dtype=dtype, device=device)[:, 8:]
        out = randn(num_tokens, heads, value, dtype=torch.float32, device=device)
        out = out if merges else out.to(dtype)
        lse = randn(num_tokens, heads, dtype=torch.float32, device=device) + 2
        starts, scale = (counts[:, 0].clone(), counts[:, 1].clone()), (size + rotary) ** -0.5
        return q, q_rotated, kv, key, *starts, out, lse, scale, causal, merges

    lens = "_".join(f"{queries}.{keys}" for queries, keys in entries)
    kind = "-causal" * causal + "-merges" * merges
    name = f"{lens}-{heads}x{'+'.join(map(str, sizes))}{kind}"
    return OpCase(mla_attend, name, make, mutated=(6, 7), rounds_inside=True)


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
        # Small products: the interpreter rounds to 16 bits towards zero, here three times in a row.
        weight = randn(2 * features, inputs, dtype=dtype, device=device) * (0.3 * inputs**-0.5)
        b = 0.3 * randn(2 * features, dtype=dtype, device=device) if bias else None
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
    """(scale, group) of a way to quantize: "whole", "rows" or "groups"."""
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


def _entries(
    lens: tuple[int, ...], num_decodes: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(slots, has_state, query_starts, num_decodes): every third entry begins a sequence."""
    slots = (torch.randperm(len(lens) + 2)[: len(lens)]).int()
    has_state = torch.arange(len(lens)) % 3 != 1
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    return slots.to(device), has_state.to(device), starts.to(device), num_decodes


def _pool(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    slots: Tensor,
    has_state: Tensor,
) -> Tensor:
    """States of earlier steps; NaN where a sequence begins, and its slot's last owner ended so."""
    pool = randn(len(slots) + 2, *shape, dtype=dtype, device=slots.device)
    pool[slots[~has_state].long()] = torch.nan
    return pool


def conv_case(
    lens: tuple[int, ...],
    num_decodes: int,
    channels: int,
    columns: int,
    width: int = 4,
    run: int = 1,
    num_drafted: int = 0,
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(sum(lens), columns, dtype=dtype, device=device)
        where = torch.arange(columns).view(-1, run)[torch.randperm(columns // run)]
        where = where.flatten()[:channels].int().to(device)
        weight = randn(channels, width, dtype=dtype, device=device)
        slots, has_state, *rest = _entries(lens, num_decodes, device)
        state = _pool((width - 1, channels), dtype, slots, has_state)
        if num_drafted:  # such slots stay as they are
            state.nan_to_num_(3.0)
        return x, where, run, weight, state, slots, has_state, *rest, num_drafted

    name = f"{num_decodes}+{num_drafted}of{'_'.join(map(str, lens))}-c{channels}w{width}r{run}"
    return OpCase(causal_conv, name, make, mutated=(4,))


def delta_case(
    lens: tuple[int, ...],
    num_decodes: int,
    heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
    *,
    num_drafted: int = 0,
    decay: float = 0.1,
    repeats: bool = False,
) -> OpCase:
    """`decay` is the mean of -g. `repeats`: all keys are equal and overwrite each other."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        num_tokens, keys, values = sum(lens), heads * key_size, value_heads * value_size
        qkv = randn(num_tokens, 2 * keys + values, dtype=dtype, device=device)
        q, k, v = qkv.split((keys, keys, values), dim=-1)
        qk = (x.unflatten(1, (heads, key_size)) for x in (q, k))
        g = -2 * decay * torch.rand(num_tokens, value_heads).to(device)
        beta = torch.rand(num_tokens, value_heads).to(device)
        if repeats:
            k[:], beta[:] = k[:1].clone(), 1.0
        slots, has_state, *rest = _entries(lens, num_decodes, device)
        state = _pool((value_heads, key_size, value_size), torch.float32, slots, has_state)
        if num_drafted:
            state.nan_to_num_(3.0)
        v = v.unflatten(1, (value_heads, value_size))
        return *qk, v, g, beta, state, slots, has_state, *rest, num_drafted

    shape = f"h{heads}v{value_heads}k{key_size}d{value_size}-g{decay}"
    name = f"{num_decodes}+{num_drafted}of{'_'.join(map(str, lens))}-{shape}" + "-repeats" * repeats
    return OpCase(gated_delta, name, make, mutated=(5,))


def keep_case(
    lens: tuple[int, ...], num_decodes: int, num_drafted: int, run: int = 1, key_size: int = 32
) -> tuple[OpCase, OpCase]:
    """Both ops, of entries of which some tokens count, perhaps more than an empty one has."""
    conv = conv_case(lens, num_decodes, 40 * run, 48 * run, run=run, num_drafted=num_drafted)
    delta = delta_case(lens, num_decodes, 1, 2, key_size, 40, num_drafted=num_drafted)

    def counts(device: torch.device) -> Tensor:
        return torch.tensor([1 + i % max(1, size) for i, size in enumerate(lens)], device=device)

    def make_conv(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x, where, run, _, state, slots, _, starts, *numbers = conv.make(dtype, device)
        return x, where, run, state, slots, starts, counts(device), *numbers

    def make_delta(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        _, k, v, g, beta, state, slots, _, starts, *numbers = delta.make(dtype, device)
        return k, v, g, beta, state, slots, starts, counts(device), *numbers

    return (
        OpCase(keep_conv, conv.name, make_conv, mutated=(3,)),
        OpCase(keep_delta, delta.name, make_delta, mutated=(4,)),
    )


def gates_case(num_tokens: int, heads: int, value_heads: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        width = 2 * value_heads // heads
        ba = 4 * randn(num_tokens, heads * width, dtype=dtype, device=device)
        ba[0, 0] = ba[0, -1] = 50.0  # beyond where softplus is its argument
        rate, bias = (randn(value_heads, dtype=torch.float32, device=device) for _ in range(2))
        return ba.view(num_tokens, heads, width), rate, bias

    return OpCase(delta_gates, f"{num_tokens}x{heads}x{value_heads}", make)


def gated_norm_case(num_tokens: int, heads: int, value_heads: int, size: int) -> OpCase:
    """The gate is the last part of each key head's columns in a fused projection."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, value_heads, size, dtype=dtype, device=device)
        width = value_heads // heads * size
        z = randn(num_tokens, heads, 24 + width, dtype=dtype, device=device)[:, :, 24:]
        return x, z, randn(size, dtype=dtype, device=device), 1e-6

    return OpCase(rms_norm_gated, f"{num_tokens}x{heads}x{value_heads}x{size}", make)


def random_weight(form: Form, out_features: int, in_features: int) -> CpuPackedWeight:
    """Of exactly this form, its values of a weight's size."""
    low, high = (0, 16) if form.bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (out_features, in_features), dtype=torch.int8)
    shape = (out_features, in_features // form.group)
    scales, minima = torch.rand(shape) / high**1.5, torch.rand(shape) * (-0.3 if low == 0 else 0.1)
    scales, minima = (x.to(form.meta).float() for x in (scales, minima))
    weight = pack_cpu([QuantizedWeight("affine", codes, scales, minima_OG=minima)])
    assert weight is not None and weight.form == form
    return weight


def _route(num_tokens: int, num_experts: int, routing: Routing, *, fixed: bool = False) -> OpCase:
    """`fixed`: with a correction, and experts that lie elsewhere than by number."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        logits = 2 * randn(num_tokens, num_experts, dtype=torch.float32, device=device)
        correction = randn(num_experts, dtype=torch.float32, device=device) if fixed else None
        slot_of = torch.randperm(num_experts) if fixed else torch.arange(num_experts)
        load = torch.arange(num_experts + 3, device=device)
        return logits, routing, correction, slot_of.int().to(device), load

    name = f"{num_tokens}x{num_experts}k{routing.num_active}-{routing.score}"
    return OpCase(route, name + f"-g{routing.num_groups}" + "-fixed" * fixed, make, mutated=(4,))


CLAMPED = Gate(alpha=1.702, shift=1.0, limit=1.5)


def _router_logits(
    num_tokens: int, num_experts: int, size: int, *, bias: bool = False, wide: bool = False
) -> OpCase:
    """`wide`: the weight is in fp32."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)[:, :size]
        weight_dtype = torch.float32 if wide else dtype
        weight = (torch.randn(num_experts, size, device=device) * size**-0.5).to(weight_dtype)
        b = randn(num_experts, dtype=torch.float32, device=device) if bias else None
        return x, weight, b

    name = f"{num_tokens}x{num_experts}x{size}" + "-bias" * bias + "-wide" * wide
    return OpCase(router_logits, name, make)


def _add_shared(num_tokens: int, size: int, *, gate: bool) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        y, shared = (randn(num_tokens, size, dtype=dtype, device=device) for _ in range(2))
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)[:, :size]
        return y, shared, x, randn(1, size, dtype=dtype, device=device) if gate else None

    return OpCase(add_shared, f"{num_tokens}x{size}" + "-gate" * gate, make)


EXPERT_FORMATS = ("plain", "fp8 static", "fp8 rows", "fp8 blocks", "mxfp4")


def expert_weights(
    format: str, slots: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> ExpertWeights:
    """Random matrices that keep the size of what passes through."""
    shape, spread = (slots, outputs, inputs), inputs**-0.5
    if format == "mxfp4":
        blocks = torch.randint(256, (slots, outputs, inputs // 2), dtype=torch.uint8, device=device)
        middle = 127 + round(math.log2(spread / 2.93))  # 2.93: mean size of a code
        scales = torch.randint(middle - 1, middle + 2, (slots, outputs, inputs // 32))
        return pack_mxfp4(blocks, scales.to(torch.uint8).to(device))
    if format == "plain":
        return plain_weights(torch.randn(shape, device=device).mul_(spread).to(dtype))
    values = torch.randn(shape, device=device).mul_(64).clamp_(-448, 448).to(FP8)
    in_blocks = (slots, -(-outputs // 128), -(-inputs // 128))
    scales = torch.rand(in_blocks if format == "fp8 blocks" else shape[:2], device=device) + 0.5
    wanted: InputFormat = Fp8Groups(128) if format == "fp8 blocks" else Fp8Rows()
    if format == "fp8 static":
        wanted = Fp8Static(torch.full((1,), 0.02, device=device))
    return ExpertWeights(values, inputs, scales * (spread / 64), wanted)


def experts_case(
    num_tokens: int,
    num_slots: int,
    num_active: int,
    size: int,
    features: int,
    *,
    format: str = "plain",
    bias: bool = False,
    gate: Gate = SILU,
    even: bool = False,
    elsewhere: bool = False,
) -> OpCase:
    """`even`: all slots are as likely; else some have many tokens and some none.
    `elsewhere`: there are experts beside those that have a slot."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)[:, :size]
        odds = torch.rand(num_tokens, num_slots + elsewhere)
        if not even:
            odds **= torch.arange(1, num_slots + elsewhere + 1)
        slots = odds.topk(num_active).indices.int().to(device)
        weights = torch.rand(num_tokens, num_active).to(device)
        gate_up = expert_weights(format, num_slots, 2 * features, size, dtype, device)
        down = expert_weights(format, num_slots, size, features, dtype, device)
        gate_up, down = (replace(one, has_all=not elsewhere) for one in (gate_up, down))
        biases = [
            randn(num_slots, n, dtype=dtype, device=device) * n**-0.5 if bias else None
            for n in (2 * features, size)
        ]
        return x, slots, weights, gate_up, down, *biases, gate

    name = f"{num_tokens}x{num_active}of{num_slots}x{size}x{features}" + "-bias" * bias
    name += "-clamped" * (gate != SILU) + f"-{format}" * (format != "plain")
    name += "-elsewhere" * elsewhere
    return OpCase(experts, name, make, quantizes_inside=format.startswith("fp8"))


def _gated_rows(gate: Gate) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return 2 * randn(5, 140, dtype=dtype, device=device), gate

    return OpCase(gated, "silu" if gate == SILU else "clamped", make)


def _packed_linear(
    form: Form, num_tokens: int, out_features: int, in_features: int, bias: bool = False
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * in_features, dtype=dtype, device=device)[:, :in_features]
        b = randn(out_features, dtype=dtype, device=device) if bias else None
        return x / in_features**0.5, random_weight(form, out_features, in_features), b

    kind = f"{form.bits}-{form.meta}".replace("torch.", "")
    return OpCase(packed_linear, f"{kind}-{num_tokens}x{in_features}x{out_features}", make)


def random_codes(
    kind: Kind, in_features: int, out_features: int, group: int, zeros: bool, outer: bool,
    ordered: bool, device: torch.device,
) -> GpuPackedWeight:  # fmt: skip
    top = 256 if kind in ("int8", "e4m3") else 16
    scales = torch.rand(out_features, in_features // group) + 0.5
    scales *= {"int4": 0.2, "int8": 0.014, "nf4": 1.8, "fp4": 0.35, "e4m3": 0.008}[kind]
    scales = scales.to({"fp4": FP8, "nf4": torch.float32}.get(kind, torch.float16))
    if kind == "fp4":
        scales[0, 0], scales[1, 0], scales[2, 0] = 0.0, 2.0**-9, 7 * 2.0**-9
    codes = torch.randint(top, (out_features, in_features), dtype=torch.uint8)
    if kind == "e4m3":
        codes[codes & 127 == 127] = 0  # no numbers
    weight = QuantizedWeight(
        kind,
        codes.to(device),
        scales.to(device),
        torch.randint(top + 1, scales.shape, dtype=torch.uint8).to(device) if zeros else None,
        (torch.rand(out_features) + 0.5).to(device) if outer else None,
        torch.randperm(in_features).to(device) if ordered else None,
    )
    packed = pack_gpu([weight])
    assert packed is not None
    return packed


def weight_only_experts_case(
    kind: Kind, num_tokens: int, num_slots: int, num_active: int, size: int, features: int,
    *, group: int, zeros: bool = False, outer: bool = False, ordered: bool = False,
    bias: bool = False, gate: Gate = SILU,
) -> OpCase:  # fmt: skip
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        gate_up, down = (
            stack_packed(
                [
                    random_codes(kind, inputs, outputs, group, zeros, outer, ordered, device)
                    for _ in range(num_slots)
                ]
            )
            for inputs, outputs in ((size, 2 * features), (features, size))
        )
        x = randn(num_tokens, size, dtype=dtype, device=device) / size**0.5
        slots = torch.stack([torch.randperm(num_slots)[:num_active] for _ in range(num_tokens)])
        weights = torch.rand(num_tokens, num_active, device=device) / features**0.5
        sizes = (2 * features, size)
        drawn = [0.2 * randn(num_slots, n, dtype=dtype, device=device) for n in sizes]
        biases = drawn if bias else [None, None]
        return x, slots.int().to(device), weights, gate_up, down, *biases, gate

    name = f"{kind}-{num_tokens}x{size}x{features}-{num_active}of{num_slots}"
    return OpCase(weight_only_experts, name + "-bias" * bias, make)


def weight_only_case(
    kind: Kind, num_tokens: int, in_features: int, out_features: int, *, group: int = 128,
    zeros: bool = False, outer: bool = False, ordered: bool = False, bias: bool = False,
) -> OpCase:  # fmt: skip
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        weight = random_codes(kind, in_features, out_features, group, zeros, outer, ordered, device)
        x = randn(num_tokens, 2 * in_features, dtype=dtype, device=device)[:, :in_features]
        b = randn(out_features, dtype=dtype, device=device) if bias else None
        return x / in_features**0.5, weight, b

    name = f"{kind}-{num_tokens}x{in_features}x{out_features}-{group}" + "-zeros" * zeros
    return OpCase(weight_only_linear, name + "-outer" * outer + "-ordered" * ordered, make)


def _w4a8(
    num_tokens: int, in_features: int, out_features: int, *, group: int = 128, bias: bool = False
) -> OpCase:
    """Every code of four bits is there."""

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8)
        scales = (torch.rand(out_features, in_features // group) + 0.5) / (4 * in_features**0.5)
        part = QuantizedWeight(
            "int4", codes.to(device), scales.to(device, dtype), input_scale=torch.tensor(0.02)
        )
        weight = pack_w4a8([part])
        assert weight is not None
        x = randn(num_tokens, in_features, dtype=dtype, device=device)
        scale_1 = torch.full((1,), 0.02, device=device)
        values, _ = quantize_fp8.reference(x, scale_1, 0)
        bias_O = randn(out_features, dtype=dtype, device=device) if bias else None
        return values, scale_1, weight, bias_O, dtype

    name = f"{num_tokens}x{in_features}x{out_features}-{group}" + "-bias" * bias
    return OpCase(w4a8_linear, name, make)


def _mxfp8(num_tokens: int, size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)[:, :size]
        return (_of_many_sizes(x),)

    return OpCase(quantize_mxfp8, f"{num_tokens}x{size}", make)


def _nvfp4(num_tokens: int, size: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, 2 * size, dtype=dtype, device=device)[:, :size]
        return _of_many_sizes(x), torch.full((1,), 0.004, device=device)

    return OpCase(quantize_nvfp4, f"{num_tokens}x{size}", make)


def _of_many_sizes(x_TD: Tensor) -> Tensor:
    """Zeros, groups whose scale is subnormal or too large, and those in between."""
    x_TGD = x_TD.unflatten(1, (-1, 16))
    exponents_G = torch.arange(x_TGD.shape[1], device=x_TD.device) % 24 - 12
    x_TGD = x_TGD * torch.exp2(exponents_G.to(x_TD.dtype))[:, None]
    x_TGD[0, -1] = 0
    return x_TGD.flatten(1)


def scaled_weight_of(
    shape: tuple[int, ...], in_features: int, is_nvfp4: bool, device: torch.device
) -> ScaledWeight:
    codes = torch.randint(256, (*shape, in_features // 2), dtype=torch.uint8, device=device)
    if not is_nvfp4:
        groups = (*shape, in_features // 32)
        return ScaledWeight(codes, torch.randint(124, 128, groups).to(device, torch.uint8))
    scales = (torch.rand(*shape, in_features // 16, device=device) + 0.5).to(FP8)
    outer = (torch.rand(shape, device=device) + 0.5) / 3
    return ScaledWeight(codes, scales, outer, torch.full((1,), 0.001, device=device))


def scaled_linear_case(
    num_tokens: int, in_features: int, out_features: int, *, nvfp4: bool, bias: bool = False
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        weight = scaled_weight_of((out_features,), in_features, nvfp4, device)
        x = randn(num_tokens, 2 * in_features, dtype=dtype, device=device)[:, :in_features]
        b = randn(out_features, dtype=dtype, device=device) if bias else None
        return x / in_features**0.5, weight, b

    name = f"{'nvfp4' if nvfp4 else 'mxfp4'}-{num_tokens}x{in_features}x{out_features}"
    return OpCase(scaled_linear, name + "-bias" * bias, make, quantizes_inside=True)


def scaled_experts_case(
    num_tokens: int, num_slots: int, num_active: int, size: int, features: int,
    *, nvfp4: bool, bias: bool = False, gate: Gate = SILU, elsewhere: bool = False,
) -> OpCase:  # fmt: skip
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        gate_up = scaled_weight_of((num_slots, 2 * features), size, nvfp4, device)
        down = scaled_weight_of((num_slots, size), features, nvfp4, device)
        x = randn(num_tokens, size, dtype=dtype, device=device) / size**0.5
        num_chosen = num_slots + elsewhere
        slots = torch.stack([torch.randperm(num_chosen)[:num_active] for _ in range(num_tokens)])
        weights = torch.rand(num_tokens, num_active, device=device)
        sizes = (2 * features, size)
        biases = [randn(num_slots, n, dtype=dtype, device=device) if bias else None for n in sizes]
        return x, slots.int().to(device), weights, gate_up, down, *biases, gate

    name = f"{'nvfp4' if nvfp4 else 'mxfp4'}-{num_tokens}x{size}x{features}-{num_active}of"
    name += f"{num_slots}" + "-bias" * bias + "-elsewhere" * elsewhere
    return OpCase(scaled_experts, name, make, quantizes_inside=True)


def _quantize_int8(num_tokens: int, size: int, is_static: bool = False) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        scale = torch.full((1,), 0.02, device=device) if is_static else None
        return randn(num_tokens, size, dtype=dtype, device=device), scale

    return OpCase(quantize_int8, f"{num_tokens}x{size}" + "-static" * is_static, make)


def _int8_linear(
    num_tokens: int, in_features: int, out_features: int, *, whole: bool = False, bias: bool = False
) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = randn(num_tokens, in_features, dtype=dtype, device=device)
        values, scale = quantize_int8.reference(
            x, torch.full((1,), 0.03, device=device) if whole else None
        )
        weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8).to(device)
        scales = (torch.rand(1 if whole else out_features) + 0.5).to(device) / (
            75 * in_features**0.5
        )
        b = randn(out_features, dtype=dtype, device=device) if bias else None
        return values, scale, weight, scales, b, dtype

    name = f"{num_tokens}x{in_features}x{out_features}" + "-whole" * whole + "-bias" * bias
    return OpCase(int8_linear, name, make)


def _packed_rows(form: Form, num_tokens: int) -> OpCase:
    def make(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return torch.randint(0, 70, (num_tokens,)), random_weight(form, 70, 96)

    kind = f"{form.bits}-{form.meta}".replace("torch.", "")
    return OpCase(packed_rows, f"{kind}-{num_tokens}", make)


OP_CASES = [
    _bitmask(1, 33, 0),
    _bitmask(5, 5000, 3, 0),
    _lora_groups(4, -1, 2, 0, 2, 2, 0, -1, 2, 2, 2, 1),
    _lora_groups(2, *(i * i % 7 - 1 for i in range(150))),
    _lora_groups(4, -1),
    _lora((0,), 64, (48,), ((16,),)),
    _lora((1, 0, 1, 1, -1, 1, 1, 0), 96, (64, 30), ((3, 16), (16, 9))),
    _lora((-1, -1), 96, (64,), ((8,), (3,))),
    _lora((2, -1, 0, 2, 1), 2500, (600, 40, 40), ((16, 4, 0), (0, 0, 0), (5, 16, 9))),
    _lora((1, 0, 1), 200, (520, 130), ((40, 17), (64, 0)), size=64),
    _lora((0,) * 20 + (-1,) * 9 + (2,) * 45, 200, (130, 70), ((16, 5), (9, 9), (0, 16)), 16, 0),
    _lora((1, -1, 0, *(0,) * 30, *(1,) * 60), 96, (70, 20, 20), ((32,) * 3, (5, 0, 1)), 32, 3),
    _lora((0,) * 20 + (1,) * 9, 1100, (130, 70), ((16, 5), (9, 16)), 16, 0),
    _norm(1, 64),
    _norm(3, 896),
    _norm(5, 100),
    _head_norm(4, 6, 64),
    _head_norm(17, 5, 80),
    _add_norm(3, 200, exact=True),
    _add_norm(1, 64),
    _sum_parts(1, 3, 200, norm=True),
    _sum_parts(4, 5, 1000, norm=True),
    _sum_parts(2, 5, 64, norm=False),
    _add_norm(7, 1000),
    *(_activation(op, *shape) for op in (silu_mul, gelu_mul) for shape in ((1, 64), (5, 1500))),
    sigmoid_case(1, 4, 64),
    sigmoid_case(5, 3, 256),
    rope_case(1, 8, 2, 64, 64),
    rope_case(5, 9, 3, 128, 128, block_size=32),
    rope_case(6, 5, 1, 96, 48),
    rope_case(5, 4, 4, 80, 32, norm=True),
    rope_case(13, 12, 3, 64, 64, norm=True),
    rope_case(3, 2, 1, 256, 256),
    rope_case(7, 8, 2, 64, 64, fp8=True),
    rope_case(7, 8, 2, 64, 64, int8=True),
    rope_case(5, 6, 3, 80, 40, norm=True, int8=True),
    rope_case(7, 8, 2, 64, 64, nvfp4=True),
    rope_case(5, 6, 3, 80, 40, norm=True, nvfp4=True),
    rope_case(3, 9, 2, 256, 64, norm=True, gates=True),
    rope_case(4, 3, 1, 32, 32, gates=True),
    rope_case(128, 2, 1, 64, 64, norm=True),
    rope_case(128, 17, 2, 128, 64),
    mla_write_case(1, 16, 512, 64),
    mla_write_case(5, 5, 96, 24, interleaved=False),
    mla_write_case(7, 20, 128, 32, fp8=True),
    mla_decode_case(1, heads=16, latent=512, rotary=64),
    mla_decode_case(15, 16, 17, 300, heads=20, latent=128, rotary=32),
    mla_decode_case(40, 7, heads=40, latent=96, rotary=24, block_size=32),
    mla_decode_case(70, heads=64, latent=512, rotary=64),
    mla_decode_case(140, *[9] * 169, heads=4, latent=32, rotary=16),
    mla_decode_case(9, 200, heads=16, latent=512, rotary=64, fp8=True),
    mla_decode_case(1, 15, 300, heads=20, latent=96, rotary=24, lse=True),
    mla_decode_case(140, *[9] * 169, heads=4, latent=32, rotary=16, lse=True),
    partial_decode_case(1, 17, 300),
    partial_decode_case(9, 40, num_heads=6, num_kv_heads=1, head_size=24, soft_cap=3.0),
    partial_decode_case(40, 7, int8=True),
    partial_decode_case(40, 7, nvfp4=True),
    partial_decode_case(40, 7, fp8=True),
    mla_project_case(150, 2, 128, 160, sees=19, transposed=True),
    mla_project_case(150, 2, 72, 40, sees=100),
    mla_project_case(150, 1, 16, 16, sees=0),
    mla_attend_case(((40, 40), (1, 1), (7, 7)), 4, (128, 64, 128), causal=True),
    mla_attend_case(((150, 150),), 2, (24, 16, 20), causal=True),
    mla_attend_case(((9, 70), (33, 0), (3, 64), (1, 1)), 3, (128, 64, 128), merges=True),
    mla_attend_case(((140, 33), (2, 130)), 2, (48, 24, 20), merges=True),
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
    _fp8_linear(17, 1152, 7424, "whole", "whole"),
    _fp8_linear(2, 4736, 200, "groups", "blocks", bias=True),
    _fp8_linear(6, 1152, 7300, "rows", "outputs", bias=True),
    _quantize_int8(1, 128),
    _quantize_int8(5, 5000),
    _quantize_int8(3, 1000, is_static=True),
    _int8_linear(1, 256, 64),
    _int8_linear(2, 80, 24, whole=True, bias=True),
    _int8_linear(20, 136, 72, whole=True, bias=True),
    _int8_linear(16, 4096, 64, bias=True),
    _int8_linear(33, 512, 128),
    _int8_linear(70, 200, 80, bias=True),
    _int8_linear(300, 256, 128),
    _mxfp8(1, 64),
    _mxfp8(3, 1408),
    _nvfp4(1, 48),
    _nvfp4(3, 1408),
    scaled_linear_case(1, 256, 40, nvfp4=True, bias=True),
    scaled_linear_case(33, 208, 136, nvfp4=True),
    scaled_linear_case(2, 224, 136, nvfp4=False, bias=True),
    scaled_linear_case(40, 256, 72, nvfp4=False),
    scaled_experts_case(2, 5, 2, 208, 80, nvfp4=True),
    scaled_experts_case(9, 4, 2, 128, 96, nvfp4=False, bias=True, gate=CLAMPED),
    scaled_experts_case(24, 3, 2, 64, 64, nvfp4=False, elsewhere=True),
    _w4a8(1, 256, 40, bias=True),
    _w4a8(19, 1024, 136, group=256),
    _w4a8(150, 384, 72, bias=True),
    _w4a8(2, 2048, 24, bias=True),
    weight_only_experts_case("int4", 1, 5, 2, 256, 128, group=128, zeros=True),
    weight_only_experts_case("int4", 9, 4, 3, 128, 64, group=32, ordered=True, bias=True),
    weight_only_experts_case("fp4", 2, 6, 3, 384, 80, group=16, outer=True),
    weight_only_experts_case("fp4", 70, 3, 2, 128, 96, group=16, outer=True, gate=CLAMPED),
    weight_only_experts_case("nf4", 5, 3, 1, 128, 64, group=64, bias=True),
    weight_only_case("int4", 1, 256, 80),
    weight_only_case("int4", 3, 512, 72, group=32, zeros=True, bias=True),
    weight_only_case("int4", 17, 384, 96, group=64, ordered=True),
    weight_only_case("int4", 2, 512, 130, group=256, zeros=True),
    weight_only_case("int4", 70, 200, 64, group=200, zeros=True, bias=True),
    weight_only_case("int4", 300, 256, 40, zeros=True, ordered=True, bias=True),
    weight_only_case("int4", 1, 2048, 41, group=64, zeros=True, bias=True),
    weight_only_case("int4", 2, 384, 24, group=32),
    weight_only_case("int4", 2, 256, 72, zeros=True, ordered=True),
    weight_only_case("int8", 1, 384, 72, group=384),
    weight_only_case("int8", 2, 256, 41, group=32, bias=True),
    weight_only_case("int8", 1, 201, 24, group=201),
    weight_only_case("int8", 33, 256, 64, bias=True),
    weight_only_case("int8", 260, 128, 40, group=32),
    weight_only_experts_case("e4m3", 1, 5, 2, 256, 128, group=128),
    weight_only_experts_case("e4m3", 9, 4, 3, 128, 64, group=64, bias=True),
    weight_only_case("e4m3", 1, 384, 72, group=384),
    weight_only_case("e4m3", 2, 256, 41, group=64, bias=True),
    weight_only_case("e4m3", 33, 256, 64, bias=True),
    weight_only_case("e4m3", 260, 128, 40, group=128),
    weight_only_case("nf4", 1, 320, 72, group=64, bias=True),
    weight_only_case("nf4", 2, 256, 41, group=64),
    weight_only_case("nf4", 270, 192, 48, group=64),
    weight_only_case("fp4", 1, 2048, 72, group=16, outer=True),
    weight_only_case("fp4", 2, 208, 41, group=16, outer=True, bias=True),
    weight_only_case("fp4", 40, 208, 136, group=16, outer=True, bias=True),
    weight_only_case("fp4", 280, 256, 40, group=16, outer=True),
    _linear(1, 70, 300),
    _linear(1, 33, 5000, bias=True),
    _linear(3, 64, 256, bias=True),
    _linear(4, 100, 2100),
    _linear(2, 1, 640),
    _linear(33, 4096, 1024),
    _linear(5, 7300, 640, bias=True),
    _gated(1, 35, 300),
    _gated(2, 33, 2500, bias=True),
    _gated(2, 25, 4500, fp8="out", bias=True),
    _gated(3, 33, 2500, bias=True),
    _gated(1, 24, 512, fp8="in"),
    _gated(4, 25, 4500, fp8="out", bias=True),
    _gated(5, 48, 300, bias=True),
    _gated(40, 64, 512),
    _gated(17, 40, 512, fp8="in", bias=True),
    _gated(64, 64, 256, fp8="out"),
    _decode_inputs(1, 4, 16),
    _decode_inputs(6, 9, 32),
    _decode_inputs(150, 160, 64),
    conv_case((1,), 1, 40, 64),
    conv_case((1, 1, 1), 3, 300, 320),
    conv_case((3, 1, 70), 0, 130, 130),
    conv_case((1, 1, 2, 33, 5, 64), 2, 48, 96),
    conv_case((1, 6), 1, 20, 20, width=2),
    conv_case((0, 6, 0), 0, 20, 20),
    conv_case((1, 40, 2), 1, 192, 288, run=48),
    conv_case((1, 3, 6, 1, 0, 40), 1, 48, 96, num_drafted=4),
    conv_case((2, 1, 0), 0, 20, 20, width=2, num_drafted=3),
    gates_case(1, 2, 4),
    gates_case(37, 4, 12),
    gates_case(3, 16, 32),
    delta_case((1,), 1, 1, 1, 64, 64),
    delta_case((1, 1, 1), 3, 2, 4, 64, 48),
    delta_case((130,), 0, 1, 2, 64, 64),
    delta_case((1, 1, 65, 3, 64), 2, 2, 2, 32, 40),
    delta_case((1, 40, 1, 7), 1, 1, 3, 24, 16, decay=8.0),
    delta_case((70,), 0, 1, 2, 128, 128),
    delta_case((90, 80), 0, 1, 1, 16, 32, decay=0.0),
    delta_case((0, 70, 0), 0, 1, 1, 32, 32),
    delta_case((1, 100), 1, 1, 1, 64, 32, decay=0.0, repeats=True),
    delta_case((1, 3, 6, 1, 0, 70), 1, 1, 2, 32, 40, num_drafted=4),
    delta_case((2, 1, 0), 0, 2, 2, 64, 48, num_drafted=3),
    *keep_case((1, 3, 6, 1, 0, 40), 1, 4),
    *keep_case((2, 1, 0), 0, 3, run=16, key_size=64),
    gated_norm_case(1, 2, 4, 64),
    gated_norm_case(9, 3, 3, 80),
    gated_norm_case(5, 2, 8, 128),
    _router_logits(1, 60, 300),
    _router_logits(4, 32, 4500, bias=True),
    _router_logits(2, 17, 256, wide=True),
    _router_logits(33, 40, 600, bias=True),
    _router_logits(520, 256, 128),
    _add_shared(1, 64, gate=False),
    _add_shared(3, 1500, gate=True),
    _route(1, 8, Routing(num_active=2)),
    _route(5, 60, Routing(num_active=4, renormalize=True)),
    _route(3, 128, Routing(num_active=8, renormalize=True), fixed=True),
    _route(
        4,
        64,
        Routing(
            num_active=6,
            score="sigmoid",
            renormalize=True,
            scale=2.5,
            num_groups=8,
            num_active_groups=3,
        ),
        fixed=True,
    ),
    _route(6, 15, Routing(num_active=3, num_groups=5, num_active_groups=2)),
    _route(9, 64, Routing(num_active=6, num_groups=8, num_active_groups=3, num_best=1)),
    _route(7, 16, Routing(num_active=1, score="sigmoid")),
    _route(2, 6, Routing(num_active=2, score="sigmoid", num_groups=6, num_active_groups=3)),
    experts_case(1, 8, 5, 64, 32),
    experts_case(2, 5, 4, 100, 36, bias=True),
    experts_case(1, 3, 1, 600, 24, gate=CLAMPED),
    experts_case(1, 6, 3, 40, 260, bias=True),
    experts_case(5, 70, 3, 48, 20),
    experts_case(40, 6, 2, 100, 72, bias=True, gate=CLAMPED),
    experts_case(90, 3, 2, 64, 96),
    experts_case(300, 2, 1, 72, 40),
    experts_case(342, 5, 3, 40, 20),
    *(
        experts_case(num_tokens, num_slots, num_active, 256, 128, format=format, bias=bias)
        for format in EXPERT_FORMATS
        for num_tokens, num_slots, num_active, bias in (
            (2, 5, 2, False),
            (5, 9, 2, True),
            (150, 3, 1, False),
        )
    ),
    *(
        experts_case(num_tokens, 4, 2, 176, 144, format=format, gate=CLAMPED)
        for format in ("fp8 static", "fp8 rows")
        for num_tokens in (2, 9)
    ),
    *(
        experts_case(num_tokens, 4, 2, 224, 96, format="mxfp4", bias=True, gate=CLAMPED)
        for num_tokens in (1, 9)
    ),
    *(
        experts_case(num_tokens, 3, 2, 64, 32, format=format, bias=True, elsewhere=True)
        for num_tokens in (3, 24)
        for format in ("plain", "mxfp4")
    ),
]
# Of ops that only a CPU has.
CPU_OP_CASES = [
    *(_packed_linear(form, rows, 100, 320) for form in FORMS for rows in (1, 2, 3, 8, 37)),
    _packed_linear(FORMS[0], 1, 7, 32, bias=True),
    _packed_linear(FORMS[0], 20, 48, 544, bias=True),
    *(_packed_rows(form, 9) for form in FORMS),
    _gated_rows(SILU),
    _gated_rows(CLAMPED),
]


@dataclass(frozen=True)
class AttentionCase:
    """Entries are (query length, kv length); the first `num_decodes` are decodes, of `runs` one
    after the other: each number says how many of them are tokens of one sequence."""

    entries: tuple[tuple[int, int], ...]
    num_decodes: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    fp8: bool = False  # the cache
    int8: bool = False  # the cache
    nvfp4: bool = False  # the cache
    sinks: bool = False
    chunks: bool = False  # instead of the window
    soft_cap: float | None = None
    runs: tuple[int, ...] = ()

    def __str__(self) -> str:
        kind = {0: "prefill", len(self.entries): "decode"}.get(self.num_decodes, "mixed")
        lens = "_".join(f"{q}.{kv}" for q, kv in self.entries[:4])
        more = f"+{len(self.entries) - 4}" if len(self.entries) > 4 else ""
        heads = f"h{self.num_heads}k{self.num_kv_heads}d{self.head_size}s{self.block_size}"
        rest = f"w{self.window}" + "-fp8" * self.fp8 + "-int8" * self.int8 + "-nvfp4" * self.nvfp4
        rest += "-sinks" * self.sinks + "-chunks" * self.chunks
        rest += f"-cap{self.soft_cap:g}" if self.soft_cap else ""
        rest += "-runs" + "_".join(map(str, self.runs)) if self.runs else ""
        return f"{kind}-{lens}{more}-{heads}-{rest}"


@dataclass
class AttentionArgs:
    q_THD: Tensor
    k_cache_BKSD: Tensor
    v_cache_BKSD: Tensor
    batch: ForwardBatch
    params: AttentionParams
    sinks_H: Tensor | None
    scales: CacheScales | None = None

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
    offsets = [place for run in case.runs for place in range(run)]
    for entry, ((_, kv_len), offset) in enumerate(zip(case.entries, offsets, strict=False)):
        if offset:  # of the row whose blocks hold all of the run's tokens
            assert kv_len == case.entries[entry - 1][1] + 1
            rows[entry - offset : entry] = rows[entry]
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
        max_kv_len=max(kv for _, kv in case.entries) + 3,
        cached_lens=tuple(kv - q for q, kv in case.entries[case.num_decodes :]),
        runs=Runs(torch.tensor(offsets, dtype=torch.int32, device=device), max(case.runs))
        if case.runs
        else None,
    )
    cache_dtype = torch.float8_e4m3fn if case.fp8 else dtype
    k_cache, v_cache = (randn(*pool, dtype=cache_dtype, device=device) for _ in range(2))
    v_scale = 0.75 if case.fp8 else 1.0
    params = AttentionParams(case.head_size**-0.5, case.window, v_scale, case.chunks, case.soft_cap)
    sinks = None
    if case.sinks:  # of all sizes: from no share of the softmax to nearly all of it
        sinks = torch.linspace(-6.0, 9.0, case.num_heads, device=device)[
            torch.randperm(case.num_heads)
        ]
    if case.nvfp4:
        scale_1 = torch.full((1,), 0.25, device=device)
        (k_cache, k_scales), (v_cache, v_scales) = (
            (x.view(*pool[:3], -1) for x in quantize_nvfp4.reference(cache.flatten(0, 2), scale_1))
            for cache in (k_cache, v_cache)
        )
        scales = CacheScales(k_scales, v_scales)
        params = replace(params, scale=params.scale * 0.25, v_scale=0.25)
        return AttentionArgs(q, k_cache, v_cache, batch, params, sinks, scales)
    if not case.int8:
        return AttentionArgs(q, k_cache, v_cache, batch, params, sinks)
    (k_cache, k_scales), (v_cache, v_scales) = (
        quantize_int8.reference(cache, None) for cache in (k_cache, v_cache)
    )
    scales = CacheScales(k_scales.squeeze(-1), v_scales.squeeze(-1))
    return AttentionArgs(q, k_cache, v_cache, batch, params, sinks, scales)


def spoil_unseen(args: AttentionArgs, whole_blocks: bool = False) -> None:
    """NaN for every key and value of the cache, or its scales, that no query of the batch sees;
    `whole_blocks`: not for those that share a block with some that one does."""
    batch, params = args.batch, args.params
    size = args.v_cache_BKSD.shape[2]
    shape = len(args.v_cache_BKSD), size
    seen_BS = torch.zeros(shape, dtype=torch.bool, device=batch.rows_N.device)
    starts, kv_lens = batch.query_starts_N1.tolist(), batch.kv_lens_N.tolist()
    for entry, row in enumerate(batch.rows_N.tolist()):
        first = kv_lens[entry] - (starts[entry + 1] - starts[entry])  # query
        if params.window is None:
            first = 0
        elif params.has_chunks:
            first = first // params.window * params.window
        else:
            first = max(0, first - params.window + 1)
        keys = torch.arange(first, kv_lens[entry], device=seen_BS.device)
        seen_BS[batch.block_table_RM[row, keys // size].long(), keys % size] = True
    if whole_blocks:
        seen_BS[:] = seen_BS.any(1, keepdim=True)
    for plane in args.scales or (args.k_cache_BKSD, args.v_cache_BKSD):
        is_fp8 = plane.dtype is torch.float8_e4m3fn
        numbers, nan = (plane.view(torch.uint8), 0x7F) if is_fp8 else (plane, torch.nan)
        numbers.transpose(1, 2)[~seen_BS] = nan


def decodes(*kv_lens: int, **shape: Any) -> AttentionCase:
    return AttentionCase(tuple((1, kv) for kv in kv_lens), len(kv_lens), **shape)


def prefills(*entries: tuple[int, int], **shape: Any) -> AttentionCase:
    return AttentionCase(entries, 0, **shape)


def drafted(*runs: tuple[int, int], **shape: Any) -> AttentionCase:
    """Runs of so many tokens, and what the first of them sees."""
    kv_lens = [first + place for first, length in runs for place in range(length)]
    return replace(decodes(*kv_lens, **shape), runs=tuple(length for _, length in runs))


def drafted_cases() -> Iterator[AttentionCase]:
    """Around the edges of a block, of a split and of what a window or a chunk sees."""
    yield drafted((1, 4), (15, 2), (300, 1), (63, 4), (1, 1), (1, 1))
    yield drafted((30, 7), (95, 9), (160, 3), num_heads=4, num_kv_heads=4)  # of more than a tile
    yield drafted((30, 4), (129, 3), (127, 4), (64, 1), head_size=128, num_heads=8)
    yield drafted((5, 4), (64, 4), (33, 2), head_size=80, num_heads=6, block_size=32)
    yield drafted((20, 4), (300, 3), num_heads=16, num_kv_heads=1)  # no room for a second one
    yield drafted((14, 4), (16, 4), (95, 3), (300, 4), window=16, sinks=True)
    yield drafted((31, 4), (62, 4), (190, 2), window=32, num_heads=8)
    yield drafted((14, 4), (31, 3), (126, 4), (300, 4), window=16, chunks=True)
    yield drafted((58, 4), (298, 4), window=60, chunks=True, block_size=32)
    yield drafted((90, 4), (17, 3), soft_cap=1.5, sinks=True)
    yield drafted((170, 4), (20, 3), (1, 1), fp8=True, sinks=True)
    yield drafted((170, 4), (20, 3), (1, 1), int8=True)
    yield drafted((170, 4), (20, 3), (1, 1), nvfp4=True)
    yield replace(
        drafted((170, 4), (20, 3), (1, 1)),
        entries=(*drafted((170, 4), (20, 3), (1, 1)).entries, (40, 90)),
    )


def capped_cases() -> Iterator[AttentionCase]:
    """A cap that bends nearly every score of random numbers."""
    yield AttentionCase(((1, 17), (1, 300), (33, 33), (5, 133)), 2, soft_cap=1.5)
    yield AttentionCase(((1, 90), (30, 70)), 1, soft_cap=1.0, window=20, head_size=80, sinks=True)
    yield AttentionCase(((1, 170), (40, 90)), 1, soft_cap=2.0, fp8=True)
    yield AttentionCase(((1, 170), (40, 90)), 1, soft_cap=2.0, int8=True)
    yield AttentionCase(((1, 170), (40, 90)), 1, soft_cap=2.0, nvfp4=True)


def chunked_cases() -> Iterator[AttentionCase]:
    """Around the first and the last token of a chunk; prompts that reach over several."""
    yield decodes(1, 15, 16, 17, 32, 33, 300, window=16, chunks=True)
    yield decodes(60, 61, 299, 300, 301, window=60, chunks=True, block_size=32)
    yield AttentionCase(((1, 100), (40, 40), (30, 150), (3, 51)), 1, window=50, chunks=True)
    yield prefills((70, 70), (7, 200), window=24, chunks=True, block_size=32)


def small_attention_cases() -> Iterator[AttentionCase]:
    """Few and short: the interpreter runs them in seconds."""
    yield decodes(1)
    yield decodes(*[40] * 7, num_heads=16, num_kv_heads=16)  # nearly fills a GPU
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
    yield prefills((20, 37), (0, 0), (0, 0), head_size=128)  # what fills up a graph
    yield prefills((70, 70), (7, 200), window=50, block_size=32)
    yield decodes(*range(1, 65), num_heads=2, num_kv_heads=1)
    yield AttentionCase(((1, 17), (1, 64), (33, 33), (5, 133), (1, 4)), 2)
    yield AttentionCase(((1, 200), (64, 128)), 1, num_heads=4, num_kv_heads=1, window=33)
    yield AttentionCase(((1, 170), (1, 20), (40, 90)), 2, fp8=True)
    yield AttentionCase(((1, 170), (1, 20), (40, 90)), 2, int8=True)
    yield AttentionCase(((1, 170), (1, 20), (40, 90)), 2, nvfp4=True)
    yield AttentionCase(((1, 170), (9, 20), (40, 90)), 1, nvfp4=True, head_size=16, window=30)
    yield from drafted_cases()
    yield from capped_cases()
    yield from chunked_cases()
    yield AttentionCase(((1, 300), (40, 40), (7, 90)), 1, head_size=80, window=33, int8=True)
    yield AttentionCase(
        ((1, 300), (40, 40), (7, 90)), 1, head_size=80, window=33, nvfp4=True, sinks=True
    )
    yield from sink_cases((1, 20, 64, 150, 300), ((40, 40), (1, 9), (30, 150)), 16)


def sink_cases(
    kv_lens: tuple[int, ...], chunks: tuple[tuple[int, int], ...], window: int
) -> Iterator[AttentionCase]:
    """Sinks with and without a window, of one, four and eight query heads for each kv head (the
    last as gpt-oss has them); of keys that are split and of some that are not, also in a cache of
    8-bit floats."""
    for group, block_size in ((1, 16), (4, 32), (8, 32)):
        shape = dict(num_heads=2 * group, block_size=block_size, sinks=True)
        for seen in (None, window):
            yield decodes(*kv_lens, **shape, window=seen)
            yield prefills(*chunks, **shape, window=seen)
    mixed = (*((1, kv) for kv in kv_lens), *chunks)
    yield AttentionCase(mixed, len(kv_lens), num_heads=16, fp8=True, sinks=True)
    yield AttentionCase(mixed, len(kv_lens), num_heads=6, head_size=80, window=window, sinks=True)
    for fp8 in (False, True):
        yield decodes(9, 90, 33, num_heads=64, num_kv_heads=8, fp8=fp8, sinks=True)


def gpu_attention_cases() -> Iterator[AttentionCase]:
    """Head sizes x group sizes, block sizes in turn; block edges, batches, prefixes, windows."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, group) for size in (64, 128, 256) for group in (1, 2, 4, 8)]
    for i, (head_size, group) in enumerate([*shapes, (80, 1), (96, 3), (128, 5), (64, 16)]):
        block_size = (16, 32, 64)[i % 3]
        shape: dict[str, Any] = dict(
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
            yield decodes(40, 20000, 17000, 3, **shape)  # long ones among others
        if i % 2 == 0:
            windowed = {**shape, "window": (16, 100, 128)[i % 3]}
            yield decodes(*edges, 700, 3000, **windowed)
            yield prefills((300, 300), (100, 900), (1, 77), (7, 7), **windowed)
    kv_lens = torch.randint(1, 300, (256,), generator=generator).tolist()
    yield decodes(*kv_lens, num_heads=32, num_kv_heads=8, head_size=128, block_size=32)
    yield from sink_cases((1, 33, 700, 5000), ((300, 300), (1, 77), (100, 900)), 128)
    yield decodes(*kv_lens, num_heads=64, num_kv_heads=8, block_size=32, sinks=True)
    yield decodes(*kv_lens, num_heads=64, num_kv_heads=8, block_size=32, window=128, sinks=True)
