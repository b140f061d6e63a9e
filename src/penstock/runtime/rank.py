"""The device side's composition root: one rank's model, memory plan, cache and runner.

Two phases, `load_rank` and `finish_rank`: between them ranks agree on the size of the cache.
"""

from dataclasses import dataclass

import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.kernels import triton_cache
from penstock.kernels.device import available_bytes, resident_bytes
from penstock.layers.decoder import Decoder
from penstock.parallel.mesh import RankMesh
from penstock.runtime.adapters import make_batch_fields
from penstock.runtime.batch_fields import BatchField
from penstock.runtime.cache_groups import LayerGroup, group_layers
from penstock.runtime.capture import capture_graphs
from penstock.runtime.drafter import make_drafter
from penstock.runtime.expert_balancer import balancing
from penstock.runtime.input_batch import Rows
from penstock.runtime.kv_tensors import KVTensors
from penstock.runtime.measure import measure_costs
from penstock.runtime.memory import MemoryPlan, cpu_activations, longest_sequence, make_plan
from penstock.runtime.mixed_graphs import all_shapes, most_captured_tokens
from penstock.runtime.model_loader import load_model, max_row_tokens
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.profile_steps import eager_decodes, eager_sizes
from penstock.runtime.stage_link import StageLink
from penstock.runtime.timeline import Timeline
from penstock.runtime.warmup import (
    run_decodes,
    run_padded,
    run_sizes,
    run_steps,
    warm_up_sampling,
)
from penstock.sampling.sampler import Sampler
from penstock.types.cache_spec import CacheSize
from penstock.types.model_spec import ModelSpec

_log = log.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    model: Decoder
    mesh: RankMesh
    device: torch.device
    memory: MemoryPlan
    groups: tuple[LayerGroup, ...]
    fields: tuple[BatchField, ...] = ()


def load_rank(config: RunConfig, spec: ModelSpec, mesh: RankMesh, timeline: Timeline) -> LoadedRank:
    """This rank's weights on its device, and how many cache blocks fit beside them."""
    for choice in config.choices:
        if choice.name == "moe_backend" and mesh.rank == 0:
            _log.info("experts run on %s: %s", choice.value, choice.reason)
    process = resident_bytes()
    model, device, weights = load_model(config, spec, mesh, timeline)
    with timeline.phase("plan memory"):
        groups = group_layers(model.cache_layers(), config)
        fields = make_batch_fields(config, model, device)
        for field in fields:
            field.start()
            weights += field.num_bytes
        memory = _plan_memory(config, spec, model, groups, mesh, device, weights, process, fields)
    return LoadedRank(
        model=model, mesh=mesh, device=device, memory=memory, groups=groups, fields=fields
    )


def _plan_memory(
    config: RunConfig,
    spec: ModelSpec,
    model: Decoder,
    groups: tuple[LayerGroup, ...],
    mesh: RankMesh,
    device: torch.device,
    weights: int,
    process: int,
    fields: tuple[BatchField, ...],
) -> MemoryPlan:
    if device.type == "cpu":
        return make_plan(
            config,
            weights=weights,
            activations=cpu_activations(config, spec),
            # The pages of fields are taken when they are written.
            free=available_bytes() // (config.mesh.size * config.num_replicas)
            - sum(field.num_bytes for field in fields),
            groups=groups,
            process=process,
        )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # The largest step there can be: what counts is its peak, not its result.
    cache = trial_cache(config, groups)
    runner, _ = wire_runner(config, spec, model, groups, mesh, device, cache, fields)
    run_steps(runner, config)
    run_sizes(runner, model, config, eager_sizes(config))
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return make_plan(config, weights=weights, activations=activations, free=free, groups=groups)


def trial_cache(config: RunConfig, groups: tuple[LayerGroup, ...]) -> CacheSize:
    """Enough for steps whose results nobody looks at."""
    return CacheSize(num_blocks=(2,) * len(groups), max_rows=config.max_batch_size)


def wire_runner(
    config: RunConfig,
    spec: ModelSpec,
    model: Decoder,
    groups: tuple[LayerGroup, ...],
    mesh: RankMesh,
    device: torch.device,
    cache: CacheSize,
    fields: tuple[BatchField, ...] = (),
) -> tuple[ModelRunner, Rows]:
    num_positions, block_size = max_row_tokens(config), config.tokens_per_block
    max_blocks = -(-num_positions // block_size)
    paged = [not group.has_states for group in groups]
    rows = Rows(
        config.max_batch_size,
        max_blocks,
        block_size,
        device,
        paged,
        config.max_drafts,
        fields,
        num_positions,
        (mesh.role("context").rank, mesh.role("context").size),
    )
    # Drafts are made where tokens are drawn.
    drafter = None
    if mesh.is_last_stage:
        samples = mesh.is_sampling_rank
        drafter = make_drafter(config, model, rows, device, is_sampling_rank=samples)
    kv = KVTensors(groups, cache.num_blocks, block_size, device, cache.num_host_blocks)
    plugins = config.logits_processors
    relaxed = None if config.drafting is None else config.drafting.relaxed
    sampler = Sampler(config.max_batch_size, spec.vocab_size, device, config.seed, plugins, relaxed)
    link = StageLink(model, most_captured_tokens(config))
    return ModelRunner(model, rows, kv, sampler, mesh, link, drafter), rows


def finish_rank(
    loaded: LoadedRank, config: RunConfig, spec: ModelSpec, cache: CacheSize, timeline: Timeline
) -> ModelRunner:
    """The runner with its cache, warmed up, and its graphs captured."""
    with timeline.phase("allocate cache"):
        runner, rows = wire_runner(
            config,
            spec,
            loaded.model,
            loaded.groups,
            loaded.mesh,
            loaded.device,
            cache,
            loaded.fields,
        )
    longest = longest_sequence(config, cache)
    if loaded.device.type == "cuda":
        with timeline.phase("warmup"):
            warm_up_sampling(loaded.model, loaded.mesh, loaded.device, config, spec)
            run_decodes(runner, loaded.model, rows, longest, eager_decodes(config))
            run_padded(runner, loaded.model, rows, longest, all_shapes(config))
        if config.graph_batch_sizes:
            planned = loaded.memory.graphs
            capture_graphs(runner, rows, loaded.model, config, longest, planned, timeline)
        triton_cache.report_compilations()
    elif config.mesh.size == 1:
        runner.use_cpu_graphs(longest)
    if config.drafting is not None and config.drafting.is_adaptive:
        with timeline.phase("measure steps"):
            runner.costs = measure_costs(runner, config)
    runner.before_steps = balancing(loaded.model, loaded.mesh, config)
    return runner
