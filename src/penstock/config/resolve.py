"""`EngineConfig` + model + device -> `RunConfig`. Every `auto` about the engine ends here, with its
reason. Those of text and HTTP end in `text/chat_format` and `server/api_servers`, and
`generation_config` in `hub/generation_config`.

Reads no file, no environment and no device; but for the seed, equal inputs give equal outputs.
"""

import secrets
from collections.abc import Sequence
from typing import TypeVar

from penstock.config.graphs import MIXED_TOKENS, Mix
from penstock.config.launch import Place
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
from penstock.config.run import (
    Drafting,
    EagleDrafting,
    ModelDrafting,
    MTPDrafting,
    NGramDrafting,
    RunConfig,
    StateSaving,
    ThinkingDrafts,
    TypicalDrafts,
    UserDrafting,
)
from penstock.config.schema import EngineConfig
from penstock.config.speculative import DRAFT_LENS, FINAL_STATE, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.types.cache_spec import (
    NVFP4,
    NVFP4_GROUP,
    RESERVED_BLOCKS,
    FullKV,
    LatentKV,
    block_bytes,
)
from penstock.types.device import DeviceInfo
from penstock.types.model_spec import (
    ActivationFormat,
    DraftModel,
    ModelSpec,
    QuantSpec,
    W8A8Spec,
)
from penstock.types.setting_choice import SettingChoice

_HALVES = ("bfloat16", "float16")
_GIB = 2**30
_BF16_ARCH = 80  # first GPU generation with fast bfloat16
_FP8_ARCH = 89  # first one with FP8
_ACTIVATIONS_ARCH: dict[ActivationFormat, int] = {"fp8": _FP8_ARCH, "mxfp8": 100, "nvfp4": 100}
_FP8 = "float8_e4m3fn"
_GPU_ROWS, _CPU_ROWS = 2048, 64
_GPU_TOKENS, _CPU_TOKENS = 8192, 2048
_MAX_HOST_THREADS = 8
_HOST_CACHE_PART = 8  # of host memory, for the cache of requests that had to leave it
_TOKENS_PER_PLACE = 4096  # of the queue, in the mean
_LONGEST_QUEUED = 4  # prompts as long as may be, at least
_TOKENS_IN_BURSTS = 2048  # a step of the 8B on an H200 takes 45 to 50 ms, eager launches 20
_BACKENDS = ("reference", "sdpa", "triton")

T = TypeVar("T")
Reasoned = tuple[T, str]  # a value and why


class _Choices:
    """Writes down every decision on its way to the `RunConfig`."""

    def __init__(self) -> None:
        self.made: list[SettingChoice] = []

    def add(self, name: str, reasoned: Reasoned[T]) -> T:
        value, reason = reasoned
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if name.endswith("_bytes") and isinstance(value, int):
            shown = f"{value / _GIB:.2f} GiB"
        self.made.append(SettingChoice(name=name, value=shown or "none", reason=reason))
        return value


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
    choices = _Choices()
    kv = config.kv_cache_config
    kind = choices.add("device", _device(config, device))
    check_ranks(config, spec, device, kind, place)
    # Codes are multiplied as they are, with inputs in 16 bits if that is asked for.
    is_coarse = kind == "cpu" and model_path.endswith(".gguf") and config.dtype in _HALVES
    dtype = choices.add("dtype", _dtype(config, spec, device, kind, is_coarse))
    backend = choices.add("attention_backend", _attention(config, device, kind))
    quantization = _quantization(
        "quantization", config.quantization, spec, device, kind, model_path
    )
    quantized_activations: tuple[ActivationFormat, ...] = ()
    formats = frozenset() if spec.quantization is None else spec.quantization.activation_formats
    if formats:
        quantized_activations = choices.add(
            "quantized_activations", _quantized_activations(config, device, kind, formats)
        )
    elif config.quantize_activations == "always":
        raise ConfigError(
            "quantize_activations is always, but the checkpoint has no weights that are multiplied "
            "with NVFP4, MXFP8 or FP8 activations; leave it out"
        )
    moe_backend = "none"
    if spec.moe is not None:
        moe_backend = choices.add("moe_backend", _moe(config, device, kind))
    mesh = choices.add("mesh", mesh_of(config, spec))
    max_num_tokens, max_batch_size = _step_limits(config, kind, choices)
    drafting = _drafting(config, spec, device, kind, choices, draft)
    check_drafting_stages(config, spec, drafting)
    cached_spec = spec.with_mtp_layer() if isinstance(drafting, MTPDrafting) else spec
    graph_batch_sizes = choices.add(
        "graph_batch_sizes",
        _graph_sizes(config, kind, backend, max_batch_size, max_num_tokens, drafting),
    )
    at_start, when_idle = _mixes(config, graph_batch_sizes, max_batch_size, max_num_tokens)
    kv_dtype = choices.add("kv_dtype", _kv_dtype(config, spec, device, kind, dtype, draft))
    token_bytes = _cache_bytes_per_token(cached_spec, kv_dtype, mesh.tp)
    if draft is not None:
        token_bytes += _cache_bytes_per_token(draft.spec, kv_dtype, mesh.tp)
    kv_block = kv.tokens_per_block * token_bytes
    block_tokens = kv.tokens_per_block * mesh.cp  # of which each rank has a part
    kv_cpu_bytes = state_cpu_bytes = 0
    if kind == "cpu":
        kv_cpu_bytes = choices.add(
            "kv_cpu_bytes", _cpu_pool(config, spec, device, kv_block, block_tokens)
        )
        state_cpu_bytes = _cpu_states(spec, device, max_batch_size, dtype, mesh.tp)
        pool_tokens = (kv_cpu_bytes // kv_block - 1) * block_tokens
        pool = pool_tokens, "what the cache holds; raise kv_cache_config.max_tokens"
    else:
        most_cached = mesh.cp * _most_cached(spec, device, kv_dtype, mesh.tp)
        pool = most_cached, "what the memory of the GPU can cache"
    max_seq_len = choices.add("max_seq_len", _max_seq_len(config, spec, pool))
    partial_reuse = choices.add("partial_reuse", _partial_reuse(config))
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
        tokens_per_block=block_tokens,
        block_reuse=kv.enable_block_reuse,
        partial_reuse=partial_reuse,
        kv_dtype=kv_dtype,
        kv_max_tokens=kv.max_tokens,
        kv_memory_fraction=kv.free_gpu_memory_fraction,
        kv_cpu_bytes=kv_cpu_bytes,
        state_interval=kv.mamba_state_cache_interval,
        state_snapshot_share=kv.mamba_state_cache_fraction,
        state_cpu_bytes=state_cpu_bytes,
        host_cache_bytes=choices.add("host_cache_bytes", _host_cache(config, device, kind, place)),
        attention_backend=backend,
        reduced_precision_matmul=is_coarse,
        quantization=quantization,
        quantized_activations=quantized_activations,
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


def _dtype(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, kind: str, is_coarse: bool
) -> Reasoned[str]:
    if is_coarse:
        return "float32", f"GEMMs with 16 bits of their activations, finer than {config.dtype}"
    if config.dtype != "auto":
        return config.dtype, "set by dtype"
    if kind == "cpu":
        return "float32", "default on a CPU; set dtype to halve the memory"
    if spec.dtype == "bfloat16" and device.arch < _BF16_ARCH:
        return "float16", f"sm_{device.arch} has no fast bfloat16"
    return spec.dtype, "the checkpoint's"


def _quantization(
    setting: str,
    asked: str | None,
    spec: ModelSpec,
    device: DeviceInfo,
    kind: str,
    model_path: str,
) -> str | None:
    """What is asked for, where checkpoint and device have it."""
    found = spec.quantization
    is_quantized = found is not None and found.is_quantized
    if asked is not None and (is_quantized or model_path.endswith(".gguf")):
        raise ConfigError(
            f"{setting} is {asked}, but the checkpoint is quantized already; leave it out, or "
            "name the checkpoint that this one was made of"
        )
    if kind == "cuda" and (is_quantized or asked is not None):
        for part in [p.spec for p in found.mixed] if found is not None and found.mixed else [found]:
            _check_numbers(asked, part, device)
    return asked


def _quantized_activations(
    config: EngineConfig, device: DeviceInfo, kind: str, formats: frozenset[ActivationFormat]
) -> Reasoned[tuple[ActivationFormat, ...]]:
    known = tuple(sorted(formats))
    if config.quantize_activations != "auto":
        is_always = config.quantize_activations == "always"
        return known if is_always else (), "set by quantize_activations"
    arch = device.arch if kind == "cuda" else 0
    found = tuple(format for format in known if arch >= _ACTIVATIONS_ARCH[format])
    reasons = [f"the tensor cores of sm_{arch} multiply {' and '.join(found)}"] if found else []
    reasons += [
        f"tensor cores that multiply {format} begin with sm_{_ACTIVATIONS_ARCH[format]}"
        for format in known
        if format not in found
    ]
    return found, "; ".join(reasons)


def _check_numbers(asked: str | None, found: QuantSpec | None, device: DeviceInfo) -> None:
    """Refuse weights that no kernel for this GPU multiplies."""
    format = found.format if found is not None else None
    is_fp8 = isinstance(format, W8A8Spec) and format.numbers == "e4m3"
    what = f"quantization {asked}" if asked else "the checkpoint"
    if is_fp8 or (asked or "").startswith("fp8"):
        needed = _FP8_ARCH
        works = "a plain checkpoint (with quantization int8 or nf4), AWQ, GPTQ, NVFP4 or int8"
    elif format == "mxfp4":
        return
    else:
        needed, works = _BF16_ARCH, "a plain checkpoint"
    if device.arch < needed:
        raise ConfigError(
            f"{what} needs GEMMs that begin with sm_{needed}; this is sm_{device.arch}, where "
            f"{works} works. On a CPU all of them do (device cpu)"
        )


def _kv_dtype(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    kind: str,
    dtype: str,
    draft: DraftModel | None,
) -> Reasoned[str]:
    asked = config.kv_cache_config.dtype
    made_for = spec.quantization.cache_dtype if spec.quantization is not None else None
    has_fp8 = kind == "cpu" or device.arch >= _FP8_ARCH
    if asked == "fp8":
        if not has_fp8:
            raise ConfigError(
                f"kv_cache_config.dtype is fp8, which needs sm_{_FP8_ARCH} or newer; this is "
                f"sm_{device.arch}, use auto"
            )
        return _FP8, "set by kv_cache_config.dtype"
    if asked == "int8":
        if spec.latent is not None:
            raise ConfigError(
                f"kv_cache_config.dtype is int8, which the latents of {spec.architecture} cannot "
                "have; use fp8 or auto"
            )
        return "int8", "set by kv_cache_config.dtype"
    cached = (spec,) if draft is None else (spec, draft.spec)
    if asked == "nvfp4":
        _check_nvfp4_cache(f"kv_cache_config.dtype is {asked}", cached, dtype)
        return NVFP4, "set by kv_cache_config.dtype"
    if asked != "auto":
        if asked != dtype:
            raise ConfigError(
                f"kv_cache_config.dtype is {asked}, but the model computes in {dtype}; use that, "
                "fp8, nvfp4, int8 or auto"
            )
        return dtype, "set by kv_cache_config.dtype"
    if made_for is None:
        return dtype, "the number format the model computes in"
    if made_for == "INT8" and spec.latent is None:
        return "int8", "the checkpoint is made for it; scales are found by token and head"
    if made_for == NVFP4:
        _check_nvfp4_cache("the checkpoint is made for a KV cache in NVFP4", cached, dtype)
        return NVFP4, "the checkpoint is made for it"
    if made_for != _FP8:
        raise ConfigError(
            f"the checkpoint is made for a KV cache in {made_for}, which is not supported; set "
            f"kv_cache_config.dtype (--kv_cache_dtype) to fp8, nvfp4, int8 or {dtype}"
        )
    if not has_fp8:
        return dtype, f"sm_{device.arch} has no FP8, which the checkpoint is made for"
    return made_for, "the checkpoint is made for it"


def _check_nvfp4_cache(what: str, cached: Sequence[ModelSpec], dtype: str) -> None:
    for spec in cached:
        reason = ""
        if spec.latent is not None:
            reason = f"the latents of {spec.architecture} cannot have"
        elif spec.head_size % NVFP4_GROUP:
            reason = (
                f"scales groups of {NVFP4_GROUP} channels; the heads of {spec.architecture} have "
                f"{spec.head_size}"
            )
        if reason:
            raise ConfigError(
                f"{what}, which {reason}; set kv_cache_config.dtype (--kv_cache_dtype) to fp8 or "
                f"{dtype}"
            )


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


def _step_limits(config: EngineConfig, kind: str, choices: _Choices) -> tuple[int, int]:
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


def _most_cached(spec: ModelSpec, device: DeviceInfo, dtype: str, tp_size: int) -> int:
    """Tokens that a GPU with nothing else in it could cache. Tables by position and lists of blocks
    are as long as a sequence may become, and some models have positions for millions of tokens."""
    num_windows = sum(window is not None for window in spec.layer_windows)
    share = (1 - num_windows / spec.num_layers) or 1.0  # layers of windows soon take no more
    return int(device.total_bytes / (share * _cache_bytes_per_token(spec, dtype, tp_size)))


def _cache_bytes_per_token(spec: ModelSpec, dtype: str, tp_size: int) -> int:
    layer: FullKV | LatentKV = FullKV(
        num_kv_heads=max(1, spec.num_kv_heads // tp_size), head_size=spec.head_size, dtype=dtype
    )
    if spec.latent is not None:
        layer = LatentKV(
            latent_size=spec.latent.kv_rank, rope_size=spec.latent.rope_size, dtype=dtype
        )
    num_layers = spec.num_layers - (sum(spec.delta.layers) if spec.delta is not None else 0)
    return num_layers * layer.bytes_per_token()


def _cpu_states(
    spec: ModelSpec, device: DeviceInfo, max_rows: int, dtype: str, tp_size: int
) -> int:
    """Bytes of recurrent states: one of each sequence and as many copies, where that is modest."""
    if spec.delta is None:
        return 0
    state = sum(spec.delta.layers) * block_bytes(spec.delta.state(tp_size, dtype), 1)
    wanted = (RESERVED_BLOCKS + 2 * max_rows) * state
    return min(wanted, max(_GIB, device.total_bytes // 10))


def _cpu_pool(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, block_bytes: int, block_tokens: int
) -> Reasoned[int]:
    """Bytes of the cache on a CPU: modest, unless max_tokens or max_seq_len asks for more."""
    kv = config.kv_cache_config
    most = device.total_bytes // 2

    def pool(num_tokens: int) -> int:
        return (-(-num_tokens // block_tokens) + 1) * block_bytes  # block 0 is reserved

    if kv.max_tokens is not None:
        wanted = pool(kv.max_tokens)
        if wanted > most:
            raise ConfigError(
                f"kv_cache_config.max_tokens is {kv.max_tokens}, which takes "
                f"{wanted / _GIB:.1f} GiB of cache; at most {most / _GIB:.1f} GiB, "
                "half of the memory, may be used"
            )
        return wanted, "set by kv_cache_config.max_tokens"
    default = max(min(_GIB, device.total_bytes // 10), pool(1))
    longest = min(config.max_seq_len or 0, spec.max_position)
    if default < pool(longest) <= most:
        return pool(longest), "room for one sequence of max_seq_len"
    return default, "1 GiB or a tenth of the memory, whichever is smaller"


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


def _partial_reuse(config: EngineConfig) -> Reasoned[bool]:
    kv = config.kv_cache_config
    if not (kv.enable_block_reuse and kv.enable_partial_reuse):
        return False, "turned off by kv_cache_config"
    if config.access_config.prefix_sharing == "open":
        return False, "prefix_sharing is open: response times would tell single tokens"
    return True, "kv_cache_config.enable_partial_reuse is on"


def _host_cache(
    config: EngineConfig, device: DeviceInfo, kind: str, place: Place | None
) -> Reasoned[int]:
    if (size := config.kv_cache_config.host_cache_size) is not None:
        return size, "set by kv_cache_config.host_cache_size"
    if kind == "cpu":
        return 0, "the cache is in host memory"
    num_ranks = num_ranks_here(config, place)
    share = device.host_bytes // _HOST_CACHE_PART // num_ranks
    return share, f"{num_ranks} rank(s), 1/{_HOST_CACHE_PART} of host memory"


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


def _drafting(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    kind_of_device: str,
    choices: "_Choices",
    draft: DraftModel | None,
) -> Drafting | None:
    asked = config.speculative_config
    if asked is None:
        return None
    kind, num_heads = str(asked.decoding_type), spec.num_nextn_predict_layers
    if kind == "AUTO":
        kind, why = ("MTP", "the model has an MTP head") if num_heads else ("NGram", "it has none")
        choices.add("decoding_type", (kind, why))
    if kind == "SaveState":
        return _state_saving(config, asked, spec)
    max_drafts, most = asked.max_draft_len or DRAFT_LENS[kind], asked.max_concurrency
    adaptive = asked.adaptive_draft_len
    if kind == "MTP":
        if not num_heads:
            raise ConfigError(
                "speculative_config.decoding_type is MTP, but the model has no MTP head "
                "(num_nextn_predict_layers); set it to NGram, or leave speculative_config out"
            )
        return MTPDrafting(
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
            relaxed=_relaxed_thinking(asked, spec),
        )
    if kind in ("Draft_Target", "Eagle3"):
        assert draft is not None, "given by the engine"
        _check_draft_model(draft, spec)
        quantization = _quantization(
            "speculative_config.quantization",
            asked.quantization,
            draft.spec,
            device,
            kind_of_device,
            draft.path,
        )
        if kind == "Draft_Target":
            return ModelDrafting(
                model_path=draft.path,
                quantization=quantization,
                max_drafts=max_drafts,
                max_decodes=most,
                is_adaptive=adaptive,
            )
        layers = tuple(asked.eagle3_layers_to_capture or _captured_layers(spec.num_layers))
        if max(layers) >= spec.num_layers or draft.spec.hidden_size != spec.hidden_size:
            raise ConfigError(
                f"the Eagle3 head in '{draft.path}' was not made for this model: it reads layers "
                f"{list(layers)} of hidden size {draft.spec.hidden_size}, the model has "
                f"{spec.num_layers} of {spec.hidden_size}"
            )
        return EagleDrafting(
            model_path=draft.path,
            quantization=quantization,
            layers=layers,
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
            relaxed=None
            if asked.posterior_threshold is None
            else TypicalDrafts(threshold=asked.posterior_threshold),
        )
    if kind == "User_Provided":
        assert asked.drafter is not None
        return UserDrafting(
            entry_point=asked.drafter,
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
        )
    return NGramDrafting(
        max_drafts=max_drafts,
        max_decodes=most,
        is_adaptive=adaptive,
        max_size=asked.max_matching_ngram_size,
        use_oldest=asked.is_keep_all and asked.is_use_oldest,
    )


def _state_saving(config: EngineConfig, asked: SpeculativeConfig, spec: ModelSpec) -> StateSaving:
    if config.kv_cache_config.enable_block_reuse:
        raise ConfigError(
            "speculative_config.decoding_type SaveState saves what is computed, and a prefix that "
            "is reused is not; set kv_cache_config.enable_block_reuse to false"
        )
    others = config.data_parallel_size, config.pipeline_parallel_size
    if config.enable_attention_dp or max(others) > 1:
        raise ConfigError(
            "speculative_config.decoding_type SaveState: rank 0 writes the files, of all prompts "
            "and layers; leave enable_attention_dp, data_parallel_size and pipeline_parallel_size "
            "out"
        )
    layers = asked.eagle3_layers_to_capture
    if layers is None:
        layers = [*_captured_layers(spec.num_layers)]
    if max(layers) >= spec.num_layers:
        raise ConfigError(
            f"speculative_config.eagle3_layers_to_capture is {layers}, but the model has "
            f"{spec.num_layers} layers, counted from 0"
        )
    assert asked.output_directory is not None
    return StateSaving(
        max_drafts=0,
        layers=tuple(sorted({*layers} - {FINAL_STATE})),
        directory=asked.output_directory,
        interval=asked.write_interval,
        prefix=asked.file_prefix,
    )


def _relaxed_thinking(asked: SpeculativeConfig, spec: ModelSpec) -> ThinkingDrafts | None:
    if not asked.use_relaxed_acceptance_for_thinking:
        return None
    tokens = asked.begin_thinking_phase_token, asked.end_thinking_phase_token
    if max(tokens) >= spec.vocab_size:
        raise ConfigError(
            f"begin_thinking_phase_token and end_thinking_phase_token are {tokens}, but the model "
            f"has {spec.vocab_size} tokens; set them to those that open and close its thinking, or "
            "leave use_relaxed_acceptance_for_thinking out"
        )
    begin, end = tokens
    return ThinkingDrafts(top_k=asked.relaxed_topk, delta=asked.relaxed_delta, begin=begin, end=end)


def _check_draft_model(draft: DraftModel, spec: ModelSpec) -> None:
    """It shares the blocks of layers that keep every token."""
    what = f"speculative_config.speculative_model '{draft.path}'"
    if draft.spec.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {draft.spec.vocab_size} tokens, the model one of "
            f"{spec.vocab_size}; a draft model needs the same"
        )
    if draft.spec.delta is not None or draft.spec.window or any(draft.spec.layer_windows):
        raise ConfigError(
            f"{what} has layers with windows or a recurrent state, which no draft model may have; "
            "choose one that attends to all tokens"
        )


def _captured_layers(num_layers: int) -> tuple[int, ...]:
    """Behind which layers Eagle3 heads are trained to read hidden states."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(min(max(layer, 0), num_layers - 1) for layer in layers)


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
