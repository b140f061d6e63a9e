"""Times launch configs of kernels on this GPU and keeps the best: what `penstock tune` does.

Kernels run in CUDA graphs on data larger than the L2 cache; a loop of launches would measure the
host. A candidate whose results differ from the present ones is dropped. Compiling takes most of
the time and is done by several processes before anything is timed.

Candidates and cases of an op are in that op's folder: `gemm`, `attention` and `moe` `tuning.py`.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.kernels import tuned
from penstock.kernels.attention import tuning as attention
from penstock.kernels.attention.triton_decode import Load
from penstock.kernels.device import probe
from penstock.kernels.gemm import tuning as gemm
from penstock.kernels.moe import tuning as moe
from penstock.kernels.moe.tuning import ExpertGemm, ExpertsConfig, Layer
from penstock.kernels.tuning_case import Case, graph_us

OPS = ("gemv", "small_m", "decode", "prefill", "experts")
Config = gemm.GemmConfig | attention.AttentionConfig | ExpertsConfig

_MIN_GAIN = 0.01  # less is noise
_MAX_ERROR = 0.02  # of a result, against the largest
_MAX_WORKERS = 16


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
class Subject:
    """One op at one shape; what the file has an entry for."""

    op: str
    dims: tuple[tuple[str, int], ...]
    is_gated: bool = False  # of a GEMM: its outputs are those of gate and up
    experts: ExpertGemm | None = None

    @property
    def key(self) -> str:
        return tuned.key(**dict(self.dims))


@dataclass(frozen=True, slots=True)
class Found:
    subject: Subject
    best: Config
    now: Config
    cases: tuple[tuple[str, float | None, float, float], ...]  # name, roofline, best, now in us


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
    for op in (op for op in gemm.TOKENS if op in ops):
        for nth, (outputs, inputs, formats) in enumerate(matrices):
            for bits, tokens in itertools.product(formats, gemm.TOKENS[op]):
                is_gated = nth == 2
                if outputs == 0 or inputs == 0 or (is_gated and tokens == 2):  # those are small-M
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
        gemms = moe.expert_gemms(shape.experts)
        found += [Subject(one.op, one.dims, one.is_gated, one) for one in gemms]
    return found


def now_used(subject: Subject) -> Config:
    """What the kernel runs with at present."""
    if subject.experts is not None:
        return moe.now_used(subject.experts)
    if subject.op in gemm.TOKENS:
        return gemm.now_used(subject.op, dict(subject.dims), subject.is_gated)
    return attention.now_used(subject.op, dict(subject.dims))


def candidates(subject: Subject) -> list[Config]:
    """What is tried; the present one first."""
    tried: list[Config] = [now_used(subject)]
    if subject.experts is not None:
        tried += moe.candidates(subject.experts)
    elif subject.op in gemm.TOKENS:
        tried += gemm.candidates(subject.op, dict(subject.dims), subject.is_gated)
    else:
        tried += attention.candidates(attention.now_used(subject.op, dict(subject.dims)))
    return list(dict.fromkeys(tried))


def cases(subject: Subject, device: torch.device) -> Iterator[Case]:
    """One at a time: each takes memory while it lasts."""
    d = dict(subject.dims)
    limits = tuned.ceilings(probe().name)
    read_tbps = limits.get("read_tbps")
    if subject.experts is not None:
        yield _experts_case(subject.experts, device, read_tbps)
    match subject.op:
        case "gemv" | "small_m":
            yield gemm.case(d, subject.is_gated, d["outputs"], device, read_tbps)
        case "decode":
            yield from attention.decode_cases(d, device, read_tbps)
        case "prefill":
            yield from attention.prefill_cases(d, device, limits.get("bf16_tflops"))


def compiling_cases(subject: Subject, device: torch.device) -> Iterator[Case]:
    """Small ones for which Triton makes the same binaries."""
    d = dict(subject.dims)
    if subject.experts is not None:
        yield _experts_case(subject.experts, device, None, num_slots=16)
    match subject.op:
        case "gemv" | "small_m":  # as many outputs beyond whole tiles
            outputs = 512 + d["outputs"] % 512
            yield gemm.case(d, subject.is_gated, outputs, device, None, copies=1)
        case "decode":
            yield attention.decode_case(d, d["sequences"], 512, device, None, copies=1)
        case "prefill":
            yield attention.prefill_case(d, 1, 512, device, None)


def _experts_case(
    one: ExpertGemm, device: torch.device, read_tbps: float | None, num_slots: int | None = None
) -> Case:
    """Both GEMMs of a layer; the roofline is reading the activated experts once."""
    runs = moe.runs(one, device, num_slots)
    return Case(
        f"{one.num_tokens} tokens",
        None if read_tbps is None else one.num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config) for run in runs],
        runs[0],
    )


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
        names.append((case.name, case.roofline_us))
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
