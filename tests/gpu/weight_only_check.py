"""Weight-only GEMMs (W4A16, W8A16) of real sizes on this GPU, against the reference; and times.

    PYTHONPATH=src python tests/gpu/weight_only_check.py [times | FORMAT ...]

Each format, and as many tokens as each launch config takes: of a matrix, and of experts, these also
with launch configs that are not the usual ones. By several processes: compiling kernels takes the
time. The small cases of every implementation: ops_check.py.

times: us of a layer of DeepSeek-R1's experts in NVFP4, inside a CUDA graph; by the usual kernel and
by that of all GPUs. Those of matrices: quant_times.py.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from moe_check import compared, time_graph_us

from penstock.bench.roofline import H200
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_packing import (
    TILE,
    GpuPackedWeight,
    pack_gpu,
    stack_packed,
    unpack_gpu,
)
from penstock.kernels.moe import SILU, Gate, gated
from penstock.kernels.moe.wna16 import weight_only_experts
from penstock.kernels.quantized_weight import QuantizedWeight, numbers, random_quantized
from penstock.kernels.tolerances import tolerance

FORMATS: dict[str, tuple[Any, int, bool]] = {  # (kind, group, has zero points)
    "AWQ": ("int4", 128, True),
    "GPTQ": ("int4", 128, False),
    "int4, groups of 32": ("int4", 32, True),
    "int4, groups of 256": ("int4", 256, True),
    "NVFP4": ("fp4", 16, False),
    "MXFP4": ("fp4", 32, False),
    "nf4": ("nf4", 64, False),
    "int8": ("int8", 0, False),
    "e4m3": ("e4m3", 0, False),
}
TOKENS = (1, 3, 16, 17, 64, 65, 256, 300)
SHAPES = ((1040, 2048), (4096, 14336))  # outputs, inputs
NUM_SLOTS, NUM_ACTIVE, SIZE = 6, 2, 528  # of the experts that are compared
GATE = Gate(alpha=1.7, shift=1.0, limit=3.0)
NUM_WORKERS = 16
NUM_LAYERS = 8  # that are timed in a row, with other experts each
DEVICE = torch.device("cuda")


def drawn(
    kind: Any, out_features: int, in_features: int, group: int, has_zeros: bool
) -> QuantizedWeight:
    shape = (out_features, in_features // (group or in_features))
    num_codes = 256 if kind == "int8" else 127 if kind == "e4m3" else 16
    codes = torch.randint(
        0, num_codes, (out_features, in_features), dtype=torch.uint8, device=DEVICE
    )
    scales = torch.rand(shape, device=DEVICE) + 0.5
    deviation = {"int4": 4.6, "int8": 74.0, "nf4": 0.55, "fp4": 3.1, "e4m3": 140.0}[kind]
    scales /= 6.5 if has_zeros else deviation  # weights of about one
    if kind == "fp4" and group == 32:
        return QuantizedWeight(kind, codes, torch.exp2(scales.log2().round()))
    outer = None
    if kind == "fp4":
        outer = torch.rand(out_features, device=DEVICE) + 0.5
    scales = scales.to(torch.float8_e4m3fn if kind == "fp4" else torch.float16)
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    return QuantizedWeight(kind, codes, scales, zeros, outer)


# Checks


def compare(found: list[str], what: str, ok: Callable[[], str]) -> None:
    """`ok` gives what is wrong, if anything."""
    try:
        wrong = ok()
    except Exception as error:
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
    if wrong:
        found.append(f"{what}: {wrong}")


def unlike(actual: Tensor, expected: Tensor) -> str:
    close = tolerance(torch.bfloat16)
    try:
        torch.testing.assert_close(actual, expected, atol=close.atol, rtol=close.rtol)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def wrong_gemms(name: str) -> list[str]:
    torch.manual_seed(0)
    kind, group, has_zeros = FORMATS[name]
    found: list[str] = []
    for out_features, in_features in SHAPES:
        weight = pack_gpu([drawn(kind, out_features, in_features, group, has_zeros)])
        assert weight is not None and weight.num_tiles == in_features // TILE
        bias = torch.randn(out_features, device=DEVICE, dtype=torch.bfloat16)
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, in_features, device=DEVICE, dtype=torch.bfloat16)
            x /= in_features**0.5
            expected = weight_only_linear.reference(x, weight, bias)
            what = f"{name}, {num_tokens} x {in_features} x {out_features}"
            gemm = partial(weight_only_linear, x, weight, bias)
            compare(found, what, lambda g=gemm, e=expected: unlike(g(), e))  # type: ignore[misc]
        if "hopper" not in weight_only_linear.explain(x, weight, bias).split(";")[0]:
            found.append(f"{name}: computed by another kernel")
    return found


def experts_of(name: str) -> tuple[GpuPackedWeight, GpuPackedWeight, int]:
    kind, group, has_zeros = FORMATS[name]
    features = {128: 384, 256: 512}.get(group, 320)
    size = {32: 544, 64: 576, 128: 640, 256: 512}.get(group, SIZE)
    gate_up, down = (
        stack_packed(
            [
                packed
                for _ in range(NUM_SLOTS)
                if (packed := pack_gpu([drawn(kind, outputs, inputs, group, has_zeros)]))
            ]
        )
        for inputs, outputs in ((size, 2 * features), (features, size))
    )
    assert gate_up is not None and down is not None and down.num_slots == NUM_SLOTS
    return gate_up, down, features


def rounded_values(weight: GpuPackedWeight) -> Tensor:
    """The matrix in fp32; numbers, scales of groups and their products are rounded to 16 bits, as
    kernels may do it."""
    quantized = unpack_gpu(weight)
    if quantized.scales_OG.shape[1] == 1:
        return quantized.values()
    scales, zeros = quantized.scales_OG.repeat_interleave(quantized.group, dim=1), None
    if quantized.zeros_OG is not None:
        zeros = quantized.zeros_OG.repeat_interleave(quantized.group, dim=1)
    values = numbers(quantized.kind, quantized.codes_OI, zeros).bfloat16() * scales.bfloat16()
    return (
        values.float() if quantized.outer_O is None else values.float() * quantized.outer_O[:, None]
    )


def expected_experts(
    x: Tensor, slots: Tensor, weights: Tensor, gate_up: GpuPackedWeight, down: GpuPackedWeight,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, gate: Gate,
) -> Tensor:  # fmt: skip
    """As the reference of `weight_only_experts`, with `rounded_values` and GEMMs that are not
    rounded before the gate, since some launches have them in fp32."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(gate_up.num_slots):
        bias, bias_down = (
            None if b is None else b[slot].float() for b in (gate_up_bias, down_bias)
        )
        h = F.linear(x.float(), rounded_values(gate_up.slot(slot)), bias)
        h = gated.reference(h, gate).to(x.dtype).float()
        weight = (weights * (slots == slot)).sum(1, keepdim=True)
        y += weight * F.linear(h, rounded_values(down.slot(slot)), bias_down)
    return y.to(x.dtype)


def wrong_experts(name: str) -> list[str]:
    """Some pairs have the slot that does not exist."""
    from penstock.kernels.moe import wna16_hopper as hopper

    torch.manual_seed(0)
    found: list[str] = []
    gate_up, down, features = experts_of(name)
    size, bf16 = gate_up.in_features, torch.bfloat16
    biases = [
        0.2 * torch.randn(NUM_SLOTS, w.out_features, device=DEVICE, dtype=bf16)
        for w in (gate_up, down)
    ]
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, size, device=DEVICE, dtype=bf16) / size**0.5
        scores = torch.rand(num_tokens, NUM_SLOTS + 1, device=DEVICE)
        slots = scores.topk(NUM_ACTIVE).indices.int().contiguous()
        weights = torch.rand(num_tokens, NUM_ACTIVE, device=DEVICE) / features**0.5
        shape = (biases, SILU) if num_tokens % 2 else ((None, None), GATE)
        args = (x, slots, weights, gate_up, down, *shape[0], shape[1])
        expected = expected_experts(*args)

        def off(run: Callable[..., Tensor], args: Any, expected: Tensor, **options: Any) -> str:
            first = run(*args, **options)
            ok, errors = compared(first, expected, bf16, False)
            if not torch.equal(run(*args, **options), first):
                return "not the same twice"
            return "" if ok else errors

        what = f"{name}, experts, {num_tokens} tokens"
        compare(found, what, partial(off, weight_only_experts, args, expected))
        if num_tokens <= 3:
            for rows in (8, 16):
                choice = dict(rows=rows, is_sorted=False, splits=2)
                of_pairs = partial(off, hopper.experts, args, expected, **choice)
                compare(found, f"{what}, {rows} rows of a pair, splits", of_pairs)
        if num_tokens == 300:
            of_slots = partial(off, hopper.experts, args, expected, rows=64)
            compare(found, f"{what}, blocks of 64", of_slots)
        if "hopper" not in weight_only_experts.explain(*args).split(";")[0]:
            found.append(f"{what}: computed by another kernel")
    return found


def problems(job: tuple[str, str]) -> list[str]:
    try:
        return wrong_gemms(job[1]) if job[0] == "gemms" else wrong_experts(job[1])
    except Exception as error:
        return [f"{job}: {type(error).__name__}: {' '.join(str(error).split())[-500:]}"]


def check(formats: Iterable[str]) -> bool:
    jobs = [(what, name) for what in ("gemms", "experts") for name in formats]
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        found = pool.map(problems, jobs, chunksize=1)
    for (what, name), wrong in zip(jobs, found, strict=True):
        print(f"{name}, {what}: {len(wrong)} wrong", *wrong, sep="\n  ")
    return not any(found)


def times() -> None:
    from penstock.kernels.moe.wna16_triton import weight_only_experts_triton

    num_slots, num_active, size, features = 64, 8, 7168, 2048  # a quarter of its experts
    packed = [
        pack_gpu([random_quantized("fp4", *shape, 16, False, DEVICE)])
        for shape in ((2 * features, size), (size, features))
    ]
    gate_up, down = (stack_packed([one] * num_slots) for one in packed if one is not None)
    assert gate_up is not None and down is not None
    for num_tokens in (1, 4, 32, 256):
        x = torch.randn(num_tokens, size, device=DEVICE, dtype=torch.bfloat16)
        weights = torch.rand(num_tokens, num_active, device=DEVICE)
        layers = []
        for _ in range(NUM_LAYERS):
            scores = torch.rand(num_tokens, num_slots, device=DEVICE)
            slots = scores.topk(num_active).indices.int().contiguous()
            layers.append((x, slots, weights, gate_up, down, None, None, SILU))
        activated = num_slots * (1 - (1 - num_active / num_slots) ** num_tokens)  # uniform routing
        roofline_s = (
            activated * (gate_up.num_bytes + down.num_bytes) / num_slots / H200.read_bytes_s
        )
        for what, run in (
            ("usual", weight_only_experts),
            ("of all GPUs", weight_only_experts_triton),
        ):
            us = time_graph_us([partial(run, *layer) for layer in layers])
            print(
                f"{num_tokens} tokens, {what}: {us:.1f} us, roofline {roofline_s * 1e6:.1f}",
                flush=True,
            )


def main() -> None:
    if "times" in sys.argv[1:]:
        times()
    else:
        sys.exit(0 if check(sys.argv[1:] or FORMATS) else 1)


if __name__ == "__main__":
    main()
