"""The device side's only composition root: one rank's model, memory plan and runner.

Two phases, because ranks must agree on the number of cache blocks in between.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.kernels import native, triton_cache
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.attention.mla import PIECE_TOKENS
from penstock.layers.build import ExpertsBuild
from penstock.layers.decoder import Decoder
from penstock.models.registry import build_model
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import PlacedParameter
from penstock.quant.choose import choose_schemes
from penstock.runtime.batch import Rows
from penstock.runtime.cache_groups import LayerGroup, group_layers
from penstock.runtime.graphs import (
    ChunkGraphs,
    DecodeGraphs,
    GraphPool,
    chunk_inputs,
    decode_inputs,
)
from penstock.runtime.kv_tensors import KVTensors
from penstock.runtime.memory import MemoryPlan, longest_sequence, make_plan
from penstock.runtime.model_runner import ModelRunner
from penstock.sampling.sampler import Sampler
from penstock.types.cache_spec import CacheSize
from penstock.types.model_spec import ModelSpec
from penstock.types.sampling import SamplingParams
from penstock.types.step import FROM_DEVICE, BlockGrowth, Int32s, LateInputs, RowJoin, StepPlan
from penstock.weights.load import dummy_weights, load_weights

_log = log.get(__name__)
_WAYS_TO_SAMPLE = [  # with a penalty it is from an fp32 copy of the logits
    SamplingParams(temperature=temperature, top_p=top_p, presence_penalty=penalty)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
    for penalty in (0.0, 0.1)
]


class Timeline:
    """Named phases of a start, in order, with their seconds. `begun_at`: of the whole start."""

    def __init__(self, begun_at: float | None = None) -> None:
        self.phases: list[tuple[str, float]] = []
        self._begun_at = begun_at

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases.append((name, time.perf_counter() - started))

    def add_rest(self) -> None:
        """What was in no phase, as the last one: all of them are then what somebody waited."""
        if self._begun_at is not None:
            self.phases.append(("other", max(0.0, time.time() - self._begun_at - self._total_s)))

    @property
    def _total_s(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.phases]
        return f"{self._total_s:.1f} s ({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A part of what a start runs so that kernels are compiled."""

    has_steps: bool = False  # where memory is planned
    has_sampling: bool = False
    eager_sizes: tuple[int, ...] = ()  # of steps of prompts
    batch_sizes: tuple[int, ...] = ()  # of decodes, in graphs or not
    token_sizes: tuple[int, ...] = ()  # of graphs of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    model: Decoder
    mesh: RankMesh
    device: torch.device
    memory: MemoryPlan
    groups: tuple[LayerGroup, ...]


def rank_device(config: RunConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())  # ranks fill node after node
    torch.cuda.set_device(device)
    return device


def load_rank(config: RunConfig, spec: ModelSpec, mesh: RankMesh, timeline: Timeline) -> LoadedRank:
    """This rank's weights on its device, and how many cache blocks fit beside them."""
    for choice in config.choices:
        if choice.name == "moe_backend" and mesh.rank == 0:
            _log.info("experts run on %s: %s", choice.value, choice.reason)
    model, device, weights = load_model(config, spec, mesh, timeline)
    with timeline.phase("plan memory"):
        groups = group_layers(model.cache_layers(), config)
        memory = _plan_memory(config, spec, model, groups, mesh, device, weights)
    return LoadedRank(model=model, mesh=mesh, device=device, memory=memory, groups=groups)


def load_model(
    config: RunConfig, spec: ModelSpec, mesh: RankMesh, timeline: Timeline
) -> tuple[Decoder, torch.device, int]:
    """(model, where it is, bytes of its weights)"""
    torch.set_num_threads(config.num_threads)
    device = rank_device(config, mesh.rank)
    if device.type == "cpu":
        with timeline.phase("prepare native ops"):
            native.set_num_threads(config.num_threads)
            native.set_coarse(config.coarse_products)
    else:
        triton_cache.use_cache_folder()
    with timeline.phase("build model"):
        model = _unfilled_model(config, spec, mesh, device)
    with timeline.phase("load weights"), torch.inference_mode():
        if config.load_format == "dummy":
            dummy_weights(model, config.seed)
        else:
            path = Path(config.model_path)
            load_weights(model, path, spec, mesh, progress=mesh.rank == 0)
        weights = sum(cast(PlacedParameter, p).num_bytes for p in model.parameters())
        model.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return model, device, weights


def _unfilled_model(
    config: RunConfig, spec: ModelSpec, mesh: RankMesh, device: torch.device
) -> Decoder:
    dtype, by_reference = getattr(torch, config.dtype), config.moe_backend == "reference"
    path = None if config.load_format == "dummy" else Path(config.model_path)
    schemes = choose_schemes(
        spec.quantization, path, dtype, device, by_reference, config.quantization
    )
    experts = ExpertsBuild(
        by_reference=by_reference, max_tokens=config.moe_max_tokens, num_sets=config.ep_size
    )
    backend, cache_dtype = get_backend(config.attention_backend), getattr(torch, config.kv_dtype)
    return build_model(spec, mesh, dtype, device, backend, schemes, cache_dtype, experts)


def most_weight_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """About what the weights take on a device of this kind, and no less. Needs none."""
    model = _unfilled_model(config, spec, RankMesh.single(), torch.device("meta"))
    placed = [cast(PlacedParameter, parameter) for parameter in model.parameters()]
    # Parameters that are made while they are read have no size yet; no number takes more than 8
    # bits where they are.
    return sum(max(p.num_bytes, sum(piece.num_values for piece in p.pieces)) for p in placed)


def _plan_memory(
    config: RunConfig,
    spec: ModelSpec,
    model: Decoder,
    groups: tuple[LayerGroup, ...],
    mesh: RankMesh,
    device: torch.device,
    weights: int,
) -> MemoryPlan:
    if device.type == "cpu":
        return make_plan(config, weights=weights, activations=0, free=0, groups=groups)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # The largest step there can be, on a cache of two blocks: what counts is its peak, not its
    # result.
    runner, _ = _wire(config, spec, model, groups, mesh, device, [2] * len(groups))
    run_steps(runner, config)
    run_sizes(runner, model, config, eager_sizes(config))
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return make_plan(config, weights=weights, activations=activations, free=free, groups=groups)


def run_steps(runner: ModelRunner, config: RunConfig) -> None:
    """The largest there is, for its peak of memory, and short ones."""
    short = _short_steps(config) if config.max_batch_size > 1 else ()
    for plan in (_largest_step(config), *short):
        runner.forward(plan)
        runner.sample(plan.step_id, LateInputs())


def run_sizes(runner: ModelRunner, model: Decoder, config: RunConfig, sizes: Sequence[int]) -> None:
    """Steps of prompts of so many tokens: what chooses kernels by their number has chosen."""
    with model.shortened():
        for size in sizes:
            num_rows = -(-size // config.max_seq_len)
            plan = _prompts(size, num_rows, config)
            runner.forward(plan)
            runner.sample(plan.step_id, LateInputs())


def eager_sizes(config: RunConfig) -> tuple[int, ...]:
    """Numbers of tokens of a step: powers of two, what follows them, and three in between.

    Kernels are the same within ranges that end at a power of two or somewhere on the way to it;
    each has one of these.
    """
    most = min(config.max_num_tokens, config.max_batch_size * config.max_seq_len)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    sizes = {p + more for p in powers for more in (0, 1, p // 4, p // 2, p // 4 * 3)}
    return tuple(sorted(size for size in sizes if size <= most))


def eager_decodes(config: RunConfig) -> tuple[int, ...]:
    """The same of steps of decodes, those that no graph takes."""
    graphs = config.graph_batch_sizes if config.graph_padding else ()
    most_in_graphs = max(graphs, default=0)
    return tuple(n for n in eager_sizes(config) if most_in_graphs < n <= config.max_batch_size)


def run_decodes(
    runner: ModelRunner, model: Decoder, rows: Rows, longest: int, sizes: Sequence[int]
) -> None:
    step = runner.decode_step(longest)
    with model.shortened():
        for size in sizes:
            step(decode_inputs(rows, size))


def _largest_step(config: RunConfig) -> StepPlan:
    """One prompt as long as a step may be (or several), and all rows asking for logits."""
    return _prompts(
        config.max_num_tokens, min(config.max_batch_size, config.max_num_tokens), config
    )


def _prompts(num_tokens: int, num_rows: int, config: RunConfig) -> StepPlan:
    """So many tokens in so many rows, or fewer where texts are no longer.

    The last one goes on from a cached text, which some layers bring into another form in pieces.
    """
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[0] += num_tokens - lengths.sum()
    lengths = np.minimum(lengths, config.max_seq_len)
    rows = np.arange(num_rows, dtype=np.int32)
    starts = np.zeros_like(rows)
    starts[-1] = min(PIECE_TOKENS, config.max_seq_len - lengths[-1])
    joins = tuple(
        RowJoin(
            request_id=0, rank=0, row=row, token_ids=np.zeros(end, np.int32), num_cached=0,
            num_prompt=int(end), sampling=SamplingParams(), stop_ids=(),
        )
        for row, end in enumerate(starts + lengths)
    )  # fmt: skip
    return _step(0, rows, starts, lengths, starts + lengths, num_decodes=0, joins=joins)


def _short_steps(config: RunConfig) -> tuple[StepPlan, StepPlan]:
    """After the largest, where there are two rows: a prompt, and its answer beside another prompt,
    which take kernels that no other step at start does. They are the first tokens of its texts."""
    length = min(2, config.max_num_tokens // config.max_batch_size)
    one, both = np.array([length], np.int32), np.array([1, length], np.int32)
    alone = _step(1, np.array([1], np.int32), one * 0, one, one, num_decodes=0)
    rows, starts = np.array([1, 0], np.int32), np.array([FROM_DEVICE, 0], np.int32)
    beside = _step(2, rows, starts, both, both + length, num_decodes=1)
    return alone, beside


def _step(
    step_id: int,
    rows: Int32s,
    starts: Int32s,
    lengths: Int32s,
    max_kv_lens: Int32s,
    *,
    num_decodes: int,
    joins: tuple[RowJoin, ...] = (),
) -> StepPlan:
    """One that nobody asked for: no blocks, and every row wants logits."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step_id=step_id,
        joins=joins,
        growth=BlockGrowth(ranks=none, groups=none, rows=none, indices=none, block_ids=none),
        cache_ops=(),
        ranks=np.zeros_like(rows),
        rows=rows,
        starts=starts,
        num_tokens=lengths,
        num_logit_rows=np.ones_like(rows),
        max_kv_lens=max_kv_lens,
        num_decodes=num_decodes,
        padded_tokens=int(lengths.sum()),
        needs_late_inputs=False,
    )


def rehearse(parts: Sequence[Rehearsal], config: RunConfig, spec: ModelSpec) -> None:
    """Run once, eagerly and on random weights, what these parts name."""
    mesh = RankMesh.single()
    model, device, _ = load_model(config, spec, mesh, Timeline())
    groups = group_layers(model.cache_layers(), config)
    runner, rows = _wire(config, spec, model, groups, mesh, device, [2] * len(groups))
    chunks = runner.chunk_step(config.max_seq_len)
    for part in parts:
        if part.has_steps:
            run_steps(runner, config)
        run_sizes(runner, model, config, part.eager_sizes)
        if part.has_sampling:
            rehearse_sampling(model, mesh, device, config, spec)
        run_decodes(runner, model, rows, config.max_seq_len, part.batch_sizes)
        for size in part.token_sizes if _captures_chunks(model) else ():
            chunks(chunk_inputs(rows, size))


@torch.inference_mode()
def rehearse_sampling(
    model: Decoder, mesh: RankMesh, device: torch.device, config: RunConfig, spec: ModelSpec
) -> None:
    """Each way to a token once: its kernels are compiled before somebody waits for them."""
    dtype = getattr(torch, config.dtype)
    logits_LV = model.logits(torch.zeros(2, spec.hidden_size, dtype=dtype, device=device))
    if not mesh.is_sampling_rank:
        return
    sampler = Sampler(2, spec.vocab_size, device, seed=0)
    rows = np.arange(2, dtype=np.int32)
    rows_L = torch.arange(2, device=device)
    for sampling in _WAYS_TO_SAMPLE:
        sampler.join(
            [
                RowJoin(
                    request_id=0, rank=0, row=int(row), token_ids=np.zeros(1, np.int32),
                    num_cached=0, num_prompt=1, sampling=sampling, stop_ids=(),
                )
                for row in rows
            ]
        )  # fmt: skip
        sampler.sample(logits_LV, rows, rows_L, rows_L.int())


def _wire(
    config: RunConfig,
    spec: ModelSpec,
    model: Decoder,
    groups: tuple[LayerGroup, ...],
    mesh: RankMesh,
    device: torch.device,
    num_blocks: Sequence[int],
) -> tuple[ModelRunner, Rows]:
    # A step in flight may write one token beyond a sequence's end.
    most_tokens = config.max_seq_len + config.depth
    max_blocks = -(-most_tokens // config.tokens_per_block)
    block_size = config.tokens_per_block
    paged = [not group.has_states for group in groups]
    rows = Rows(config.max_batch_size, max_blocks, block_size, device, paged)
    kv = KVTensors(groups, num_blocks, block_size, device, config.host_cache_bytes)
    sampler = Sampler(config.max_batch_size, spec.vocab_size, device, config.seed)
    return ModelRunner(model, rows, kv, sampler, mesh), rows


def finish_rank(
    loaded: LoadedRank, config: RunConfig, spec: ModelSpec, cache: CacheSize, timeline: Timeline
) -> ModelRunner:
    """The runner with its cache, and its graphs captured."""
    with timeline.phase("allocate cache"):
        runner, rows = _wire(
            config, spec, loaded.model, loaded.groups, loaded.mesh, loaded.device,
            cache.num_blocks,
        )  # fmt: skip
    longest = longest_sequence(config, cache)
    if loaded.device.type == "cuda":
        with timeline.phase("rehearse"):
            rehearse_sampling(loaded.model, loaded.mesh, loaded.device, config, spec)
            run_decodes(runner, loaded.model, rows, longest, eager_decodes(config))
        if config.graph_batch_sizes:
            _capture_graphs(runner, rows, loaded, config, longest, timeline)
        triton_cache.report_compilations()
    elif config.tp_size == 1:
        runner.use_tapes(longest)
    return runner


def _captures_chunks(model: Decoder) -> bool:
    return all(layer.captures_chunks for layer in model.cache_layers())


def _capture_graphs(
    runner: ModelRunner,
    rows: Rows,
    loaded: LoadedRank,
    config: RunConfig,
    longest: int,
    timeline: Timeline,
) -> None:
    token_sizes = config.graph_token_sizes if _captures_chunks(loaded.model) else ()
    num_graphs = len(config.graph_batch_sizes) + len(token_sizes)
    with timeline.phase(f"capture {num_graphs} graphs"):
        before, pool = torch.cuda.memory_reserved(), GraphPool()
        chunk_graphs = None
        if token_sizes:
            chunk_graphs = ChunkGraphs(runner.chunk_step(longest), token_sizes, rows)
            chunk_graphs.capture(pool)
        graphs = DecodeGraphs(
            runner.decode_step(longest), config.graph_batch_sizes, config.graph_padding, rows
        )
        graphs.capture(pool)
        runner.use_graphs(graphs, chunk_graphs)
        taken = torch.cuda.memory_reserved() - before
    _log.info(
        "graphs took %.2f GiB, %.2f GiB were planned",
        taken / 2**30,
        loaded.memory.graphs / 2**30,
    )
