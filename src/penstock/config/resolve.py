"""`EngineConfig` + model + device -> `RunConfig`. Every `auto` about the engine ends here, with its
reason: ranks in `resolve_ranks`, number formats in `resolve_formats`, the cache in `resolve_cache`,
drafts in `resolve_drafting`, the rest in this file. Those of text and HTTP end in
`text/chat_format` and `server/api_servers`, and `generation_config` in `hub/generation_config`.

Reads no file, no environment and no device; but for the seed, equal inputs give equal outputs.
"""

import secrets

from penstock.config.choices import Choices, Reasoned
from penstock.config.graphs import MIXED_TOKENS, Mix
from penstock.config.launch import Place
from penstock.config.resolve_cache import cache_of, host_cache, partial_reuse
from penstock.config.resolve_drafting import drafting_of
from penstock.config.resolve_formats import (
    HALVES,
    dtype_of,
    quantization_of,
    quantized_activations,
)
from penstock.config.resolve_ranks import (
    all_to_all,
    balance_of,
    check_drafting_stages,
    check_ranks,
    expert_load_path,
    expert_slots,
    mesh_of,
    num_ranks_here,
    one_shot_sums,
)
from penstock.config.run import Drafting, MTPDrafting, RunConfig
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.device import DeviceInfo
from penstock.types.model_spec import DraftModel, ModelSpec

_GPU_ROWS, _CPU_ROWS = 2048, 64
_GPU_TOKENS, _CPU_TOKENS = 8192, 2048
_MAX_HOST_THREADS = 8
_TOKENS_PER_PLACE = 4096  # of the queue, in the mean
_LONGEST_QUEUED = 4  # prompts as long as may be, at least
_TOKENS_IN_BURSTS = 2048  # a step of the 8B on an H200 takes 45 to 50 ms, eager launches 20
_BACKENDS = ("reference", "sdpa", "triton")


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    model_path: str,
    draft: DraftModel | None = None,
    place: Place | None = None,
) -> RunConfig:
    """`draft`: the checkpoint that speculative_config names, if it does. `place`: of rank 0, where
    a launcher starts the ranks."""
    choices = Choices()
    kv = config.kv_cache_config
    kind = choices.add("device", _device(config, device))
    check_ranks(config, spec, device, kind, place)
    # Codes are multiplied as they are, with inputs in 16 bits if that is asked for.
    is_coarse = kind == "cpu" and model_path.endswith(".gguf") and config.dtype in HALVES
    dtype = choices.add("dtype", dtype_of(config, spec, device, kind, is_coarse))
    backend = choices.add("attention_backend", _attention(config, device, kind))
    quantization = quantization_of(
        "quantization", config.quantization, spec, device, kind, model_path
    )
    activations = quantized_activations(config, spec, device, kind, choices)
    moe_backend = "none"
    if spec.moe is not None:
        moe_backend = choices.add("moe_backend", _moe(config, device, kind))
    mesh = choices.add("mesh", mesh_of(config, spec))
    max_num_tokens, max_batch_size = _step_limits(config, kind, choices)
    drafting = drafting_of(config, spec, device, kind, choices, draft)
    check_drafting_stages(config, spec, drafting)
    graph_batch_sizes = choices.add(
        "graph_batch_sizes",
        _graph_sizes(config, kind, backend, max_batch_size, max_num_tokens, drafting),
    )
    at_start, when_idle = _mixes(config, graph_batch_sizes, max_batch_size, max_num_tokens)
    cached = [spec.with_mtp_layer() if isinstance(drafting, MTPDrafting) else spec]
    if draft is not None:
        cached.append(draft.spec)
    cache = cache_of(config, cached, device, kind, dtype, mesh, max_batch_size, choices)
    max_seq_len = choices.add("max_seq_len", _max_seq_len(config, spec, cache.pool))
    reuse = choices.add("partial_reuse", partial_reuse(config))
    max_queued_tokens = choices.add("max_queued_tokens", _queued_tokens(config, max_seq_len))
    return RunConfig(
        model=config.model,
        model_path=model_path,
        load_format=config.load_format,
        dtype=dtype,
        device=kind,
        num_threads=choices.add("num_threads", _num_threads(config, device, kind, place)),
        mesh=mesh,
        one_shot_sums=one_shot_sums(config, kind),
        balance=balance_of(config),
        num_replicas=config.data_parallel_size,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_queued=config.max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        capacity_policy=config.scheduler_config.capacity_scheduler_policy,
        queue_policy=config.scheduler_config.waiting_queue_policy,
        depth=choices.add("depth", _depth(config, kind)),
        tokens_per_block=cache.tokens_per_block,
        block_reuse=kv.enable_block_reuse,
        partial_reuse=reuse,
        kv_dtype=cache.dtype,
        kv_max_tokens=kv.max_tokens,
        kv_memory_fraction=kv.free_gpu_memory_fraction,
        kv_cpu_bytes=cache.cpu_bytes,
        state_interval=kv.mamba_state_cache_interval,
        state_snapshot_share=kv.mamba_state_cache_fraction,
        state_cpu_bytes=cache.state_cpu_bytes,
        host_cache_bytes=choices.add("host_cache_bytes", host_cache(config, device, kind, place)),
        attention_backend=backend,
        reduced_precision_matmul=is_coarse,
        quantization=quantization,
        quantized_activations=activations,
        moe_backend=moe_backend,
        moe_max_tokens=config.moe_config.max_num_tokens,
        moe_all_to_all=spec.moe is not None
        and choices.add("moe_all_to_all", all_to_all(config, mesh)),
        expert_slots=expert_slots(config, spec, mesh),
        expert_load_path=expert_load_path(config, spec, mesh),
        graph_batch_sizes=graph_batch_sizes,
        graph_token_sizes=config.cuda_graph_config.token_sizes(max_num_tokens)
        if config.cuda_graph_config is not None and graph_batch_sizes and mesh.cp == 1
        else (),
        graph_padding=config.cuda_graph_config is not None
        and config.cuda_graph_config.enable_padding,
        drafting=drafting,
        lora=None if config.lora is None else config.lora.to_run(),
        graph_mixes=at_start,
        graph_mixes_when_idle=when_idle,
        tokens_beside_decodes=choices.add(
            "tokens_beside_decodes",
            _tokens_beside_decodes(config, kind, max_num_tokens, has_mixes=bool(at_start)),
        ),
        tokens_in_bursts=min(_TOKENS_IN_BURSTS, max_num_tokens)
        if kind != "cpu" and config.scheduler_config.max_prompt_tokens_beside_decodes is None
        else None,
        seed=choices.add("seed", _seed(config)),
        logits_processors=tuple(config.logits_processors or ()),
        choices=tuple(choices.made),
    )


def _device(config: EngineConfig, device: DeviceInfo) -> Reasoned[str]:
    if config.device == "auto":
        return device.kind, f"found {device.name}" if device.kind == "cuda" else "found no GPU"
    if config.device == "cuda" and device.kind != "cuda":
        raise ConfigError("device is cuda, but there is no GPU; set device to cpu or auto")
    return config.device, "set by device"


def _attention(config: EngineConfig, device: DeviceInfo, kind: str) -> Reasoned[str]:
    asked = config.attn_backend
    if asked in _BACKENDS:
        if asked == "triton" and (kind == "cpu" or device.triton_version is None):
            raise ConfigError(
                f"attn_backend is triton, which needs a GPU and the triton package; the device is "
                f"{kind}, use sdpa, reference or auto"
            )
        return asked, "set by attn_backend"
    if kind == "cpu":
        best, reason = "sdpa", "preferred on a CPU"
    elif device.triton_version is None:
        best, reason = "sdpa", "the triton package is not installed"
    else:
        best, reason = "triton", f"preferred on sm_{device.arch}"
    return best, reason if asked == "auto" else f"{reason}; stands in for {asked}"


def _moe(config: EngineConfig, device: DeviceInfo, kind: str) -> Reasoned[str]:
    asked = config.moe_config.backend
    if asked == "VANILLA":
        return "reference", "set by moe_config.backend"
    if kind == "cpu":
        best, reason = "torch", "preferred on a CPU"
    elif device.triton_version is None:
        best, reason = "reference", "the triton package is not installed"
    else:
        best, reason = "triton", f"preferred on sm_{device.arch}"
    return best, reason if asked in ("AUTO", best.upper()) else f"{reason}; stands in for {asked}"


def _step_limits(config: EngineConfig, kind: str, choices: Choices) -> tuple[int, int]:
    """Tokens and sequences of one step. Each running sequence takes at least one token of it."""
    rows, tokens = config.max_batch_size, config.max_num_tokens
    default_rows, default_tokens = (
        (_CPU_ROWS, _CPU_TOKENS) if kind == "cpu" else (_GPU_ROWS, _GPU_TOKENS)
    )
    if tokens is not None:
        tokens_why = "set by max_num_tokens"
    elif rows is not None and rows > default_tokens:
        tokens, tokens_why = rows, "one token for each of max_batch_size"
    else:
        tokens, tokens_why = default_tokens, f"default on {kind}: keeps a step short"
    if rows is None:
        rows, rows_why = default_rows, f"default on {kind}"
    else:
        rows_why = "set by max_batch_size"
    if rows > tokens:
        rows_why = f"lowered from {rows}: max_num_tokens gives only {tokens} sequences a token"
        rows = tokens
    return (
        choices.add("max_num_tokens", (tokens, tokens_why)),
        choices.add("max_batch_size", (rows, rows_why)),
    )


def _max_seq_len(config: EngineConfig, spec: ModelSpec, pool: Reasoned[int]) -> Reasoned[int]:
    """`pool`: the most tokens that may be cached, as far as known before the weights are loaded."""
    length, reason = spec.max_position, "positions of the model"
    if config.max_seq_len is not None:
        if config.max_seq_len <= spec.max_position:
            length, reason = config.max_seq_len, "set by max_seq_len"
        else:
            reason = f"lowered from {config.max_seq_len} to the positions of the model"
    pool_tokens, what = pool
    if length > pool_tokens:
        length, reason = pool_tokens, f"lowered from {length} to {what}"
    return length, reason


def _queued_tokens(config: EngineConfig, max_seq_len: int) -> Reasoned[int]:
    if config.max_queued_tokens is not None:
        return config.max_queued_tokens, "set by max_queued_tokens"
    by_places = _TOKENS_PER_PLACE * config.max_queued_requests
    if by_places < _LONGEST_QUEUED * max_seq_len:
        return _LONGEST_QUEUED * max_seq_len, f"{_LONGEST_QUEUED} of max_seq_len"
    return by_places, f"{_TOKENS_PER_PLACE} for each of max_queued_requests"


def _num_threads(
    config: EngineConfig, device: DeviceInfo, kind: str, place: Place | None
) -> Reasoned[int]:
    if config.num_threads is not None:
        return config.num_threads, "set by num_threads"
    if kind == "cpu":
        num_ranks = num_ranks_here(config, place)
        share = max(1, device.num_threads // num_ranks)
        return share, f"{device.num_threads} cores, {num_ranks} rank(s)"
    return min(_MAX_HOST_THREADS, device.num_threads), "the GPU computes, the host only loads"


def _depth(config: EngineConfig, kind: str) -> Reasoned[int]:
    if (stages := config.pipeline_parallel_size) > 1:
        is_planned_ahead = kind == "cuda" and not config.disable_overlap_scheduler
        return stages + is_planned_ahead, f"a step in each of {stages} stages"
    if config.disable_overlap_scheduler is not None:
        return 1 if config.disable_overlap_scheduler else 2, "set by disable_overlap_scheduler"
    if kind == "cpu":
        return 1, "on a CPU the step and its planning share the cores"
    return 2, "the next step is planned while the GPU runs this one"


def _seed(config: EngineConfig) -> Reasoned[int]:
    if config.seed is not None:
        return config.seed, "set by seed"
    return secrets.randbits(31), "drawn at start"


def _graph_sizes(
    config: EngineConfig,
    kind: str,
    backend: str,
    max_batch_size: int,
    max_num_tokens: int,
    drafting: Drafting | None,
) -> Reasoned[tuple[int, ...]]:
    graphs = config.cuda_graph_config
    if graphs is None:
        return (), "turned off by cuda_graph_config"
    if kind == "cpu":
        return (), "graphs exist on GPUs only"
    if backend != "triton":
        return (), f"attention backend {backend} cannot be captured"
    sizes = graphs.sizes(max_batch_size)
    rule = "padded to the next size" if graphs.enable_padding else "no padding"
    if graphs.batch_sizes:
        rule = "set by cuda_graph_config.batch_sizes"
    if drafting is None:
        return sizes, rule
    # A drafted token takes a place of its own.
    most = {size * (1 + drafting.max_drafts) for size in sizes}
    drafted = {size for size in most if max(sizes) < size <= max_num_tokens}
    if not graphs.enable_padding:
        drafted = {size for size in most if size <= max_num_tokens}
    return tuple(sorted({*sizes, *drafted})), f"{rule}; with room for drafted tokens"


def _mixes(
    config: EngineConfig, graph_batch_sizes: tuple[int, ...], max_rows: int, max_num_tokens: int
) -> tuple[tuple[Mix, ...], tuple[Mix, ...]]:
    if config.cuda_graph_config is None or not graph_batch_sizes:
        return (), ()
    if config.context_parallel_size > 1:  # the host says who has which tokens of a prompt
        return (), ()
    return config.cuda_graph_config.mixes(max_rows, max_num_tokens)


def _tokens_beside_decodes(
    config: EngineConfig, kind: str, max_num_tokens: int, *, has_mixes: bool
) -> Reasoned[int | None]:
    """None: as many as the measured time of steps allows."""
    asked = config.scheduler_config.max_prompt_tokens_beside_decodes
    if not config.enable_chunked_prefill:
        if asked is not None:
            raise ConfigError(
                f"scheduler_config.max_prompt_tokens_beside_decodes is {asked}, but prompts are "
                "not cut, since enable_chunked_prefill is false; leave one of the two out"
            )
        return max_num_tokens, "prompts are not cut: enable_chunked_prefill is false"
    if asked is not None:
        reason = "set by scheduler_config.max_prompt_tokens_beside_decodes"
        return min(asked, max_num_tokens), reason
    if kind == "cpu":
        return None, "by the measured time of steps, so that streams go on"
    if has_mixes:
        reason = "the largest graph of decodes and prompt tokens; a step in a burst has more"
        return min(MIXED_TOKENS, max_num_tokens), reason
    return max_num_tokens, "all of max_num_tokens"
