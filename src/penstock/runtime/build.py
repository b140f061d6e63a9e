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
from penstock.runtime.graphs import ChunkGraphs, DecodeGraphs, GraphPool
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
    """Named phases of a start, in order, with their seconds."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases.append((name, time.perf_counter() - started))

    def __str__(self) -> str:
        total = sum(seconds for _, seconds in self.phases)
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.phases]
        return f"{total:.1f} s ({', '.join(parts)})"


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
    torch.set_num_threads(config.num_threads)
    device = rank_device(config, mesh.rank)
    if device.type == "cpu":
        with timeline.phase("prepare native ops"):
            native.set_num_threads(config.num_threads)
            native.set_coarse(config.coarse_products)
    else:
        triton_cache.use_cache_folder()
    for choice in config.choices:
        if choice.name == "moe_backend" and mesh.rank == 0:
            _log.info("experts run on %s: %s", choice.value, choice.reason)
    with timeline.phase("build model"):
        dtype = getattr(torch, config.dtype)
        backend = get_backend(config.attention_backend)
        path, is_dummy = Path(config.model_path), config.load_format == "dummy"
        by_reference = config.moe_backend == "reference"
        schemes = choose_schemes(
            spec.quantization,
            None if is_dummy else path,
            dtype,
            device,
            by_reference,
            config.quantization,
        )
        cache_dtype = getattr(torch, config.kv_dtype)
        experts = ExpertsBuild(
            by_reference=by_reference,
            max_tokens=config.moe_max_tokens,
            num_sets=config.ep_size,
        )
        model = build_model(spec, mesh, dtype, device, backend, schemes, cache_dtype, experts)
    with timeline.phase("load weights"), torch.inference_mode():
        if is_dummy:
            dummy_weights(model, config.seed)
        else:
            load_weights(model, path, spec, mesh, progress=mesh.rank == 0)
        weights = sum(cast(PlacedParameter, p).num_bytes for p in model.parameters())
        model.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with timeline.phase("plan memory"):
        groups = group_layers(model.cache_layers(), config)
        memory = _plan_memory(config, spec, model, groups, mesh, device, weights)
    return LoadedRank(model=model, mesh=mesh, device=device, memory=memory, groups=groups)


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
    short = _short_steps(config) if config.max_batch_size > 1 else ()
    for plan in (_largest_step(config), *short):
        runner.forward(plan)
        runner.sample(plan.step_id, LateInputs())
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return make_plan(config, weights=weights, activations=activations, free=free, groups=groups)


def _largest_step(config: RunConfig) -> StepPlan:
    """One prompt as long as a step may be (or several), and all rows asking for logits.

    The last one goes on from a cached text, which some layers bring into another form in pieces.
    """
    num_rows = min(config.max_batch_size, config.max_num_tokens)
    lengths = np.full(num_rows, config.max_num_tokens // num_rows, np.int32)
    lengths[0] += config.max_num_tokens - lengths.sum()
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


@torch.inference_mode()
def rehearse_sampling(loaded: LoadedRank, config: RunConfig, spec: ModelSpec) -> None:
    """Each way to a token once: its kernels are compiled before somebody waits for them."""
    device, dtype = loaded.device, getattr(torch, config.dtype)
    logits_LV = loaded.model.logits(torch.zeros(2, spec.hidden_size, dtype=dtype, device=device))
    if not loaded.mesh.is_sampling_rank:
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
    kv = KVTensors(groups, num_blocks, block_size, device)
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
    if loaded.device.type == "cuda":
        with timeline.phase("rehearse sampling"):
            rehearse_sampling(loaded, config, spec)
        if config.graph_batch_sizes:
            _capture_graphs(runner, rows, loaded, config, longest_sequence(config, cache), timeline)
        triton_cache.report_compilations()
    elif config.tp_size == 1:
        runner.use_tapes(longest_sequence(config, cache))
    return runner


def _capture_graphs(
    runner: ModelRunner,
    rows: Rows,
    loaded: LoadedRank,
    config: RunConfig,
    longest: int,
    timeline: Timeline,
) -> None:
    token_sizes = config.graph_token_sizes
    if not all(layer.captures_chunks for layer in loaded.model.cache_layers()):
        token_sizes = ()
    num_graphs = len(config.graph_batch_sizes) + len(token_sizes)
    with timeline.phase(f"capture {num_graphs} graphs"):
        before, pool = torch.cuda.memory_reserved(), GraphPool()
        chunk_graphs = None
        if token_sizes:
            chunk_graphs = ChunkGraphs(runner.chunk_step(longest), token_sizes, rows)
            chunk_graphs.capture(pool)
        graphs = DecodeGraphs(
            runner.decode_step(longest),
            config.graph_batch_sizes,
            config.graph_padding,
            rows.padding_row,
            loaded.device,
        )
        graphs.capture(pool)
        runner.use_graphs(graphs, chunk_graphs)
        taken = torch.cuda.memory_reserved() - before
    _log.info(
        "graphs took %.2f GiB, %.2f GiB were planned",
        taken / 2**30,
        loaded.memory.graphs / 2**30,
    )
