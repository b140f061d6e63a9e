"""Rotary position embedding: the table of cosines and sines that `RopeSpec` describes.

One table per model, indexed by absolute position, as long as the run's sequences may become. The
rotation itself is an op.

Dynamic NTK scaling depends on the length of the sequence, and a table cannot: sequences of many
lengths share a step, and cached keys were rotated earlier. So the length is fixed when the model is
built. `max_position` up to the trained length gives the unscaled table, exact for every sequence
that fits. A larger `max_position` (asked for by overriding `max_position_embeddings`) gives the
table scaled for that length, for all sequences, short ones included.

LongRoPE has two sets of frequencies, one up to the trained length and one beyond it. Which of them
a run has follows from how long its sequences may become: `num_positions`.
"""

# P positions, R rotated channels of a head, F = R / 2 frequencies

import math

import torch
from torch import Tensor, nn

from penstock.types.model_spec import RopeSpec

_IN_FLIGHT = 8  # positions of a run's table that only steps in flight write, at most


class Rope(nn.Module):
    def __init__(
        self,
        spec: RopeSpec,
        head_size: int,
        max_position: int,
        device: torch.device,
        num_positions: int | None = None,
    ) -> None:
        """`max_position` is the model's and decides the angles; `num_positions`, of which the table
        has the first, is the run's. None: all of them."""
        super().__init__()
        table_PR = cos_sin_table(spec, head_size, max_position, num_positions).to(device)
        self.register_buffer("cos_sin_PR", table_PR, persistent=False)
        self.cos_sin_PR: Tensor


def cos_sin_table(
    spec: RopeSpec, head_size: int, max_position: int, num_positions: int | None = None
) -> Tensor:
    """float32 [P, R]: the cosines of each position, then its sines, times the attention factor."""
    num_positions = max_position if num_positions is None else num_positions
    inv_freq_F = inverse_frequencies(spec, head_size, max_position, num_positions)
    angles_PF = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq_F
    table_PR = torch.empty(num_positions, 2 * inv_freq_F.shape[0])
    cos_PF, sin_PF = table_PR.chunk(2, dim=-1)
    torch.cos(angles_PF, out=cos_PF)
    torch.sin(angles_PF, out=sin_PF)
    return table_PR.mul_(attention_factor(spec))


def inverse_frequencies(
    spec: RopeSpec, head_size: int, max_position: int, num_positions: int | None = None
) -> Tensor:
    """Radians per position of each pair of channels."""
    num_channels = int(head_size * spec.partial_factor)
    exponents_F = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    match spec.kind:
        case "none":
            return torch.zeros_like(exponents_F)
        case "default":
            return 1.0 / spec.theta**exponents_F
        case "linear":
            return 1.0 / spec.theta**exponents_F / spec.factor
        case "dynamic":
            return 1.0 / _ntk_theta(spec, num_channels, max_position) ** exponents_F
        case "llama3":
            return _llama3(spec, 1.0 / spec.theta**exponents_F)
        case "yarn":
            return _yarn(spec, spec.theta**exponents_F)
        case "longrope":
            longest = max_position if num_positions is None else num_positions - _IN_FLIGHT
            is_long = longest > _trained_length(spec)
            factors = spec.long_factors if is_long else spec.short_factors
            return 1.0 / (torch.tensor(factors) * spec.theta**exponents_F)
    raise AssertionError(spec.kind)  # the config parser refuses every other kind


def attention_factor(spec: RopeSpec) -> float:
    """Yarn and LongRoPE sharpen attention as the context grows; multiplies cosines and sines."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        growth = math.log(max(spec.factor, 1.0)) / math.log(_trained_length(spec))
        return math.sqrt(1 + growth)
    if spec.mscale and spec.mscale_all_dim:
        return _yarn_mscale(spec.factor, spec.mscale) / _yarn_mscale(
            spec.factor, spec.mscale_all_dim
        )
    return _yarn_mscale(spec.factor, 1.0)


def score_factor(spec: RopeSpec) -> float:
    """What attention scores are multiplied by where a checkpoint gives `mscale_all_dim`.

    Of its models only a part of each head is rotated, and this reaches the rest as well. Models
    whose heads are rotated as a whole have it in the table: `attention_factor`.
    """
    if spec.kind == "default" or not spec.mscale_all_dim:
        return 1.0
    return _yarn_mscale(spec.factor, spec.mscale_all_dim) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _ntk_theta(spec: RopeSpec, num_channels: int, max_position: int) -> float:
    """A larger base for a longer sequence: its slowest channel turns as far as in training."""
    trained = _trained_length(spec)
    growth = spec.factor * max(max_position, trained) / trained - (spec.factor - 1)
    return spec.theta * growth ** (num_channels / (num_channels - 2))


def _llama3(spec: RopeSpec, inv_freq_F: Tensor) -> Tensor:
    """Slow channels are slowed by `factor`, fast ones kept, those between blended."""
    turns_F = _trained_length(spec) / (2 * math.pi / inv_freq_F)
    kept_F = (turns_F - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept_F = kept_F.clamp(0.0, 1.0)
    return (1 - kept_F) * inv_freq_F / spec.factor + kept_F * inv_freq_F


def _yarn(spec: RopeSpec, period_F: Tensor) -> Tensor:
    """As above, but blended linearly over the channel index, between two numbers of turns."""
    num_channels = 2 * period_F.shape[0]

    def channel_that_turns(num_turns: float) -> float:
        length = _trained_length(spec) / (num_turns * 2 * math.pi)
        return num_channels * math.log(length) / (2 * math.log(spec.theta))

    low, high = channel_that_turns(spec.beta_fast), channel_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_channels - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    kept_F = 1 - ((torch.arange(period_F.shape[0]) - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / (spec.factor * period_F) * (1 - kept_F) + 1.0 / period_F * kept_F


def _trained_length(spec: RopeSpec) -> int:
    assert spec.original_max_position is not None, spec
    return spec.original_max_position
