"""How many GPUs, and how they share a model: memory, latency and throughput before any is rented.

Every strategy that `penstock serve` runs on one machine: replicas behind one port, each of them
tensor parallel, with the experts sharded like the rest or spread over the ranks (expert parallel).
Times follow from the rooflines of one rank's shard, its all-reduces over the links, and two numbers
that measurements on one H200 gave: what kernels reach of a roofline, and what a layer costs that no
roofline counts. `docs/scaling.md` has predicted beside measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.bench.roofline import H200, Ceilings, Layer, Matrix, Roofline, roofline_of
from penstock.errors import ConfigError

GIB = 2**30
_REACHED = 0.9  # of a roofline, by the kernels of a step
_LAYER_S = 15e-6  # of a layer, beyond its roofline: launches, norms, tails of kernels
_PROMPT_REACHED = 0.85
_LINK_LATENCY_S = 8e-6  # of an all-reduce of few bytes
_ACTIVATION_BYTES = 2
_ACTIVATIONS_AND_GRAPHS = 3 * GIB
_CACHE_SHARE = 0.9  # of what is left, as kv_cache_config.free_gpu_memory_fraction has it


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    link_bytes_s: float  # of one GPU to the others, in one direction
    ceilings: Ceilings
    is_measured: bool = False


def _gpu(
    name: str, memory_gb: int, link_gb_s: int, read_tb_s: float, bf16: int, fp8: int | None
) -> Gpu:
    """From a datasheet (dense TFLOP/s), times what the H200 reaches of its own."""
    read = read_tb_s * 1e12 * (H200.read_bytes_s / 4.8e12)
    plain = bf16 * 1e12 * (H200.flops["bf16"] / 989e12)
    quick = plain if fp8 is None else fp8 * 1e12 * (H200.flops["fp8"] / 1979e12)
    flops = dict.fromkeys(H200.flops, plain) | {"fp8": quick, "fp8 in blocks": quick * 0.92}
    ceilings = Ceilings(read, read * H200.copy_bytes_s / H200.read_bytes_s, flops)
    return Gpu(name, memory_gb * 1e9, link_gb_s * 1e9, ceilings)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 141e9, 450e9, H200, is_measured=True),
        _gpu("h100", 80, 450, 3.35, 989, 1979),
        _gpu("b200", 180, 900, 8.0, 2250, 4500),
        _gpu("gb200", 186, 900, 8.0, 2500, 5000),
        _gpu("a100", 80, 300, 2.04, 312, None),
        _gpu("l40s", 48, 32, 0.864, 362, 733),
        _gpu("rtx4090", 24, 32, 1.008, 165, 330),
    )
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of all GPUs together."""

    concurrency: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Strategy:
    replicas: int
    tp_size: int
    ep_size: int = 1

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tp_size

    def __str__(self) -> str:
        names = [f"TP {self.tp_size}"] + [f"EP {self.ep_size}"] * (self.ep_size > 1)
        return " x ".join([f"{self.replicas} replicas"] * (self.replicas > 1) + names)

    def command(self, model: str) -> str:
        flags = f" --tp_size {self.tp_size}" if self.tp_size > 1 else ""
        flags += f" --ep_size {self.ep_size}" if self.ep_size > 1 else ""
        flags += f" --dp_size {self.replicas}" if self.replicas > 1 else ""
        return f"penstock serve {model}{flags}"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one strategy promises. Bytes are of one rank."""

    strategy: Strategy
    weight_bytes: float
    cache_bytes: float
    max_running: int  # sequences of the load's full length that the caches of all replicas hold
    ttft_s: float  # of a prompt alone
    tpot_s: float  # of a request alone
    loaded_tpot_s: float  # under the load
    tok_s: float  # of all GPUs, under the load

    @property
    def fits(self) -> bool:
        return self.max_running > 0


def strategies(config: Mapping[str, Any], num_gpus: int) -> list[Strategy]:
    """Those that divide the model's heads and experts, in powers of two."""
    roofline = roofline_of(config)
    found = []
    for tp_size in (2**k for k in range(num_gpus.bit_length())):
        if num_gpus % tp_size or config["num_attention_heads"] % tp_size:
            continue
        found.append(Strategy(num_gpus // tp_size, tp_size))
        if roofline.experts is not None and tp_size > 1 and roofline.experts.num_all >= tp_size:
            found.append(Strategy(num_gpus // tp_size, tp_size, tp_size))
    return found


def outlook(
    config: Mapping[str, Any], strategy: Strategy, gpu: Gpu, load: Load, *, cache: str = "auto"
) -> Outlook:
    whole = roofline_of(config, cache=cache, at=gpu.ceilings)
    rank = _shard(whole, strategy, config)
    embedding = _ACTIVATION_BYTES * config["vocab_size"] * config["hidden_size"]
    weights = rank.weight_bytes + embedding / strategy.tp_size
    cache_bytes = max(0.0, (gpu.memory_bytes - weights - _ACTIVATIONS_AND_GRAPHS) * _CACHE_SHARE)
    length = load.input_len + load.output_len
    held = int(cache_bytes // _sequence_bytes(rank, length))
    running = max(1, min(held, -(-load.concurrency // strategy.replicas)))
    context = load.input_len + load.output_len / 2

    def step_s(batch: int) -> float:
        linked = _all_reduces_s(whole, strategy.tp_size, batch, gpu)
        return rank.decode_step_s(batch, context) / _REACHED + len(rank.layers) * _LAYER_S + linked

    prompt_linked = _all_reduces_s(whole, strategy.tp_size, load.input_len, gpu)
    many_s = rank.prompt_among_many_s(load.input_len) / _PROMPT_REACHED + prompt_linked
    # A replica's sequences start one after the other and end alike: each step of theirs carries the
    # share of prompts that keeps as many running.
    loaded_s = step_s(running) + running * many_s / load.output_len
    return Outlook(
        strategy=strategy,
        weight_bytes=weights,
        cache_bytes=cache_bytes,
        max_running=held * strategy.replicas,
        ttft_s=rank.prompt_s(load.input_len) / _PROMPT_REACHED
        + len(rank.layers) * _LAYER_S
        + prompt_linked,
        tpot_s=step_s(1),
        loaded_tpot_s=loaded_s,
        tok_s=strategy.replicas * running / loaded_s,
    )


def best(outlooks: list[Outlook], goal: str) -> Outlook:
    """Of those that fit. Under `latency` the quickest token of a request alone, else tokens/s."""
    fitting = [one for one in outlooks if one.fits]
    if not fitting:
        least = min(outlooks, key=lambda one: one.weight_bytes)
        raise ConfigError(
            f"the model does not fit: {least.weight_bytes / GIB:.1f} GiB of weights per GPU with "
            f"{least.strategy}, and one sequence needs more cache than is left; take more GPUs "
            "(--gpus), a larger kind (--gpu) or a quantized checkpoint"
        )
    if goal == "latency":
        return min(fitting, key=lambda one: (one.tpot_s, -one.tok_s))
    return max(fitting, key=lambda one: one.tok_s)


def _shard(whole: Roofline, strategy: Strategy, config: Mapping[str, Any]) -> Roofline:
    """One rank's part: matrices split by outputs or inputs, KV heads as far as there are any."""
    tp_size = strategy.tp_size
    kv_split = min(tp_size, config.get("num_key_value_heads", tp_size))
    is_latent = "kv_lora_rank" in config  # whose cache every rank has
    layers = tuple(
        _shard_layer(one, strategy, 1 if is_latent else kv_split) for one in whole.layers
    )
    return replace(whole, layers=layers, head=_split(whole.head, tp_size))


def _shard_layer(layer: Layer, strategy: Strategy, kv_split: int) -> Layer:
    tp_size, experts = strategy.tp_size, layer.experts
    if experts is not None:
        if strategy.ep_size > 1:  # whole experts, of which a token meets fewer
            experts = replace(
                experts,
                num_all=-(-experts.num_all // strategy.ep_size),
                num_active=experts.num_active / strategy.ep_size,
            )
        else:
            experts = replace(
                experts,
                gate_up=_split(experts.gate_up, tp_size),
                down=_split(experts.down, tp_size),
            )
    return replace(
        layer,
        matrices=tuple(_split(one, tp_size) for one in layer.matrices),
        experts=experts,
        cached_bytes=layer.cached_bytes // kv_split,
        state_bytes=layer.state_bytes // tp_size,
        query_key_flops=layer.query_key_flops // tp_size,
        prompt_query_key_flops=layer.prompt_query_key_flops // tp_size,
        token_flops=layer.token_flops // tp_size,
    )


def _split(matrix: Matrix, tp_size: int) -> Matrix:
    return replace(matrix, out_features=max(1, matrix.out_features // tp_size))


def _sequence_bytes(rank: Roofline, length: int) -> float:
    return sum(
        min(length, layer.window or length) * layer.cached_bytes + layer.state_bytes
        for layer in rank.layers
    )


def _all_reduces_s(whole: Roofline, tp_size: int, num_tokens: int, gpu: Gpu) -> float:
    """Two a layer, of each token's hidden state."""
    if tp_size == 1:
        return 0.0
    num_bytes = num_tokens * whole.hidden * _ACTIVATION_BYTES * 2 * (tp_size - 1) / tp_size
    return 2 * len(whole.layers) * max(_LINK_LATENCY_S, num_bytes / gpu.link_bytes_s)
