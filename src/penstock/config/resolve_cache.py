"""The cache of keys, values and states: the part of `resolve` about its number format, its reuse,
and what of its size is known before the weights are loaded. Values come with their reasons."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.choices import Choices, Reasoned
from penstock.config.launch import Place
from penstock.config.resolve_formats import FP8_ARCH
from penstock.config.resolve_ranks import num_ranks_here
from penstock.config.schema import EngineConfig
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
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import ModelSpec

_GIB = 2**30
_FP8 = "float8_e4m3fn"
_HOST_CACHE_PART = 8  # of host memory, for the cache of requests that had to leave it


@dataclass(frozen=True, slots=True)
class Cache:
    dtype: str
    tokens_per_block: int  # of which each context-parallel rank has a part
    cpu_bytes: int  # 0 on a GPU, whose cache is planned behind the weights
    state_cpu_bytes: int
    pool: Reasoned[int]  # the most tokens that may be cached


def cache_of(
    config: EngineConfig,
    cached: Sequence[ModelSpec],
    device: DeviceInfo,
    kind: str,
    dtype: str,
    mesh: MeshShape,
    max_batch_size: int,
    choices: Choices,
) -> Cache:
    """`cached`: the model, with the layer of an MTP head that drafts, and its draft model."""
    spec, tokens_per_block = cached[0], config.kv_cache_config.tokens_per_block
    kv_dtype = choices.add("kv_dtype", _kv_dtype(config, cached, device, kind, dtype))
    block_tokens = tokens_per_block * mesh.cp
    if kind != "cpu":
        most = mesh.cp * _most_cached(spec, device, kv_dtype, mesh.tp)
        return Cache(kv_dtype, block_tokens, 0, 0, (most, "what the memory of the GPU can cache"))
    block = tokens_per_block * sum(_bytes_per_token(one, kv_dtype, mesh.tp) for one in cached)
    cpu_bytes = choices.add("kv_cpu_bytes", _cpu_pool(config, spec, device, block, block_tokens))
    state_cpu_bytes = _cpu_states(spec, device, max_batch_size, dtype, mesh.tp)
    pool_tokens = (cpu_bytes // block - 1) * block_tokens
    pool = pool_tokens, "what the cache holds; raise kv_cache_config.max_tokens"
    return Cache(kv_dtype, block_tokens, cpu_bytes, state_cpu_bytes, pool)


def _kv_dtype(
    config: EngineConfig, cached: Sequence[ModelSpec], device: DeviceInfo, kind: str, dtype: str
) -> Reasoned[str]:
    spec = cached[0]
    asked = config.kv_cache_config.dtype
    made_for = spec.quantization.cache_dtype if spec.quantization is not None else None
    has_fp8 = kind == "cpu" or device.arch >= FP8_ARCH
    if asked == "fp8":
        if not has_fp8:
            raise ConfigError(
                f"kv_cache_config.dtype is fp8, which needs sm_{FP8_ARCH} or newer; this is "
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


def _most_cached(spec: ModelSpec, device: DeviceInfo, dtype: str, tp_size: int) -> int:
    """Tokens that a GPU with nothing else in it could cache. Tables by position and lists of blocks
    are as long as a sequence may become, and some models have positions for millions of tokens."""
    num_windows = sum(window is not None for window in spec.layer_windows)
    share = (1 - num_windows / spec.num_layers) or 1.0  # layers of windows soon take no more
    return int(device.total_bytes / (share * _bytes_per_token(spec, dtype, tp_size)))


def _bytes_per_token(spec: ModelSpec, dtype: str, tp_size: int) -> int:
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


def partial_reuse(config: EngineConfig) -> Reasoned[bool]:
    kv = config.kv_cache_config
    if not (kv.enable_block_reuse and kv.enable_partial_reuse):
        return False, "turned off by kv_cache_config"
    if config.access_config.prefix_sharing == "open":
        return False, "prefix_sharing is open: response times would tell single tokens"
    return True, "kv_cache_config.enable_partial_reuse is on"


def host_cache(
    config: EngineConfig, device: DeviceInfo, kind: str, place: Place | None
) -> Reasoned[int]:
    if (size := config.kv_cache_config.host_cache_size) is not None:
        return size, "set by kv_cache_config.host_cache_size"
    if kind == "cpu":
        return 0, "the cache is in host memory"
    num_ranks = num_ranks_here(config, place)
    share = device.host_bytes // _HOST_CACHE_PART // num_ranks
    return share, f"{num_ranks} rank(s), 1/{_HOST_CACHE_PART} of host memory"
