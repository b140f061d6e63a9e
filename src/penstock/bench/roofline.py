"""What the hardware allows: the least time of a decode step, of a prompt, of a whole load.

A decode step takes the longer of reading the weights it needs and multiplying with them, then reads
the KV cache and states of its sequences. Of the experts it needs those that some token has chosen:
as many as were counted, or as choosing evenly would give. A prompt alone is bound in the same way,
with causal attention at the bf16 peak; of many prompts only the FLOPs count, since they share what
is read. Only the last token of a prompt needs the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BITS = {  # of a weight, its share of the scales included
    "bf16": 16.0,
    "fp8": 8.0,
    "fp8 in blocks": 8.0 + 32 / 128**2,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
    "4 bits": 4.0 + 20 / 128,
}
# Of a cached number, by `kv_cache_config.dtype`; NVFP4 with its scale of 16 of them.
CACHE_BYTES = {"auto": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of one field
_STATE_BYTES = 4  # of a number that a recurrent layer remembers


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_s: float
    copy_bytes_s: float  # bytes read and bytes written
    flops: Mapping[str, float]  # of GEMMs with weights of each kind


# Measured: CUDA 13.0, torch 2.11, Triton 3.6. Weights of 4 bits are multiplied as bf16.
H200 = Ceilings(
    4.52e12,
    4.28e12,
    {"fp8": 1254e12, "fp8 in blocks": 1152e12}
    | dict.fromkeys(("bf16", "mxfp4", "nvfp4", "4 bits"), 745e12),
)


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str
    out_features: int
    in_features: int
    kind: str = "bf16"

    @property
    def num_bytes(self) -> float:
        return self.out_features * self.in_features * BITS[self.kind] / 8

    def gemm_s(self, num_tokens: float, at: Ceilings) -> float:
        """Of the multiplication alone."""
        return 2 * num_tokens * self.out_features * self.in_features / at.flops[self.kind]

    def roofline_s(self, num_tokens: int, at: Ceilings) -> float:
        return max(self.num_bytes / at.read_bytes_s, self.gemm_s(num_tokens, at))


@dataclass(frozen=True, slots=True)
class Experts:
    """Of one layer; the matrices are those of one expert."""

    num_all: int
    num_active: float  # of a token; of a shard of the experts those of it, on average
    gate_up: Matrix
    down: Matrix

    def expected(self, num_tokens: int) -> float:
        """Experts that have a token, if each token chooses evenly and on its own."""
        return self.num_all * (1 - (1 - self.num_active / self.num_all) ** num_tokens)

    def gemm_s(self, num_tokens: int, at: Ceilings) -> float:
        pairs = num_tokens * self.num_active
        return self.gate_up.gemm_s(pairs, at) + self.down.gemm_s(pairs, at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer multiplies with, in this order, and the KV cache or state it keeps."""

    matrices: tuple[Matrix, ...]  # without those of the experts
    experts: Experts | None = None
    cached_bytes: int = 0  # of a token
    window: int | None = None  # tokens that a query sees
    state_bytes: int = 0  # of a sequence, renewed by every step
    query_key_flops: int = 0  # of one query and one key that it sees, in a decode
    prompt_query_key_flops: int = 0  # and in a prompt
    token_flops: int = 0  # of one more token in the state

    def kv_s(self, batch: int, context: float, at: Ceilings) -> float:
        """Of attention in a decode step, or of renewing the state."""
        seen = batch * min(context, self.window or context)
        read = seen * self.cached_bytes / at.read_bytes_s
        renewed = 2 * batch * self.state_bytes / at.copy_bytes_s
        return max(read, seen * self.query_key_flops / at.flops["bf16"]) + renewed

    def prompt_flops(self, length: int) -> float:
        """Of attention, or of the state, for a whole prompt."""
        most = min(length, self.window or length)
        pairs = most * (most + 1) / 2 + (length - most) * most
        return pairs * self.prompt_query_key_flops + length * self.token_flops


@dataclass(frozen=True, slots=True)
class Roofline:
    """Those of one model. `activated`: by batch, experts of a layer that have tokens."""

    layers: tuple[Layer, ...]
    head: Matrix
    hidden: int
    at: Ceilings = H200
    max_running: int | None = None
    activated: Mapping[int, float] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> float:
        """Of all weights but the embedding."""
        experts = [layer.experts for layer in self.layers if layer.experts]
        stacked = sum(e.num_all * (e.gate_up.num_bytes + e.down.num_bytes) for e in experts)
        return sum(m.num_bytes for m in self.matrices) + stacked

    @property
    def matrices(self) -> list[Matrix]:
        """In the order of a step; without those of experts."""
        return [m for layer in self.layers for m in layer.matrices] + [self.head]

    @property
    def experts(self) -> Experts | None:
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def num_expert_layers(self) -> int:
        return sum(layer.experts is not None for layer in self.layers)

    def num_activated(self, batch: int) -> float:
        """Of one layer with experts."""
        if batch in self.activated or self.experts is None:
            return self.activated.get(batch, 0.0)
        return self.experts.expected(batch)

    def experts_s(self, batch: int, matrices: Sequence[str] = ("gate_up", "down")) -> float:
        """Of the experts of all layers in a decode step, or of one of their two matrices."""
        if (experts := self.experts) is None:
            return 0.0
        read = gemm = 0.0
        for matrix in (getattr(experts, name) for name in matrices):
            read += self.num_activated(batch) * matrix.num_bytes / self.at.read_bytes_s
            gemm += matrix.gemm_s(batch * experts.num_active, self.at)
        return self.num_expert_layers * max(read, gemm)

    def kv_s(self, batch: int, context: float) -> float:
        return sum(layer.kv_s(batch, context, self.at) for layer in self.layers)

    def kv_of_s(self, is_state: bool, batch: int, context: float) -> float:
        """Of the layers that keep a state, or of those that keep every token."""
        own = [layer for layer in self.layers if bool(layer.state_bytes) == is_state]
        return sum(layer.kv_s(batch, context, self.at) for layer in own)

    def decode_step_s(self, batch: int, context: float) -> float:
        """One step of `batch` sequences of `context` tokens each."""
        gemms = self._gemm_s(batch) + self.head.gemm_s(batch, self.at)
        return max(self._read_s(batch), gemms) + self.kv_s(batch, context)

    def prompt_s(self, length: int) -> float:
        """One prompt on an idle GPU."""
        gemms = self._gemm_s(length) + self.head.gemm_s(1, self.at)
        return max(self._read_s(length), gemms) + self._prompt_attention_s(length)

    def prompt_among_many_s(self, length: int) -> float:
        """What one prompt of many adds."""
        gemms = self._gemm_s(length) + self.head.gemm_s(1, self.at)
        return gemms + self._prompt_attention_s(length)

    def burst_tok_s(self, count: int, num_in: int, num_out: int) -> float:
        """`count` requests at once; what the cache does not hold waits for the first to end."""
        most = count
        if self.max_running is not None:
            most = min(count, self.max_running * 2048 // (num_in + num_out))
        seconds, left = 0.0, count
        while left:
            running = min(left, most)
            step = self.decode_step_s(running, num_in + num_out / 2)
            seconds += num_out * step + running * self.prompt_among_many_s(num_in)
            left -= running
        return count * num_out / seconds

    def figures(self, concurrencies: Sequence[int], num_in: int, num_out: int) -> dict[str, float]:
        """By the names of figures of a benchmark; TPOT is that of 257 tokens."""
        return {
            "ttft1_ms": self.prompt_s(num_in) * 1e3,
            "tpot1_ms": self.decode_step_s(1, num_in + 128) * 1e3,
            **{f"c{n}_tok_s": self.burst_tok_s(n, num_in, num_out) for n in concurrencies},
        }

    def _read_s(self, num_tokens: int) -> float:
        """Of the weights that a step of so many tokens needs."""
        num_bytes = sum(m.num_bytes for m in self.matrices)
        if (experts := self.experts) is not None:
            each = experts.gate_up.num_bytes + experts.down.num_bytes
            num_bytes += self.num_expert_layers * self.num_activated(num_tokens) * each
        return num_bytes / self.at.read_bytes_s

    def _prompt_attention_s(self, length: int) -> float:
        return sum(layer.prompt_flops(length) for layer in self.layers) / self.at.flops["bf16"]

    def _gemm_s(self, num_tokens: int) -> float:
        matrices = sum(m.gemm_s(num_tokens, self.at) for m in self.matrices[:-1])
        experts = sum(
            layer.experts.gemm_s(num_tokens, self.at) for layer in self.layers if layer.experts
        )
        return matrices + experts


# From a configuration


def roofline_of(
    config: Mapping[str, Any],
    *,
    cache: str = "auto",
    max_running: int | None = None,
    activated: Mapping[int, float] | None = None,
    at: Ceilings = H200,
) -> Roofline:
    """Of the content of a config.json. `cache`: one of `CACHE_BYTES`. `max_running`: 2048-token
    sequences that the cache holds."""
    hidden, cache_bytes = config["hidden_size"], CACHE_BYTES[cache]
    kinds = _kinds(config.get("quantization_config", {}))
    layers = tuple(
        _layer(config, index, kinds, cache_bytes) for index in range(config["num_hidden_layers"])
    )
    head = Matrix("head", config["vocab_size"], hidden)
    return Roofline(layers, head, hidden, at, max_running, activated or {})


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Of matrices in the parts of a layer."""

    attention: str
    dense: str
    experts: str


def _kinds(quantization: Mapping[str, Any]) -> _Kinds:
    if quantization.get("quant_method") == "mxfp4":
        return _Kinds("bf16", "bf16", "mxfp4")
    kind = "fp8" if quantization else "bf16"
    if quantization.get("weight_block_size"):
        kind = "fp8 in blocks"
    elif quantization.get("quant_algo") == "NVFP4":
        kind = "nvfp4"
    elif quantization.get("bits", quantization.get("w_bit")) == 4:
        kind = "4 bits"
    has_plain = any("self_attn" in name for name in quantization.get("exclude_modules", ()))
    return _Kinds("bf16" if has_plain else kind, kind, kind)


def _layer(config: Mapping[str, Any], index: int, kinds: _Kinds, cache_bytes: float) -> Layer:
    if "kv_lora_rank" in config:
        mixing = _latent_attention(config, kinds.attention, cache_bytes)
    elif index % (every := config.get("full_attention_interval", 1)) != every - 1:
        mixing = _delta_net(config, kinds.attention)
    else:
        window = None
        if config.get("layer_types", ["full_attention"] * (index + 1))[index] != "full_attention":
            window = config["sliding_window"]
        mixing = _attention(config, kinds.attention, cache_bytes, window)
    matrices, experts = _feed_forward(config, index, kinds)
    return Layer(experts=experts, **mixing | {"matrices": mixing["matrices"] + matrices})


def _attention(
    config: Mapping[str, Any], kind: str, cache_bytes: float, window: int | None
) -> dict[str, Any]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim", hidden // num_heads)
    query, kv = num_heads * head_size, config["num_key_value_heads"] * head_size
    num_gates = 1 if "full_attention_interval" in config else 0  # of the output, as wide as it
    return {
        "matrices": (
            Matrix("qkv", (1 + num_gates) * query + 2 * kv, hidden, kind),
            Matrix("o", hidden, query, kind),
        ),
        "cached_bytes": int(2 * kv * cache_bytes),
        "window": window,
        "query_key_flops": 4 * query,
        "prompt_query_key_flops": 4 * query,
    }


def _latent_attention(config: Mapping[str, Any], kind: str, cache_bytes: float) -> dict[str, Any]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank = config["q_lora_rank"]
    return {
        "matrices": (
            Matrix("qkv_a", q_rank + rank + rope, hidden, kind),
            Matrix("q_b", num_heads * (nope + rope), q_rank, kind),
            Matrix("keys", num_heads * nope, rank, kind),
            Matrix("values", num_heads * value, rank, kind),
            Matrix("o", hidden, num_heads * value, kind),
        ),
        "cached_bytes": int((rank + rope) * cache_bytes),
        "query_key_flops": 2 * num_heads * (2 * rank + rope),
        "prompt_query_key_flops": 2 * num_heads * (nope + rope + value),
    }


def _delta_net(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_heads, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    state = num_heads * value * config["linear_key_head_dim"]
    return {
        "matrices": (
            Matrix("qkvz", 2 * keys + 2 * num_heads * value, hidden, kind),
            Matrix("ba", 2 * num_heads, hidden),
            Matrix("out", hidden, num_heads * value, kind),
        ),
        "state_bytes": state * _STATE_BYTES,
        "token_flops": 6 * state,  # what the key recalls, the correction, what the query recalls
    }


def _feed_forward(
    config: Mapping[str, Any], index: int, kinds: _Kinds
) -> tuple[tuple[Matrix, ...], Experts | None]:
    hidden, kind = config["hidden_size"], kinds.dense
    num_experts = next((config[name] for name in EXPERT_COUNTS if name in config), 0)
    if not num_experts or index < config.get("first_k_dense_replace", 0):
        return _gated("", config["intermediate_size"], hidden, kind), None
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = Experts(
        num_experts, config["num_experts_per_tok"], *_gated("expert ", inner, hidden, kinds.experts)
    )
    matrices: tuple[Matrix, ...] = (Matrix("router", num_experts, hidden),)
    shared = config.get("shared_expert_intermediate_size", 0)
    if shared:
        gate = (Matrix("shared gate", 1, hidden),)
        return matrices + _gated("shared ", shared, hidden, kind) + gate, experts
    if shared := config.get("n_shared_experts", 0) * inner:
        matrices += _gated("shared ", shared, hidden, kind)
    return matrices, experts


def _gated(name: str, inner: int, hidden: int, kind: str) -> tuple[Matrix, Matrix]:
    return (
        Matrix(f"{name}gate_up", 2 * inner, hidden, kind),
        Matrix(f"{name}down", hidden, inner, kind),
    )
