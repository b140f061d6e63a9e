"""Steps that mix decodes and prompt tokens: are graphs right, and what does a step take?

    PYTHONPATH=src python benchmarks/mixed_step.py [--output FILE]
    PYTHONPATH=src python benchmarks/mixed_step.py --only check | times --rows 8b-bf16
    PYTHONPATH=src python benchmarks/mixed_step.py --rows tiny --decodes 1 4 --tokens 0 9

Checks, of small models of every architecture with random weights: the engine serves prompts that
arrive while others decode, with some prefixes shared. Every step runs from the same device state
eagerly and as a graph; logits, lengths and cache must agree. Where activations are quantized, a
last bit decides between two FP8 numbers and soon between experts: such a model is checked without
quantization, and as it is against a third run, eager with embeddings that are off by a rounding
error: of graphs no more rows may be far than of that.

Times, of the rows of the table: a step of so many decodes behind `--context` tokens, and a chunk of
so many prompt tokens, eagerly and as a graph. host: until the step is enqueued. step: until the
device is done, with nothing enqueued before. alone: what the kernels of GEMMs, experts and
attention take in the eager step, by the profiler. The step in a graph may take 1.2 times that.

Without a GPU there are no graphs: steps are padded like them and run anew, and `alone` is missing.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from decode_profile import EXPERT_KERNELS, GEMM
from graph_steps import Repeats
from local_engine import LocalEngine
from shapes import ROWS, Row, model_folder, prompts
from torch import Tensor

from penstock.config.graphs import CudaGraphConfig
from penstock.runtime.mixed_graphs import MixedGraphs
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.step_layout import StepShape
from penstock.types.sampling import SamplingParams
from penstock.types.step import FROM_DEVICE, BlockGrowth, Int32s, LateInputs, RowJoin, StepPlan

CHECKED = ("tiny", "tiny-moe", "tiny-oss", "tiny-next", "tiny-r1")
TIMED = ("8b-bf16", "oss-120b", "30b-a3b")
DECODES, TOKENS = (1, 8, 32, 128, 256), (0, 43, 128, 256, 512)
BOUND, BOUND_AT = 1.2, (32, 256)
ATTENTION = ("_prefill", "reduce_splits", "_mla_", "_solve_chunks", "_walk_chunks", "_causal_conv")
ATTENTION_WHOLE = ("_decode", "_step")  # whole names: `_decode_inputs` is something else
# Of a prompt that arrives every few turns; every third one begins as another did.
ARRIVALS = (3, 43, 130, 9, 200, 1, 64, 17, 31, 90, 5, 150)


def settings_of(row: Row, max_seq_len: int, max_batch_size: int) -> dict[str, Any]:
    settings = row.engine_settings(max_seq_len, max_batch_size)
    settings["cuda_graph_config"] |= {"enable_mixed": True}
    return settings


def start(row: Row, folder: str, settings: dict[str, Any]) -> tuple[LocalEngine, ModelRunner]:
    """The engine with all its graphs, those of idle times included."""
    if not torch.cuda.is_available():
        settings = settings | {"device": "cpu", "attn_backend": "reference"}
    engine = LocalEngine(folder, **settings)
    runner: ModelRunner = engine.runner
    if torch.cuda.is_available():
        for _ in engine.engine.config.graph_mixes_when_idle:
            runner.when_idle()
        torch.cuda.synchronize()
    else:
        runner._cpu_graphs = None
        runner._mixed_graphs = stand_in(runner, engine.engine.config.max_batch_size)
    return engine, runner


def stand_in(runner: ModelRunner, max_rows: int) -> MixedGraphs:
    at_start, when_idle = CudaGraphConfig(enable_mixed=True).mixes(max_rows, 512)
    shapes = [StepShape(*mix) for mix in at_start + when_idle] + [StepShape(0, 512)]
    graphs = MixedGraphs(
        lambda shape: runner.padded_step(shape, 512), shapes, (), runner._rows,
        Repeats(),  # type: ignore[arg-type]
        runner._model.shortened, None,
    )  # fmt: skip
    graphs.capture()
    return graphs


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    graphs = runner._graphs, runner._mixed_graphs
    runner._graphs = runner._mixed_graphs = None
    try:
        yield
    finally:
        runner._graphs, runner._mixed_graphs = graphs


# Checks


@dataclass
class Found:
    """Of all steps with prompts of one engine."""

    row: str
    dtype: str
    is_quantized: bool
    num_steps: int = 0
    num_in_graphs: int = 0
    num_rows: int = 0
    num_far: int = 0  # rows of logits beyond the bound
    num_far_by_noise: int = 0  # the same of the third run
    worst: float = 0.0  # difference, as a share of the largest logit of its row
    worst_cached: float = 0.0  # the same of what a step writes to the cache

    @property
    def is_right(self) -> bool:
        """What is rounded to 16 bits may fall to the other side: a few rows then choose other
        experts."""
        allowed = self.num_far_by_noise + (0.0 if self.dtype == "float32" else 0.03 * self.num_rows)
        return self.num_in_graphs > 0 and self.num_far <= allowed


class DeviceState:
    """All that a step reads and writes on the device."""

    def __init__(self, runner: ModelRunner) -> None:
        rows = runner._rows
        self._tensors = [rows.lengths_R, rows.last_tokens_R, *rows.block_tables]
        self._planes = [plane for planes in runner._kv._groups for plane in planes]

    def copy(self) -> list[Tensor]:
        return [x.clone() for x in (*self._tensors, *self._planes)]

    def restore(self, saved: Sequence[Tensor]) -> None:
        for x, old in zip((*self._tensors, *self._planes), saved, strict=True):
            x.copy_(old)

    def difference(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """Of the caches without block 0, which is padding's; lengths and tables must be equal."""
        num = len(self._tensors)
        for x, y in zip(one[:num], other[:num], strict=True):
            assert torch.equal(x, y), "lengths, last tokens or block tables differ"
        worst = 0.0
        for x_LB, y_LB in zip(one[num:], other[num:], strict=True):
            x, y = x_LB[:, 1:].float(), y_LB[:, 1:].float()
            largest = x.abs().amax().clamp(min=1e-9)
            worst = max(worst, float((x - y).abs().amax() / largest))
        return worst


@contextmanager
def noise(runner: ModelRunner) -> Iterator[None]:
    """Embeddings off by as much as rounding to 16 bits."""
    weight = runner._model.embed.weight
    assert isinstance(weight, Tensor)
    exact = weight.clone()
    generator = torch.Generator(weight.device).manual_seed(0)
    off = torch.randn(weight.shape, generator=generator, device=weight.device)
    with torch.inference_mode():
        weight.mul_((1 + 2**-9 * off).to(weight.dtype))
    try:
        yield
    finally:
        with torch.inference_mode():
            weight.copy_(exact)


def distances(one_LV: Tensor, other_LV: Tensor) -> Tensor:
    """Of each row, as a share of its largest logit."""
    return (one_LV - other_LV).abs().amax(1) / other_LV.abs().amax(1).clamp(min=1e-9)


def check(name: str, dtype: str, is_quantized: bool) -> Found:
    row, found = ROWS[name], Found(name, dtype, is_quantized)
    if not is_quantized:
        row = replace(row, changes={**row.changes, "quantization_config": None})
    bound = 1e-3 if dtype == "float32" else 0.05
    with model_folder(row) as folder:
        settings = settings_of(row, 512, 16) | {"dtype": dtype, "max_num_tokens": 256}
        settings["kv_cache_config"] = {"max_tokens": 8192}
        settings["scheduler_config"] = {"max_prompt_tokens_beside_decodes": 128}
        engine, runner = start(row, folder, settings)
        state, forward = DeviceState(runner), runner.forward

        def both(plan: StepPlan) -> None:
            if plan.num_decodes == plan.num_entries:
                return forward(plan)
            before = state.copy()

            def eager() -> Tensor:
                with without_graphs(runner):
                    forward(plan)
                logits_LV = runner._forwarded.pop(plan.step_id).logits_LV
                return logits_LV.float().clone()

            logits_LV, after_eager = eager(), state.copy()
            state.restore(before)
            if is_quantized:
                with noise(runner):
                    noisy_LV = eager()
                state.restore(before)
            forward(plan)
            got = runner._forwarded[plan.step_id]
            found.num_steps += 1
            found.num_in_graphs += got.ran_as == "graph"
            found.worst_cached = max(
                found.worst_cached, state.difference(after_eager, state.copy())
            )
            if len(got.rows):
                far_L = distances(got.logits_LV.float(), logits_LV)
                found.num_rows += len(far_L)
                found.num_far += int((~(far_L <= bound)).sum())  # NaN is far
                found.worst = max(found.worst, float(far_L.amax()))
                if is_quantized:
                    found.num_far_by_noise += int((distances(noisy_LV, logits_LV) > bound).sum())
            return None

        runner.forward = both  # type: ignore[method-assign]
        texts = prompts(len(ARRIVALS), max(ARRIVALS), row.config["vocab_size"], 1)
        for number, length in enumerate(ARRIVALS):
            text = texts[number - 2] if number % 3 == 2 else texts[number]
            engine.submit(text[:length], 20, ignore_eos=True)
            for _ in range(3):
                engine.turn()
        engine.run()
    return found


# Times


@dataclass
class Times:
    row: str
    decodes: int
    tokens: int
    ran_as: str
    eager_host_us: float
    eager_step_us: float
    graph_host_us: float
    graph_step_us: float
    alone_us: float | None

    @property
    def ratio(self) -> float | None:
        return self.graph_step_us / self.alone_us if self.alone_us else None


def arrange(runner: ModelRunner, num_decodes: int, num_tokens: int, context: int) -> StepPlan:
    """A step of rows that have `context` tokens, and one prompt. Their cache holds zeros."""
    rows = runner._rows
    with torch.inference_mode():
        rows.lengths_R[:num_decodes] = context
        rows.last_tokens_R.random_(0, runner._model.embed.vocab_size)
        for table_RM, planes in zip(rows.block_tables, runner._kv._groups, strict=True):
            num_blocks = planes[0].shape[1]
            blocks = 1 + torch.arange(table_RM[:-1].numel(), device=rows.device) % (num_blocks - 1)
            table_RM[:-1] = blocks.view(table_RM[:-1].shape)
    num_chunks = int(num_tokens > 0)
    all_rows = np.arange(num_decodes + num_chunks, dtype=np.int32)
    ids = np.random.default_rng(0).integers(0, runner._model.embed.vocab_size, max(num_tokens, 1))
    joins = tuple(
        RowJoin(
            request_id=0, dp_rank=0, row=int(row), token_ids=ids.astype(np.int32), num_computed=0,
            num_prompt=len(ids), sampling=SamplingParams(temperature=0.0), stop_ids=(),
        )
        for row in all_rows
    )  # fmt: skip
    none = np.zeros(0, np.int32)

    def column(of_decodes: int, of_chunk: int) -> Int32s:
        return np.array([of_decodes] * num_decodes + [of_chunk] * num_chunks, np.int32)

    return StepPlan(
        step_id=0,
        joins=joins,
        growth=BlockGrowth(dp_ranks=none, groups=none, rows=none, indices=none, block_ids=none),
        cache_ops=(),
        dp_ranks=column(0, 0),
        rows=all_rows,
        starts=column(FROM_DEVICE, 0),
        num_tokens=column(1, num_tokens),
        num_logit_rows=column(1, 1),
        max_kv_lens=column(context + 256, num_tokens),
        num_decodes=num_decodes,
        needs_late_inputs=False,
    )


def give_back() -> None:
    """The memory of an engine that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_step(runner: ModelRunner, plan: StepPlan) -> str:
    runner.forward(plan)
    ran_as = runner._forwarded[plan.step_id].ran_as
    runner.sample(plan.step_id, LateInputs())
    return str(ran_as)


def timed(runner: ModelRunner, plan: StepPlan, repeats: int) -> tuple[float, float, str]:
    """(host, step) in us, medians; how it ran."""
    hosts, steps, ran_as = [], [], ""
    for _ in range(repeats + 2):  # the first ones warm up
        synchronize()
        started = time.perf_counter()
        ran_as = run_step(runner, plan)
        enqueued = time.perf_counter()
        synchronize()
        hosts.append((enqueued - started) * 1e6)
        steps.append((time.perf_counter() - started) * 1e6)
    return statistics.median(hosts[2:]), statistics.median(steps[2:]), ran_as


def is_counted(kernel: str) -> bool:
    """Whether it is a GEMM's, experts' or attention's."""
    if GEMM.search(kernel) or kernel in ATTENTION_WHOLE:
        return True
    return kernel.startswith((*ATTENTION, *EXPERT_KERNELS))


def alone_us(runner: ModelRunner, plan: StepPlan, repeats: int) -> float | None:
    if not torch.cuda.is_available():
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded, without_graphs(runner):
        for _ in range(repeats):
            run_step(runner, plan)
        synchronize()
    return (
        sum(
            event.time_range.elapsed_us()
            for event in recorded.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and is_counted(event.name)
        )
        / repeats
    )


def time_row(
    name: str, decodes: Sequence[int], tokens: Sequence[int], context: int, repeats: int
) -> list[Times]:
    row, found = ROWS[name], []
    with model_folder(row) as folder:
        # Lengths grow by a token with every run.
        longest = context + 8 * (repeats + 4) + max(tokens)
        _, runner = start(row, folder, settings_of(row, longest, max(decodes) + 1))
        for num_decodes in decodes:
            for num_tokens in tokens:
                plan = arrange(runner, num_decodes, num_tokens, context)
                with without_graphs(runner):
                    eager_host, eager_step, _ = timed(runner, plan, repeats)
                alone = alone_us(runner, plan, repeats)
                graph_host, graph_step, ran_as = timed(runner, plan, repeats)
                found.append(
                    Times(
                        name, num_decodes, num_tokens, ran_as, eager_host, eager_step, graph_host,
                        graph_step, alone,
                    )
                )  # fmt: skip
                show(found[-1])
    return found


def show(times: Times) -> None:
    alone = "-" if times.alone_us is None else f"{times.alone_us:.0f}"
    ratio = "-" if times.ratio is None else f"{times.ratio:.2f}"
    print(
        f"{times.row:>12} {times.decodes:4} + {times.tokens:3}: "
        f"eager host {times.eager_host_us:7.0f} step {times.eager_step_us:7.0f}, "
        f"{times.ran_as:>5} host {times.graph_host_us:7.0f} step {times.graph_step_us:7.0f} us; "
        f"alone {alone:>6}, x {ratio}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("check", "times"))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="of the table")
    parser.add_argument("--decodes", nargs="+", type=int, default=list(DECODES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a JSON file")
    asked = parser.parse_args(arguments)
    failures, checks, times = [], [], []
    if asked.only != "times":
        dtypes = ("float32", "bfloat16") if torch.cuda.is_available() else ("float32",)
        for name in asked.rows or CHECKED:
            has_quantized = "quantization_config" in ROWS[name].config
            for dtype, is_quantized in itertools.product(dtypes, (False, True)):
                if is_quantized and not has_quantized:
                    continue
                found = check(name, dtype, is_quantized)
                give_back()
                checks.append(asdict(found))
                print(f"{'right' if found.is_right else 'WRONG'}: {found}", flush=True)
                failures += [] if found.is_right else [f"{name} in {dtype} differs"]
    if asked.only != "check":
        for name in asked.rows or TIMED:
            give_back()
            for one in time_row(name, asked.decodes, asked.tokens, asked.context, asked.repeats):
                times.append(asdict(one) | {"ratio": one.ratio})
                is_bound = (one.decodes, one.tokens) == BOUND_AT
                if is_bound and one.ratio is not None and one.ratio > BOUND:
                    failures.append(f"{name}: {one.ratio:.2f} times what its kernels take alone")
    if asked.output:
        asked.output.write_text(json.dumps({"checks": checks, "times": times}, indent=1))
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
