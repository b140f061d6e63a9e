"""Times launch shapes of kernels on this GPU and keeps the best: what `penstock tune` does.

Kernels run in CUDA graphs on data larger than the L2 cache; a loop of launches would measure the
host. A candidate whose results differ from the present ones is dropped. Compiling takes most of
the time and is done by several processes before anything is timed.

Legend: T tokens, I inputs, O outputs, N sequences, H query heads, K kv heads, D head size.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import tuned
from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.attention.triton_decode import DecodeConfig, Load, decode, decode_config
from penstock.kernels.attention.triton_prefill import PrefillConfig, prefill, prefill_config
from penstock.kernels.carveout import AS_USUAL
from penstock.kernels.device import num_places, probe
from penstock.kernels.fp8.triton import fp8_linear_scaled_mm
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.gemm.skinny import GemvConfig, gemv, gemv_config
from penstock.kernels.gemm.tiles import LIBRARY, TilesConfig, tiles, tiles_config
from penstock.kernels.moe import tuning as moe
from penstock.kernels.moe.tuning import ExpertsConfig, Layer, Product
from penstock.kernels.norm.reference import rms_norm

OPS = ("gemv", "tiles", "decode", "prefill", "experts")
Config = GemvConfig | TilesConfig | DecodeConfig | PrefillConfig | ExpertsConfig
Launch = Callable[[], object]

_L2_BYTES = 256 << 20  # more than any, so that nothing is found in it
_BLOCK_SIZE = 32  # tokens of a cache block
_MAX_KV_LEN = 131072
_MIN_GAIN = 0.01  # less is noise
_MAX_ERROR = 0.02  # of a result, against the largest
_BUDGET_MS = 10.0  # of one timing
_BEFORE_SIZE = 2048  # channels of the norm in front of a product
_MAX_WORKERS = 16
# How far one program per sequence and kv head fills the GPU, and keys of each sequence.
_DECODE_CASES = {
    Load.FEW: ((0.0, 1024), (0.0, 8192), (0.5, 1024)),
    Load.SOME: ((1.0, 1024), (1.0, 4096)),
    Load.MANY: ((2.0, 1024), (2.0, 8192)),
    Load.MOST: ((16.0, 1024),),
}
# Outputs of a program, bytes of a row, warps, stages: what was best of 69 for some product.
_TILES = (
    *((64, 256, 4, stages) for stages in (2, 4, 5, 6, 8)),
    *((64, 128, 4, stages) for stages in (3, 4)),
    *((128, 128, 8, stages) for stages in (3, 4)),
    *((128, 256, 4, stages) for stages in (2, 4)),
    *((32, 512, 4, stages) for stages in (4, 6)),
    *((16, 512, 4, stages) for stages in (6, 8)),
)
_PREFILL_CASES = ((1, 8192), (8, 1024))
_TOKENS = {"gemv": (1, 2), "tiles": (16, 32, 64)}  # of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model the shapes of its kernels follow from."""

    hidden: int
    features: int  # 0: every layer has experts instead
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    experts: Layer | None = None


SHAPES = {
    "llama-3.1-8b": Shape(
        hidden=4096, features=14336, heads=32, kv_heads=8, head_size=128, vocabulary=128256
    ),
    "llama-3.3-70b": Shape(
        hidden=8192, features=28672, heads=64, kv_heads=8, head_size=128, vocabulary=128256
    ),
    "gpt-oss-120b": Shape(
        hidden=2880, features=0, heads=64, kv_heads=8, head_size=64, vocabulary=201088,
        experts=Layer(hidden=2880, features=2880, num_experts=128, num_active=4, format="mxfp4"),
    ),
    "qwen3-30b-a3b": Shape(
        hidden=2048, features=0, heads=32, kv_heads=4, head_size=128, vocabulary=151936,
        experts=Layer(hidden=2048, features=768, num_experts=128, num_active=8, format="plain"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One situation a configuration is timed in: launches that follow each other in a graph."""

    name: str
    floor_us: float | None
    launches: Callable[[Any], list[Launch]]
    output: Callable[[Any], Tensor]  # the result of one launch


@dataclass(frozen=True, slots=True)
class Subject:
    """One op at one shape; what the file has an entry for."""

    op: str
    dims: tuple[tuple[str, int], ...]
    is_gated: bool = False  # of a product: its outputs are those of gate and up
    experts: Product | None = None

    @property
    def key(self) -> str:
        return tuned.key(**dict(self.dims))


@dataclass(frozen=True, slots=True)
class Found:
    subject: Subject
    best: Config
    now: Config
    cases: tuple[tuple[str, float | None, float, float], ...]  # name, floor, best, now in us


def subjects(shape: Shape, ops: Sequence[str]) -> list[Subject]:
    found = []
    heads = (("heads", shape.heads), ("kv_heads", shape.kv_heads), ("head_size", shape.head_size))
    query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrices = (
        (query + 2 * kv, shape.hidden, (16, 8)),
        (shape.hidden, query, (16, 8)),
        (2 * shape.features, shape.hidden, (16, 8)),
        (shape.hidden, shape.features, (16, 8)),
        (shape.vocabulary, shape.hidden, (16,)),
    )
    for op in (op for op in _TOKENS if op in ops):
        for nth, (outputs, inputs, formats) in enumerate(matrices):
            for bits, tokens in itertools.product(formats, _TOKENS[op]):
                is_gated = nth == 2
                if outputs == 0 or inputs == 0 or (is_gated and tokens == 2):  # those are tiles
                    continue
                sizes = (("outputs", outputs), ("inputs", inputs))
                dims = (*sizes, ("bits", bits), ("tokens", tokens))
                found.append(Subject(op, dims, is_gated=is_gated))
    for cache_bits in (16, 8):
        if "decode" in ops:
            for load in Load:
                kind = (("cache_bits", cache_bits), ("sequences", load.value))
                found.append(Subject("decode", (*heads, *kind)))
        if "prefill" in ops:
            found.append(Subject("prefill", (*heads, ("bits", 16), ("cache_bits", cache_bits))))
    if "experts" in ops and shape.experts is not None:
        products = moe.products(shape.experts)
        found += [Subject(one.op, one.dims, one.is_gated, one) for one in products]
    return found


def now_used(subject: Subject) -> Config:
    """What the kernel runs with at present."""
    if subject.experts is not None:
        return moe.now_used(subject.experts)
    d = dict(subject.dims)
    match subject.op:
        case "gemv":
            return gemv_config(d["outputs"], d["inputs"], d["bits"] // 8, d["tokens"])
        case "tiles":
            return tiles_config(
                d["outputs"], d["inputs"], d["bits"] // 8, d["tokens"], subject.is_gated
            )
        case "decode":
            return decode_config(
                d["heads"], d["kv_heads"], d["head_size"], d["cache_bits"] // 8,
                Load(d["sequences"]),
            )  # fmt: skip
        case "prefill":
            return prefill_config(
                d["heads"], d["kv_heads"], d["head_size"], d["bits"] // 8, d["cache_bits"] // 8
            )
    raise AssertionError(subject)


def candidates(subject: Subject) -> list[Config]:
    """What is tried; the present one first."""
    now = now_used(subject)
    tried: list[Config] = [now]
    if subject.experts is not None:
        tried += moe.candidates(subject.experts)
    match now:
        case GemvConfig():
            tokens = dict(subject.dims)["tokens"]
            tried += [
                GemvConfig(rows, block, num_warps)
                for rows in (1, 2, 4)
                for block in (1024, 2048, 4096, 8192)
                for num_warps in (2, 4, 8)
                if rows * block * tokens <= 4096 * num_warps
            ]
        case TilesConfig():
            tried += [] if subject.is_gated else [LIBRARY]
            tried += [TilesConfig(*one) for one in _TILES]
        case DecodeConfig():
            tried += [
                replace(now, tile=tile, num_stages=num_stages, num_warps=num_warps)
                for tile in (32, 64, 128, 256)
                for num_stages in (3, 5, 7)
                for num_warps in (1, 2, 4)
                if 16 <= tile // num_warps <= 64
            ]
            tried += [replace(now, min_span=min_span) for min_span in (16, 64, 128)]
            tried += [replace(now, max_splits=max_splits) for max_splits in (32, 128)]
            tried += [replace(now, carveout=carveout) for carveout in (AS_USUAL, 30, 60, 100)]
        case PrefillConfig():
            tried += [
                PrefillConfig(rows, tile, num_warps, num_stages)
                for rows in (64, 128)
                for tile in (32, 64, 128)
                for num_warps in (4, 8)
                for num_stages in (2, 3, 5)
            ]
    return list(dict.fromkeys(tried))


def cases(subject: Subject, device: torch.device) -> Iterator[Case]:
    """One at a time: each takes memory while it lasts."""
    d = dict(subject.dims)
    limits = tuned.ceilings(probe().name)
    if subject.experts is not None:
        yield _experts_case(subject.experts, device, limits.get("read_tbps"))
    match subject.op:
        case "gemv" | "tiles":
            yield _product_case(subject, d["outputs"], device, limits.get("read_tbps"))
        case "decode":
            for num_waves, kv_len in _DECODE_CASES[Load(d["sequences"])]:
                num = max(1, int(num_waves * num_places() / d["kv_heads"]))
                yield _decode_case(d, num, kv_len, device, limits.get("read_tbps"))
        case "prefill":
            for num, length in _PREFILL_CASES:
                yield _prefill_case(d, num, length, device, limits.get("bf16_tflops"))


def compiling_cases(subject: Subject, device: torch.device) -> Iterator[Case]:
    """Small ones for which Triton makes the same binaries."""
    d = dict(subject.dims)
    if subject.experts is not None:
        yield _experts_case(subject.experts, device, None, num_slots=16)
    match subject.op:
        case "gemv" | "tiles":  # as many outputs beyond whole tiles
            yield _product_case(subject, 512 + d["outputs"] % 512, device, None, copies=1)
        case "decode":
            yield _decode_case(d, d["sequences"], 512, device, None, copies=1)
        case "prefill":
            yield _prefill_case(d, 1, 512, device, None)


def _product_case(
    subject: Subject,
    outputs: int,
    device: torch.device,
    read_tbps: float | None,
    copies: int | None = None,
) -> Case:
    """Of a matrix with so many outputs."""
    d = dict(subject.dims)
    inputs, tokens = d["inputs"], d["tokens"]
    dtype = torch.float8_e4m3fn if d["bits"] == 8 else torch.bfloat16
    num_bytes = outputs * inputs * d["bits"] // 8
    copies = copies or max(2, _L2_BYTES // num_bytes + 1)
    weights = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(copies)]
    x_TI = torch.randn(tokens, inputs, device=device).to(dtype)
    scale = torch.full((1,), inputs**-0.25, device=device) if d["bits"] == 8 else None
    if scale is None:
        x_TI *= inputs**-0.5
    small_TD = torch.ones(tokens, _BEFORE_SIZE, dtype=torch.bfloat16, device=device)

    def run(config: GemvConfig | TilesConfig, weight_OI: Tensor) -> Tensor:
        scaled = (x_TI, scale, weight_OI, scale, None, torch.bfloat16)
        if isinstance(config, GemvConfig):
            return gemv(*scaled, is_gated=subject.is_gated, config=config)
        # As in a layer: behind a small kernel the library's begins when that has ended, ours
        # beside it.
        rms_norm(small_TD, small_TD[0], 1e-6)
        if config.outputs:
            return tiles(*scaled, is_gated=subject.is_gated, config=config)
        if scale is None:
            return F.linear(x_TI, weight_OI)
        return fp8_linear_scaled_mm(x_TI, scale, weight_OI, scale, None, torch.bfloat16)

    return Case(
        f"{outputs} x {inputs}",
        None if read_tbps is None else num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config, weight) for weight in weights],
        lambda config: run(config, weights[0]),
    )


def _experts_case(
    one: Product, device: torch.device, read_tbps: float | None, num_slots: int | None = None
) -> Case:
    """Both products of a layer; the floor is reading the weights once."""
    runs = moe.runs(one, device, num_slots)
    return Case(
        f"{one.num_tokens} tokens",
        None if read_tbps is None else one.num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config) for run in runs],
        runs[0],
    )


class _Cache:
    """Keys and values of `num` sequences, `copies` times, in blocks that lie scattered."""

    def __init__(
        self, d: dict[str, int], num: int, kv_len: int, copies: int, device: torch.device
    ) -> None:
        dtype = torch.float8_e4m3fn if d["cache_bits"] == 8 else torch.bfloat16
        width = kv_len // _BLOCK_SIZE
        num_blocks = copies * num * width
        size = (num_blocks + 1, d["kv_heads"], _BLOCK_SIZE, d["head_size"])
        self.k, self.v = (torch.randn(size, device=device).to(dtype) for _ in range(2))
        blocks = torch.randperm(num_blocks, device=device).int() + 1
        self.tables = blocks.view(copies, num, width)
        self.rows = torch.arange(num, dtype=torch.int32, device=device)
        self.kv_lens = torch.full((num,), kv_len, dtype=torch.int32, device=device)


def _decode_case(
    d: dict[str, int],
    num: int,
    kv_len: int,
    device: torch.device,
    read_tbps: float | None,
    copies: int | None = None,
) -> Case:
    num_bytes = 2 * num * kv_len * d["kv_heads"] * d["head_size"] * d["cache_bits"] // 8
    copies = copies or max(1, min(64, _L2_BYTES // num_bytes + 1))
    cache = _Cache(d, num, kv_len, copies, device)
    q_NHD = torch.randn(num, d["heads"], d["head_size"], device=device).bfloat16()
    out_NHD = torch.empty_like(q_NHD)
    params = AttentionParams(d["head_size"] ** -0.5)
    x_ND, weight_DD = (
        torch.ones(n, _BEFORE_SIZE, dtype=q_NHD.dtype, device=device) for n in (num, _BEFORE_SIZE)
    )

    def run(config: DecodeConfig, table: Tensor) -> Tensor:
        # As in a layer: behind and in front of a product. With itself it shares a GPU better.
        dense_linear(x_ND, weight_DD)
        decode(
            q_NHD, cache.k, cache.v, cache.rows, cache.kv_lens, table, out_NHD, params,
            _MAX_KV_LEN, config,
        )  # fmt: skip
        return out_NHD

    return Case(
        f"{num} of {kv_len} keys, behind a product",
        None if read_tbps is None else num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config, table) for table in cache.tables],
        lambda config: run(config, cache.tables[0]).clone(),
    )


def _prefill_case(
    d: dict[str, int], num: int, length: int, device: torch.device, tflops: float | None
) -> Case:
    cache = _Cache(d, num, length, 1, device)
    q_THD = torch.randn(num * length, d["heads"], d["head_size"], device=device).bfloat16()
    starts = torch.arange(num + 1, dtype=torch.int32, device=device) * length
    out_THD = torch.empty_like(q_THD)
    params = AttentionParams(d["head_size"] ** -0.5)
    flops = 2 * d["heads"] * d["head_size"] * num * length * (length + 1)

    def run(config: PrefillConfig) -> Tensor:
        prefill(
            q_THD, cache.k, cache.v, cache.rows, starts, cache.kv_lens, cache.tables[0], out_THD,
            params, 0, length, config,
        )  # fmt: skip
        return out_THD

    return Case(
        f"{num} x {length}",
        None if tflops is None else flops / tflops / 1e6,
        lambda config: [partial(run, config)] * 2,
        lambda config: run(config).clone(),
    )


def graph_us(launches: Sequence[Launch]) -> float:
    """Mean time of one of them when all follow each other in one graph."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay_ms(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / times

    replay_ms(1)
    repeats = max(2, int(_BUDGET_MS / max(replay_ms(1), 1e-3)))
    return replay_ms(repeats) / len(launches) * 1e3


def compile_candidate(job: tuple[Subject, Config]) -> str | None:
    """In a process of its own: the binaries into Triton's cache. Why not, where that fails."""
    subject, config = job
    try:
        for case in compiling_cases(subject, torch.device("cuda")):
            case.output(config)
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton has against it
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_all(jobs: Sequence[tuple[Subject, Config]]) -> list[tuple[Subject, Config]]:
    """Those that compile."""
    workers = min(_MAX_WORKERS, os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        refusals = list(pool.map(compile_candidate, jobs, chunksize=4))
    return [job for job, refusal in zip(jobs, refusals, strict=True) if refusal is None]


def search(subject: Subject, tried: Sequence[Config], device: torch.device) -> Found:
    """Time all candidates in all cases. The best has the smallest mean ratio to a case's best."""
    now = now_used(subject)
    times: dict[Config, list[float]] = {config: [] for config in (now, *tried)}
    names: list[tuple[str, float | None]] = []
    for case in cases(subject, device):
        names.append((case.name, case.floor_us))
        expected = case.output(now).float()
        for config in list(times):
            error = (case.output(config).float() - expected).abs().max()
            if error <= _MAX_ERROR * expected.abs().max():
                times[config].append(graph_us(case.launches(config)))
            else:
                del times[config]
        del case
        torch.cuda.empty_cache()
    least = [min(of_case) for of_case in zip(*times.values(), strict=True)]

    def score(config: Config) -> float:
        return sum(us / low for us, low in zip(times[config], least, strict=True)) / len(least)

    best = min(times, key=score)
    if score(best) > score(now) * (1 - _MIN_GAIN):
        best = now
    measured = zip(names, times[best], times[now], strict=True)
    return Found(subject, best, now, tuple((*name, a, b) for name, a, b in measured))


def write(file: Path, found: Sequence[Found]) -> None:
    """Into `file`; entries of other shapes that it has already stay."""
    device = probe()
    content: dict[str, Any] = {}
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("gpu") != device.name:
            raise ConfigError(
                f"{file} is for '{content.get('gpu')}', this is '{device.name}'; name another file"
            )
    content |= {
        "gpu": device.name,
        "tuned": {
            "date": time.strftime("%Y-%m-%d"),
            "torch": device.torch_version,
            "triton": device.triton_version,
        },
    }
    ops = content.setdefault("ops", {})
    for one in found:
        ops.setdefault(one.subject.op, {})[one.subject.key] = asdict(one.best)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
