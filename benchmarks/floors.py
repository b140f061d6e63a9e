"""What the hardware allows: the least time of a decode step, of a prompt, of a whole load.

A decode step takes the longer of reading all weights and multiplying with them, then reads the
cache. Prompts are bound by their FLOPs: the matrices, and causal attention at the bf16 peak. Only
the last token of a prompt needs the head.
"""

from dataclasses import dataclass
from typing import Any

from shapes import Row


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_s: float
    bf16_flops: float
    fp8_flops: float


H200 = Ceilings(4.52e12, 745e12, 1254e12)  # measured: CUDA 13.0, torch 2.11, Triton 3.6


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str
    num_outputs: int
    num_inputs: int
    is_fp8: bool

    @property
    def num_bytes(self) -> int:
        return self.num_outputs * self.num_inputs * (1 if self.is_fp8 else 2)

    def product_s(self, num_tokens: int, at: Ceilings) -> float:
        """Of the multiplication alone."""
        flops = 2 * num_tokens * self.num_outputs * self.num_inputs
        return flops / (at.fp8_flops if self.is_fp8 else at.bf16_flops)

    def floor_s(self, num_tokens: int, at: Ceilings) -> float:
        return max(self.num_bytes / at.read_bytes_s, self.product_s(num_tokens, at))


class Floors:
    """The floors of one row of the table."""

    def __init__(self, row: Row, at: Ceilings = H200) -> None:
        config: dict[str, Any] = row.config
        self.at = at
        self.num_layers: int = config["num_hidden_layers"]
        self.hidden: int = config["hidden_size"]
        self.features: int = config["intermediate_size"]
        self.vocabulary: int = config["vocab_size"]
        head_size = config.get("head_dim", self.hidden // config["num_attention_heads"])
        self.query = config["num_attention_heads"] * head_size
        self.kv = config["num_key_value_heads"] * head_size
        self.cache_bytes = 1 if row.has_fp8_cache else 2
        # In the order in which a layer multiplies with them.
        self.layer = (
            Matrix("qkv", self.query + 2 * self.kv, self.hidden, row.is_fp8),
            Matrix("o", self.hidden, self.query, row.is_fp8),
            Matrix("gate_up", 2 * self.features, self.hidden, row.is_fp8),
            Matrix("down", self.hidden, self.features, row.is_fp8),
        )
        self.head = Matrix("head", self.vocabulary, self.hidden, is_fp8=False)
        self._max_running = row.max_running

    @property
    def weight_bytes(self) -> int:
        return self.num_layers * sum(m.num_bytes for m in self.layer) + self.head.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one layer."""
        return 2 * self.kv * self.cache_bytes

    def decode_step_s(self, batch: int, context: float) -> float:
        """One step of `batch` sequences of `context` tokens each."""
        products = self._layers_s(batch) + self.head.product_s(batch, self.at)
        cached = batch * context * self.kv_bytes_per_token * self.num_layers
        return (
            max(self.weight_bytes / self.at.read_bytes_s, products) + cached / self.at.read_bytes_s
        )

    def prompt_s(self, length: int) -> float:
        attention = 2 * self.query * length * (length + 1) * self.num_layers
        head = self.head.product_s(1, self.at)
        return self._layers_s(length) + head + attention / self.at.bf16_flops

    def burst_tok_s(self, count: int, num_in: int, num_out: int) -> float:
        """`count` requests at once; what the cache does not hold waits for the first to end."""
        most = count
        if self._max_running is not None:
            most = min(count, self._max_running * 2048 // (num_in + num_out))
        seconds, left = 0.0, count
        while left:
            running = min(left, most)
            step = self.decode_step_s(running, num_in + num_out / 2)
            seconds += num_out * step + running * self.prompt_s(num_in)
            left -= running
        return count * num_out / seconds

    def figures(self, concurrencies: list[int], num_in: int, num_out: int) -> dict[str, float]:
        """The floors of a row by the names of its figures; TPOT is that of 257 tokens."""
        return {
            "ttft1_ms": self.prompt_s(num_in) * 1e3,
            "tpot1_ms": self.decode_step_s(1, num_in + 128) * 1e3,
            **{f"c{n}_tok_s": self.burst_tok_s(n, num_in, num_out) for n in concurrencies},
        }

    def _layers_s(self, num_tokens: int) -> float:
        return self.num_layers * sum(m.product_s(num_tokens, self.at) for m in self.layer)
