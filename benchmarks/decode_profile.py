"""Where the time of a decode step goes, kernel by kernel, each against its roofline.

The engine runs in this process; torch's profiler records the kernels of some steps. Kernels may
start while the one before still runs (and then wait for it), so durations overlap. What a kernel
adds to the step is its exclusive time: the part of it in which no kernel that began earlier still
runs. Exclusive times and idle time sum up to the step in the trace. The wall time is measured
without the profiler.
"""

import gc
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from activated_experts import count_activated
from roofline import Matrix, Roofline, roofline_of
from shapes import ROWS, Row, model_folder, prompts

if TYPE_CHECKING:
    from local_engine import LocalEngine

FIRST_KERNEL = "_decode_inputs"  # of every decode step
GEMM = re.compile(
    r"gemv|gemm|^_fp8_linear|^_logits|^_wna16|nvjet|cutlass|wgmma", re.IGNORECASE
)  # of a dense layer
# Kernels of experts, by a part of their name, and the matrices of an expert that they read.
EXPERT_KERNELS = {
    "_gate_up": ("gate_up",),
    "_down": ("down",),
    "_grouped": ("gate_up", "down"),
    "_mxfp4": ("gate_up", "down"),
    "_fp8_blocks": ("gate_up", "down"),
}
# Kernels that read the KV cache or the recurrent state.
MEMORY_KERNELS = ("_decode", "_mla_decode", "_step")
NUM_TURNS = 60  # of the engine's loop, at most one step each
NUM_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel's run, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Line:
    """All runs of one kernel for one purpose, per step."""

    name: str
    count: float = 0.0
    us: float = 0.0
    exclusive_us: float = 0.0
    roofline_us: float | None = None


def exclusive(spans: Sequence[Span]) -> list[float]:
    """Of each, the time in which none that began earlier still runs. `spans` by start."""
    free_from, times = float("-inf"), []
    for span in spans:
        times.append(max(0.0, span.end - max(span.start, free_from)))
        free_from = max(free_from, span.end)
    return times


def whole_steps(spans: Iterable[Span]) -> list[list[Span]]:
    """Decode steps that were recorded from their first kernel to the next one's, by start."""
    steps: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.name.startswith(FIRST_KERNEL):
            steps.append([])
        if steps:
            steps[-1].append(span)
    return steps[:-1]


def labels(step: Sequence[Span], roofline: Roofline) -> list[str]:
    """Names of the kernels; GEMMs with the matrix, if their number is the expected one."""
    gemms = [i for i, span in enumerate(step) if GEMM.search(span.name)]
    names = [short(span.name) for span in step]
    if len(gemms) == len(roofline.matrices):
        for i, matrix in zip(gemms, roofline.matrices, strict=True):
            names[i] = f"{matrix.name}: {names[i]}"
    return names


def short(name: str) -> str:
    """A C++ kernel without its arguments and template parameters."""
    plain = name.removeprefix("void ").partition("(")[0]
    return (plain.partition("<")[0] or plain)[-48:]


def lines_of(spans: Iterable[Span], roofline: Roofline, batch: int, context: float) -> list[Line]:
    """Means over the whole steps in `spans`, by exclusive time."""
    steps = whole_steps(spans)
    assert steps, f"no two {FIRST_KERNEL} in the trace"
    lines: dict[str, Line] = defaultdict(lambda: Line(""))
    every = [span for step in steps for span in step]
    alone = iter(exclusive(every))
    for step in steps:
        for span, label in zip(step, labels(step, roofline), strict=True):
            line = lines[label]
            line.name = label
            line.count += 1 / len(steps)
            line.us += (span.end - span.start) / len(steps)
            line.exclusive_us += next(alone) / len(steps)
    for line in lines.values():
        line.roofline_us = roofline_us(line.name, line.count, roofline, batch, context)
    return sorted(lines.values(), key=lambda line: -line.exclusive_us)


def roofline_us(
    label: str, count: float, roofline: Roofline, batch: int, context: float
) -> float | None:
    """Of all `count` runs in a step; None where it is not known what the kernel is for."""
    matrix, separator, _ = label.partition(": ")
    if separator:
        of = next(known for known in roofline.matrices if known.name == matrix)
        return count * of.roofline_s(batch, roofline.at) * 1e6  # one shape of each in all layers
    if roofline.experts is not None:
        for part, matrices in EXPERT_KERNELS.items():
            if label.startswith(part):
                return roofline.experts_s(batch, matrices) * 1e6
    if label in MEMORY_KERNELS:
        return roofline.kv_of_s(label == "_step", batch, context) * 1e6
    num_bytes = bytes_of(roofline, batch).get(label)
    return None if not num_bytes else count * num_bytes / roofline.at.read_bytes_s * 1e6


def bytes_of(roofline: Roofline, batch: int) -> dict[str, float]:
    """What one run of the small kernels reads and writes, by their names."""

    def matrix_of(name: str) -> Matrix:
        return next((m for m in roofline.matrices if m.name == name), Matrix(name, 0, 0))

    values = matrix_of("out").in_features  # of a recurrent layer
    channels = matrix_of("qkvz").out_features - values
    num_active = roofline.experts.num_active if roofline.experts else 0
    return {
        "_add_rms_norm": 4 * 2 * batch * roofline.hidden,  # two in, two out
        "_rms_norm": 4 * 2 * batch * roofline.hidden,
        "_silu_mul": 3 * batch * matrix_of("gate_up").out_features,  # half of them out
        "_rope_kv_write": 2 * 2 * batch * matrix_of("qkv").out_features,
        "_combine": 2 * batch * (num_active + 1) * roofline.hidden if num_active else 0,
        "_causal_conv": 2 * batch * channels * (2 + 2 * 3),  # in, out, and three inputs before
        "_rms_norm_gated": 3 * 2 * batch * values,
        "_best_of_split": 2 * batch * roofline.head.out_features,
        "_sum_blocks": 2 * batch * roofline.head.out_features,
    }


def decoding_engine(folder: str, row: Row, batch: int, context: int) -> "LocalEngine":
    """`batch` sequences of about `context` tokens, all of them past their prompt."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
    from local_engine import LocalEngine

    # While later prompts are read the first sequences already write.
    num_new = 4 * NUM_TURNS + 2 * batch * context // row.settings.get("max_num_tokens", 8192)
    settings = row.engine_settings(context + num_new, batch)
    settings["max_batch_size"] = batch
    settings["cuda_graph_config"] = {"batch_sizes": [batch]}
    settings["kv_cache_config"]["max_tokens"] = batch * (context + num_new + 64)
    engine = LocalEngine(folder, **settings)
    for prompt in prompts(batch, context, row.config["vocab_size"], 1):
        sampling = {"temperature": row.temperature, "seed": len(engine.inbox)}
        engine.submit(prompt, num_new, ignore_eos=True, **sampling)
    while len(engine.deltas) < batch:
        engine.turn()
    for _ in range(8):
        engine.turn()
    assert not any(d.finish for all_of in engine.deltas.values() for d in all_of)
    return engine


def profile(row: Row, roofline: Roofline, batch: int, context: int) -> dict[str, Any]:
    import torch

    with model_folder(row) as folder:
        engine = decoding_engine(folder, row, batch, context)
        torch.cuda.synchronize()
        started, before = time.perf_counter(), engine.counters.generated_tokens
        for _ in range(NUM_TURNS):
            engine.turn()
        torch.cuda.synchronize()
        num_tokens = engine.counters.generated_tokens - before
        wall_us = (time.perf_counter() - started) / (num_tokens / batch) * 1e6
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as recorded:
            for _ in range(NUM_TURNS):
                engine.turn()
            torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    lines = lines_of(spans, roofline, batch, context)
    steps = whole_steps(spans)
    traced_us = (steps[-1][-1].end - steps[0][0].start) / len(steps)
    return {
        "batch": batch,
        "context": context,
        "wall_us": wall_us,
        "roofline_us": roofline.decode_step_s(batch, context) * 1e6,
        "traced_us": traced_us,
        "idle_us": traced_us - sum(line.exclusive_us for line in lines),
        "activated_experts": roofline.num_activated(batch) if roofline.experts else None,
        "kernels": [asdict(line) for line in lines],
    }


def show(name: str, found: dict[str, Any]) -> None:
    wall, bound = found["wall_us"], found["roofline_us"]
    print(
        f"\n{name}, {found['batch']} x {found['context']}: a step takes {wall:.0f} us, roofline "
        f"{bound:.0f} us = {bound / wall:.1%}; in the trace {found['traced_us']:.0f} us, idle "
        f"{found['idle_us']:.0f} us"
    )
    if found["activated_experts"] is not None:
        print(f"activated experts of a layer: {found['activated_experts']:.1f}")
    print(
        f"{'exclusive':>10} {'share':>6} {'duration':>9} {'runs':>6} {'roofline':>9} {'of it':>6}"
    )
    for line in found["kernels"][:NUM_SHOWN]:
        least, alone = line["roofline_us"], line["exclusive_us"]
        known = "-" if least is None else f"{least:.1f}"
        reached = "-" if least is None or not alone else f"{least / alone:.0%}"
        print(
            f"{alone:10.1f} {alone / found['traced_us']:6.1%} {line['us']:9.1f} "
            f"{line['count']:6.1f} {known:>9} {reached:>6}  {line['name']}",
            flush=True,
        )


def profile_rows(
    rows: Iterable[str], batches: Sequence[int], contexts: Iterable[int]
) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("a profile needs a GPU; there is none")
    results: dict[str, Any] = {}
    for name in rows:
        results[name] = []
        activated = count_activated(ROWS[name], batches) if ROWS[name].has_experts else None
        roofline = roofline_of(ROWS[name], activated)
        for context in contexts:
            for batch in batches:
                results[name].append(profile(ROWS[name], roofline, batch, context))
                show(name, results[name][-1])
    return results
