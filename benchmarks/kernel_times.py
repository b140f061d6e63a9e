"""Times attention and the ops around the GEMMs on this GPU against their limits.

    PYTHONPATH=src python benchmarks/kernel_times.py [results.json]

Whether they are right is shown by ops_check.py.

Times are of launches inside a CUDA graph. Decodes walk through disjoint blocks larger than the
L2, so that keys and values come from device memory.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ops"))
from op_cases import angles

from penstock.kernels.activation import triton as activation
from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.attention.triton_decode import DecodeConfig, Load, decode, decode_config
from penstock.kernels.attention.triton_prefill import PrefillConfig, prefill
from penstock.kernels.gather.triton import decode_inputs_triton
from penstock.kernels.norm import triton as norm
from penstock.kernels.pdl import launch_options
from penstock.kernels.rope import triton as rope

READ_TBPS, COPY_TBPS, GEMM_TFLOPS = 4.52, 4.28, 745.0  # an H200, measured
L2_BYTES = 60 << 20
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 32  # Llama-8B
DEVICE = torch.device("cuda")
PARAMS = AttentionParams(HEAD_SIZE**-0.5)
NUM_WORKERS = 8

DECODE_CONFIGS = [
    *(decode_config(HEADS, KV_HEADS, HEAD_SIZE, 16, load) for load in Load),
    DecodeConfig(num_warps=1, tile=32, max_splits=32),
    DecodeConfig(num_warps=1, tile=32, min_span=64),
    DecodeConfig(num_stages=7, min_span=16384, max_splits=8),
    DecodeConfig(num_stages=3, min_span=16384, max_splits=8),
    DecodeConfig(num_warps=4, tile=64, min_span=16384, max_splits=8),
]
PREFILL_CONFIGS = [
    None,  # what `prefill` takes by itself, maybe another kernel
    PrefillConfig(),
    PrefillConfig(num_stages=5),
    PrefillConfig(num_stages=2),
    PrefillConfig(tile=128),
    PrefillConfig(tile=128, num_stages=2),
    PrefillConfig(tile=32, num_stages=5),
    PrefillConfig(rows=64, num_warps=4),
    PrefillConfig(rows=64, num_warps=4, num_stages=5),
    PrefillConfig(rows=64, tile=128, num_warps=4),
]
DECODE_SHAPES = [(batch, kv) for batch in (1, 32, 256) for kv in (1024, 2048, 8192)]
PREFILL_SHAPES = [(1, 8192), (8, 1024)]


def warm(job: DecodeConfig | PrefillConfig | None) -> str:
    """Compile a timed configuration into Triton's cache on disk; says why one cannot be."""
    try:
        if isinstance(job, DecodeConfig):
            for batch in (1, 256):
                DecodeRun(batch, 512).launch(job, 0)
        else:
            PrefillRun(1, 512).launch(job)
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as error:
        return f"{job}: {error}"
    return ""


def warm_all() -> None:
    """Over a few processes, because compiling takes the time."""
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        for problem in pool.map(warm, [*DECODE_CONFIGS, *PREFILL_CONFIGS], chunksize=3):
            if problem:
                print(problem)


# Times.


def time_graph_us(launches: Sequence[Callable[..., Any]], budget_ms: float = 25.0) -> float:
    """Mean time of one launch when all of them follow each other in one graph."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    repeats = max(2, min(200, int(budget_ms / max(start.elapsed_time(end), 1e-3))))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / len(launches) * 1e3


def pool_of(num_blocks: int) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2))
    return k, v


class DecodeRun:
    """Decode attention of `batch` sequences; each layer has its own blocks, scattered."""

    def __init__(self, batch: int, kv_len: int) -> None:
        self.kv_bytes = batch * kv_len * KV_HEADS * HEAD_SIZE * 2 * 2
        self.num_layers = max(1, min(64, -(-4 * L2_BYTES // self.kv_bytes)))
        width = kv_len // BLOCK_SIZE
        num_blocks = self.num_layers * batch * width
        self.k, self.v = pool_of(num_blocks + 1)
        blocks = torch.randperm(num_blocks, device=DEVICE).int() + 1
        self.tables = blocks.view(self.num_layers, batch, width)
        self.rows = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        self.kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(batch, HEADS, HEAD_SIZE, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)

    def launch(self, config: DecodeConfig, layer: int) -> None:
        decode(
            self.q, self.k, self.v, self.rows, self.kv_lens, self.tables[layer], self.out,
            PARAMS, 131072, config,
        )  # fmt: skip

    def times(self, configs: list[DecodeConfig]) -> list[tuple[DecodeConfig, float]]:
        times = []
        for config in configs:
            launches = [lambda c=config, i=i: self.launch(c, i) for i in range(self.num_layers)]
            try:
                times.append((config, time_graph_us(launches)))
            except triton.runtime.errors.OutOfResources:
                continue
        return times


class PrefillRun:
    """Prefill attention of `batch` fresh prompts of `length` tokens."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.flops = 4 * HEADS * HEAD_SIZE * batch * length * (length + 1) / 2
        width = length // BLOCK_SIZE
        self.k, self.v = pool_of(batch * width + 1)
        self.table = (torch.randperm(batch * width, device=DEVICE).int() + 1).view(batch, width)
        self.rows = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * length
        self.kv_lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(batch * length, HEADS, HEAD_SIZE, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)

    def launch(self, config: PrefillConfig | None) -> None:
        prefill(
            self.q, self.k, self.v, self.rows, self.starts, self.kv_lens, self.table, self.out,
            PARAMS, 0, config,
        )  # fmt: skip

    def times(
        self, configs: list[PrefillConfig | None]
    ) -> list[tuple[PrefillConfig | None, float]]:
        times = []
        for config in configs:
            try:
                times.append((config, time_graph_us([lambda c=config: self.launch(c)] * 2)))
            except triton.runtime.errors.OutOfResources:
                continue
        return times

    def torch_times(self) -> dict[str, float]:
        """torch's own kernels on contiguous keys and values, for orientation."""
        shape = (self.batch, KV_HEADS, self.length, HEAD_SIZE)
        q = self.q.view(self.batch, self.length, HEADS, HEAD_SIZE).transpose(1, 2).contiguous()
        k, v = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
        times = {}
        for name, kind in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):

            def launch() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            try:
                with sdpa_kernel(kind):
                    times[name] = time_graph_us([launch] * 2)
            except RuntimeError as error:
                print(f"  torch {name}: {str(error)[:200]}")
        return times


def show(config: DecodeConfig | PrefillConfig | None) -> str:
    if config is None:
        return "as chosen"
    default = asdict(type(config)())
    return ", ".join(f"{k}={v}" for k, v in asdict(config).items() if v != default[k]) or "default"


def time_decode() -> list[dict[str, Any]]:
    print("\ndecode attention, 32 query heads, 8 kv heads, head size 128, bf16")
    rows: list[dict[str, Any]] = []
    for batch, kv_len in DECODE_SHAPES:
        run = DecodeRun(batch, kv_len)
        roofline_us = run.kv_bytes / READ_TBPS / 1e6
        times = sorted(run.times(DECODE_CONFIGS), key=lambda pair: pair[1])
        for rank, (config, us) in enumerate(times):
            rows.append(dict(batch=batch, kv_len=kv_len, config=asdict(config), us=us))
            if rank < 3 or config == DECODE_CONFIGS[0]:
                tbps = run.kv_bytes / us / 1e6
                print(
                    f"  batch {batch:3d} kv {kv_len:5d}: {us:8.1f} us, bound {roofline_us:7.1f}, "
                    f"{tbps:.2f} TB/s = {tbps / READ_TBPS:4.0%}  {show(config)}"
                )
        del run
        torch.cuda.empty_cache()
    print("  best time over time, mean of all shapes, by configuration:")
    for config in DECODE_CONFIGS:
        mine = [r for r in rows if r["config"] == asdict(config)]
        if len(mine) == len(DECODE_SHAPES):
            best = [min(r["us"] for r in rows if same_shape(r, m)) / m["us"] for m in mine]
            print(f"    {sum(best) / len(best):4.0%}  {show(config)}")
    return rows


def same_shape(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["batch"], a["kv_len"]) == (b["batch"], b["kv_len"])


def time_prefill() -> list[dict[str, Any]]:
    print("\nprefill attention, same heads, causal, fresh prompts")
    rows = []
    for batch, length in PREFILL_SHAPES:
        run = PrefillRun(batch, length)
        times: list[tuple[str, float]] = [
            (f"triton {show(config)}", us) for config, us in run.times(PREFILL_CONFIGS)
        ]
        times += [(f"torch {name}", us) for name, us in run.torch_times().items()]
        for name, us in sorted(times, key=lambda pair: pair[1]):
            tflops = run.flops / us / 1e6
            share = tflops / GEMM_TFLOPS
            print(f"  {batch}x{length}: {us:8.1f} us, {tflops:4.0f} TFLOP/s = {share:4.0%}  {name}")
            rows.append(dict(batch=batch, length=length, name=name, us=us, tflops=tflops))
        del run
        torch.cuda.empty_cache()
    return rows


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def small_ops(num_tokens: int) -> list[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes read and written, launch) of the ops around the GEMMs of a Llama-8B layer."""
    size, features, rows = 4096, 14336, num_tokens
    x, residual, weight = bf16(rows, size), bf16(rows, size), bf16(size)
    gate_up = bf16(rows, 2 * features)
    qkv = bf16(rows, HEADS + 2 * KV_HEADS, HEAD_SIZE)
    q = qkv[:, :HEADS]
    table = angles(8192, HEAD_SIZE, DEVICE)
    positions = torch.randint(0, 8192, (rows,), device=DEVICE)
    k_cache, v_cache = pool_of(rows // BLOCK_SIZE + 2)
    slots = torch.randperm((rows // BLOCK_SIZE + 2) * BLOCK_SIZE, device=DEVICE)[:rows]
    head_weight = bf16(HEAD_SIZE)
    norm_bytes, kv_bytes = rows * size * 2, rows * 2 * KV_HEADS * HEAD_SIZE * 2
    rope_bytes = rows * (HEADS + KV_HEADS) * HEAD_SIZE * 2 * 2
    ops: list[tuple[str, int, Callable[[], Any]]] = [
        ("rms_norm", 2 * norm_bytes, lambda: norm.rms_norm_triton(x, weight, 1e-5)),
        ("head norm", 2 * norm_bytes, lambda: norm.rms_norm_triton(q, head_weight, 1e-5)),
        (
            "add_rms_norm",
            4 * norm_bytes,
            lambda: norm.add_rms_norm_triton(x, residual, weight, 1e-5),
        ),
        ("silu_mul", rows * features * 6, lambda: activation.silu_mul_triton(gate_up)),
        (
            "rope_kv_write",
            rope_bytes + 2 * kv_bytes,
            lambda: rope.rope_kv_write_triton(
                qkv, None, None, 0.0, table, positions, k_cache, v_cache, slots
            ),
        ),
    ]
    out, total = torch.empty_like(x), torch.empty_like(x)
    for warps in (4, 8, 16):
        launch = partial(
            norm._add_rms_norm[(rows,)], x, residual, weight, out, total, size, size, 1e-5,
            D=size, BLOCK_D=size, num_warps=warps, **launch_options(x),
        )  # fmt: skip
        ops.append((f"  add_rms_norm warps={warps}", 4 * norm_bytes, launch))
    activated = torch.empty(rows, features, device=DEVICE, dtype=torch.bfloat16)
    for block, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        launch = partial(
            activation._silu_mul[(rows, triton.cdiv(features, block))],
            gate_up, activated, 2 * features, features, BLOCK=block, num_warps=warps,
            **launch_options(gate_up),
        )  # fmt: skip
        ops.append((f"  silu_mul block={block} warps={warps}", rows * features * 6, launch))
    return ops


def time_small_ops() -> list[dict[str, Any]]:
    print(f"\nops around the GEMMs, Llama-8B, bf16; the limit of a copy is {COPY_TBPS} TB/s")
    rows = []
    for num_tokens in (1, 256, 8192):
        for name, num_bytes, launch in small_ops(num_tokens):
            if num_tokens == 256 and name.startswith(" "):
                continue
            us = time_graph_us([launch] * 10, budget_ms=10.0)
            tbps = num_bytes / us / 1e6
            print(f"  {num_tokens:4d} tokens {name:30s} {us:8.2f} us {tbps:6.2f} TB/s")
            rows.append(dict(tokens=num_tokens, name=name.strip(), us=us, tbps=tbps))
    entries = torch.arange(256, dtype=torch.int32, device=DEVICE)
    tokens, table = entries.long(), torch.zeros(256, 4096, dtype=torch.int32, device=DEVICE)
    us = time_graph_us([lambda: decode_inputs_triton(entries, tokens, entries, table, 32)] * 10)
    print(f"   256 entries decode_inputs {us:6.2f} us")
    rows.append(dict(tokens=256, name="decode_inputs", us=us, tbps=0.0))
    return rows


def main() -> None:
    began = time.monotonic()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    warm_all()
    print(f"compiled after {time.monotonic() - began:.0f} s")
    results: dict[str, Any] = {}
    for name, measure in (
        ("decode", time_decode), ("prefill", time_prefill), ("ops", time_small_ops)
    ):  # fmt: skip
        results[name] = measure()
    print(f"\ndone after {time.monotonic() - began:.0f} s")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
