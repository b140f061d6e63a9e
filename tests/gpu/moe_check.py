"""Layers of experts on this GPU: every implementation and format against the reference, and times.

    PYTHONPATH=src python tests/gpu/moe_check.py [ops] [times] [layer name ...]

ops: the small cases of the op tests, and the matrices of published models with fewer experts.
times: a layer inside a CUDA graph, uniform routing, beside its roofline: the weights of the
activated experts read once (an H200 reads 4.52 TB/s), or its GEMMs (745 TFLOP/s, FP8 1254). First
as the engine runs it, then with other launch configs; the best one is marked.

Compiling takes the time; several processes do it before anything is timed.
"""

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/ops", "tests/fixtures", "benchmarks")]

from kernel_times import time_graph_us  # noqa: E402
from op_cases import EXPERT_FORMATS, OP_CASES, OpCase, expert_weights, experts_case  # noqa: E402

from penstock.kernels.moe import (  # noqa: E402
    SILU,
    Gate,
    add_shared,
    experts,
    route,
    router_logits,
)
from penstock.kernels.moe.align import rows_per_block  # noqa: E402
from penstock.kernels.moe.grouped_gemm import (  # noqa: E402
    GroupedConfig,
    experts_grouped,
)
from penstock.kernels.moe.mxfp4_triton import Mxfp4Config, experts_mxfp4  # noqa: E402
from penstock.kernels.moe.small_m import MAX_SMALL_M, SmallMConfig, experts_small_m  # noqa: E402

DEVICE = torch.device("cuda")
READ_TBPS, TFLOPS = 4.52, {4: 745.0, 8: 1254.0, 16: 745.0}
L2_BYTES = 60 << 20
TOKENS = (1, 4, 8, 32, 256, 2048)
NUM_WORKERS = 14
# Errors that an implementation may have, in units in the last place of what it has rounded: of the
# result one, since that of the reference is rounded, too, and may fall to the other side; of the
# root mean square of all five, since what the gate gives, and each expert's part of a sum, are
# rounded before. (Computed so on a CPU, 150 draws of the case with the largest results, 11 times
# that: 1.6 in the middle, 4.75 at the most.) On average half of one.
MAX_UNITS, MAX_MEAN_UNITS = 5.0, 0.5
MAX_FP8_ERROR = 0.6  # over that mean; a value between two FP8 numbers may fall to either
FAILED: list[str] = []


@dataclass(frozen=True)
class Layer:
    format: str
    num_slots: int
    num_active: int
    size: int
    features: int
    bias: bool = False
    gate: Gate = SILU

    @property
    def bits(self) -> int:
        return {"mxfp4": 4, "plain": 16}.get(self.format, 8)

    @property
    def expert_bytes(self) -> float:
        num_weights = 3 * self.size * self.features
        return num_weights * (4.25 if self.format == "mxfp4" else self.bits) / 8


OSS_GATE = Gate(alpha=1.702, shift=1.0, limit=7.0)
LAYERS = {
    "gpt-oss-20b": Layer("mxfp4", 32, 4, 2880, 2880, True, OSS_GATE),
    "gpt-oss-120b": Layer("mxfp4", 128, 4, 2880, 2880, True, OSS_GATE),
    "Qwen3-30B-A3B": Layer("plain", 128, 8, 2048, 768),
    "Qwen3-30B-A3B-FP8": Layer("fp8 blocks", 128, 8, 2048, 768),
    "Qwen3-30B-A3B by rows": Layer("fp8 rows", 128, 8, 2048, 768),
    "Qwen3-Next": Layer("plain", 512, 10, 2048, 512),
    "DeepSeek-R1, a quarter": Layer("fp8 blocks", 64, 8, 7168, 2048),
}


def expect(ok: bool, what: str) -> None:
    print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        FAILED.append(what)


# Checks


def check_case(case: OpCase, dtype: torch.dtype) -> list[tuple[bool, str]]:
    torch.manual_seed(0)
    args = case.make(dtype, DEVICE)
    copies = [a.clone() if i in case.mutated else a for i, a in enumerate(args)]
    expected = case.op.reference(*args)
    found = []
    for name, impl in case.op.implementations().items():
        if impl.needs.kind != "cuda" or (impl.fits is not None and not impl.fits(*copies)):
            continue
        result = impl.run(*copies)
        if case.op is route:
            same = (result[0] == expected[0]).float().mean().item()
            found.append((same > 0.999, f"{case} {name}: {same:.2%} of the choices"))
            continue
        ok, errors = compared(result, expected, dtype, case.quantizes_inside)
        found.append((ok, f"{case} {name} {dtype}: {errors}"))
    return found


def compared(
    result: Tensor, expected: Tensor, dtype: torch.dtype, is_fp8: bool
) -> tuple[bool, str]:
    error, expected = (result.float() - expected.float()).abs(), expected.float().abs()
    size, unit = expected.square().mean().sqrt(), torch.finfo(dtype).eps
    mean = (error.mean() / size).nan_to_num(torch.inf).item()
    if is_fp8:
        worst = (error.max() / size).nan_to_num(torch.inf).item()
        ok = worst < MAX_FP8_ERROR and mean < MAX_FP8_ERROR / 10
        return ok, f"error {worst:.3g}, mean {mean:.2g}"
    units = ((error / unit - expected).max() / size).nan_to_num(torch.inf).item()
    ok = units < MAX_UNITS and mean < MAX_MEAN_UNITS * unit
    return ok, f"error {units:.3g} units, mean {mean / unit:.2g}"


def small_cases() -> list[OpCase]:
    cases = [case for case in OP_CASES if case.op in (add_shared, experts, route, router_logits)]
    for format, num_tokens in itertools.product(EXPERT_FORMATS, (1, 7, 300)):
        cases.append(experts_case(num_tokens, 9, 4, 384, 256, format=format, bias=True))
    for num_tokens in (7, 40, 300):  # of the kernel for Hopper, which takes long GEMMs
        cases.append(experts_case(num_tokens, 9, 4, 384, 1024, format="fp8 blocks"))
    return cases


def check_small(share: int) -> list[tuple[bool, str]]:
    cases = small_cases()[share::NUM_WORKERS]
    return [
        result
        for case, dtype in itertools.product(cases, (torch.bfloat16, torch.float16))
        for result in check_case(case, dtype)
    ]


def check_layer(name: str) -> list[tuple[bool, str]]:
    """With 12 experts at most: the reference sends every token through every one."""
    layer = LAYERS[name]
    found = []
    for num_tokens in (1, 3, 8, 33, 200, 1100):
        case = experts_case(
            num_tokens, 12, layer.num_active, layer.size, layer.features, format=layer.format,
            bias=layer.bias, gate=layer.gate, even=True,
        )  # fmt: skip
        found += [(ok, f"{name} {what}") for ok, what in check_case(case, torch.bfloat16)]
    return found


def check_graph(name: str) -> None:
    """What is captured follows other choices."""
    layer = LAYERS[name]
    case = experts_case(48, 12, layer.num_active, layer.size, layer.features, format=layer.format)
    x, slots, *rest = case.make(torch.bfloat16, DEVICE)
    experts(x, slots, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, slots, *rest)
    for chosen in (slots.clone(), slots.flip(0).contiguous(), torch.full_like(slots, 3)):
        slots.copy_(chosen)
        graph.replay()
        expected = experts.reference(x, slots, *rest)
        ok, errors = compared(out, expected, x.dtype, layer.format.startswith("fp8"))
        expect(ok, f"{name} captured: {errors}")


def check_ops(names: list[str]) -> None:
    with ProcessPoolExecutor(NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
        layers = [pool.submit(check_layer, name) for name in names]
        small = [pool.submit(check_small, share) for share in range(NUM_WORKERS)]
        for future in (*small, *layers):
            for ok, what in future.result():
                expect(ok, what)
    for name in names:
        check_graph(name)


# Times

SMALL_M = {  # rows, tiles, warps of the first GEMM; of the second, where warps have experts
    8: (
        [(2, 4, 2), (4, 4, 2), (2, 8, 4), (1, 8, 4), (4, 8, 4)],
        [(2, 4, 8), (4, 4, 8), (2, 2, 4), (1, 4, 8), (4, 2, 4)],
    ),
    16: (
        [(4, 2, 2), (2, 2, 2), (8, 2, 2), (2, 4, 4), (4, 4, 4)],
        [(4, 2, 8), (2, 2, 8), (2, 2, 4), (4, 2, 4), (1, 4, 8)],
    ),
}
MXFP4 = {  # warps, slabs, tiles, splits, stages, band; by whether a block has few pairs
    True: [(4, 1, 2, 1, 3, 1), (4, 2, 1, 1, 3, 1), (4, 2, 2, 1, 3, 1), (4, 1, 1, 1, 4, 1)],
    False: [(4, 2, 1, 1, 3, 4), (8, 1, 1, 1, 3, 4), (8, 2, 1, 1, 3, 4), (4, 2, 1, 1, 3, 1)],
}
GROUPED = {  # outputs, warps, stages, band; by whether a block has few pairs
    True: [(64, 4, 4, 1), (64, 4, 6, 1), (64, 4, 3, 1), (128, 8, 4, 1), (128, 4, 3, 1)],
    False: [(64, 4, 3, 4), (128, 8, 3, 4), (128, 8, 4, 8), (64, 4, 4, 1), (128, 8, 3, 1)],
}
Run = Callable[..., Tensor]
# With launch configs, which the op's callers know nothing of.
SMALL_M_RUN: Run = experts_small_m
GROUPED_RUN: Run = experts_grouped
MXFP4_RUN: Run = experts_mxfp4


def variants(layer: Layer, num_tokens: int) -> dict[str, Run]:
    """Ways to compute the layer; the first one is what the engine does."""
    found: dict[str, Run] = {"engine": experts}
    usual = rows_per_block(num_tokens * layer.num_active, layer.num_slots, layer.format)
    block_sizes = sorted({usual, max(usual // 2, 16), min(2 * usual, 128)})
    if layer.format == "mxfp4":
        for rows in block_sizes:
            for shape in MXFP4[rows <= 32]:
                found[f"rows {rows} {shape}"] = partial(
                    MXFP4_RUN, rows=rows, configs=(Mxfp4Config(*shape),) * 2
                )
        return found
    if num_tokens <= MAX_SMALL_M:
        for shapes in zip(*SMALL_M[layer.bits], strict=True):
            configs = tuple(SmallMConfig(*shape) for shape in shapes)
            found[f"small-M {shapes}"] = partial(SMALL_M_RUN, configs=configs)
    depth = 64 if layer.bits == 16 else 128
    for rows in block_sizes:
        for outputs, num_warps, num_stages, band in GROUPED[rows <= 32]:
            config = GroupedConfig(outputs, depth, num_warps, num_stages, band)
            found[f"rows {rows} {(outputs, num_warps, num_stages, band)}"] = partial(
                GROUPED_RUN, rows=rows, configs=(config, config)
            )
    return found


def arguments(layer: Layer, num_tokens: int, copies: int) -> list[tuple[Any, ...]]:
    """Each of the copies has other experts, as far as there are enough."""
    torch.manual_seed(0)
    matrices = [
        expert_weights(layer.format, layer.num_slots, outputs, inputs, torch.bfloat16, DEVICE)
        for outputs, inputs in ((2 * layer.features, layer.size), (layer.size, layer.features))
    ]
    biases = [
        torch.randn(layer.num_slots, n, device=DEVICE).bfloat16() if layer.bias else None
        for n in (2 * layer.features, layer.size)
    ]
    found = []
    order = torch.randperm(layer.num_slots)
    for copy in range(copies):
        x = torch.randn(num_tokens, layer.size, device=DEVICE).bfloat16()
        chosen = torch.rand(num_tokens, layer.num_slots).topk(layer.num_active).indices
        if num_tokens == 1:
            chosen = order.roll(copy * layer.num_active)[None, : layer.num_active]
        weights = torch.rand(num_tokens, layer.num_active, device=DEVICE)
        slots = chosen.int().contiguous().to(DEVICE)
        found.append((x, slots, weights, *matrices, *biases, layer.gate))
    return found


def compile_layer(job: tuple[str, int]) -> None:
    name, num_tokens = job
    few_slots = Layer(**{**vars(LAYERS[name]), "num_slots": 16})
    (args,) = arguments(few_slots, num_tokens, 1)
    for what, run in variants(LAYERS[name], num_tokens).items():
        try:
            run(*args)
        except Exception as refused:  # told where it is timed
            print(f"{name} {num_tokens} {what}: {str(refused)[:100]}", flush=True)


def time_layer(name: str) -> None:
    layer = LAYERS[name]
    for num_tokens in TOKENS:
        copies = arguments(layer, num_tokens, 8 if num_tokens <= 8 else 2)
        activated = sum(len(args[1].unique()) for args in copies) / len(copies)
        num_bytes = activated * layer.expert_bytes
        flops = 6 * num_tokens * layer.num_active * layer.size * layer.features
        bound = max(num_bytes / READ_TBPS, flops / TFLOPS[layer.bits]) / 1e6
        times = {}
        for what, run in variants(layer, num_tokens).items():
            launches = [lambda args=args, run=run: run(*args) for args in copies]
            try:
                times[what] = time_graph_us(launches, 4.0)
            except Exception as refused:
                print(f"  {name} {num_tokens} {what}: {str(refused)[:200]}", flush=True)
        if "engine" not in times:
            expect(False, f"{name} {num_tokens} tokens")
            continue
        order = sorted((us, what) for what, us in times.items() if what != "engine")
        print(
            f"{name:24s} {num_tokens:4d} tokens, {activated:5.1f} experts: "
            f"roofline {bound:7.1f} us, engine {times['engine']:7.1f} "
            f"({times['engine'] / bound:.2f}); "
            + "; ".join(f"{what} {us:.1f}" for us, what in order[:6])
            + f"; worst {order[-1][1]} {order[-1][0]:.1f}",
            flush=True,
        )
        del copies
    torch.cuda.empty_cache()


def time_layers(names: list[str]) -> None:
    began = time.monotonic()
    jobs = [(name, num_tokens) for num_tokens in reversed(TOKENS) for name in names]
    with ProcessPoolExecutor(NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_layer, jobs))
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for name in names:
        time_layer(name)


def main() -> None:
    began = time.monotonic()
    asked = [name for name in sys.argv[1:] if name not in ("ops", "times")]
    names = asked or list(LAYERS)
    parts = [part for part in ("ops", "times") if part in sys.argv[1:]] or ["ops", "times"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for part in parts:
        {"ops": check_ops, "times": time_layers}[part](names)
        print(f"{part}: done after {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(f"{len(FAILED)} checks failed" if FAILED else 0)


if __name__ == "__main__":
    main()
