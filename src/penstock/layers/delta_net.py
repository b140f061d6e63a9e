"""The gated delta net: a short convolution, then a linear memory of keys and values with decay.

Takes the place of attention. What a sequence remembers has one size however long it is: a block of
each of two planes. It cannot step back, so tokens that were drafted leave it as it was: their
inputs are kept, which are small, and those of the accepted ones go through it once more.
"""

# T tokens in the step, C hidden size, N entries, S slots
# of this rank: H key heads, V value heads, R = V / H, X columns of the fused projection
# K key size, D value size, E = R * D, P past inputs of the convolution, F its channels, W its taps

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.forward_batch import DraftedSpans, ForwardBatch
from penstock.kernels.recurrent import (
    causal_conv,
    delta_gates,
    gated_delta,
    keep_conv,
    keep_delta,
    rms_norm_gated,
)
from penstock.layers.cached import CachedLayer
from penstock.layers.context import LayerContext
from penstock.layers.fused_quant import converted
from penstock.layers.linear import ColumnLinear, Linear, RowLinear
from penstock.layers.norm import RMSNorm
from penstock.parallel.parameter import PlacedParameter, new_parameter
from penstock.parallel.shard import Piece, Shard, Span, split, whole
from penstock.types.cache_spec import RecurrentState
from penstock.types.model_spec import DeltaSpec

# Means and spreads of trained values: memories of some tens of tokens.
_TYPICAL_RATE_LOG = (0.5, 1.0)
_TYPICAL_BIAS = (-4.0, 1.0)


class ShortConv(nn.Module):
    """A filter per channel. The channels are the queries of all heads, then keys, then values.

    A rank's channels are three ranges of the checkpoint's tensor, which is small: it is loaded
    whole and cut afterwards.
    """

    def __init__(
        self, channels: tuple[range, ...], num_all: int, width: int, build: LayerContext
    ) -> None:
        super().__init__()
        self.channels = channels
        self.weight: nn.Parameter = new_parameter((num_all, width), build.dtype, build.device)

    def finish(self) -> None:
        kept = torch.cat([self.weight[part.start : part.stop] for part in self.channels])
        self.weight = nn.Parameter(kept, requires_grad=False)


@dataclass(frozen=True, slots=True)
class _DraftedInputs:
    """Of tokens whose place in the output is not known yet."""

    qkvz_TX: Tensor
    k_THK: Tensor
    v_TVD: Tensor
    g_TV: Tensor
    beta_TV: Tensor
    slots_N: Tensor
    spans: DraftedSpans


class GatedDeltaNet(CachedLayer):
    """Key heads, each with its value heads, are split over the ranks.

    The rows of `in_proj_qkvz` and `in_proj_ba` come key head by key head: query, key, the values of
    its R value heads, their gates; and b, then a, of the same. So what is of a rank is one range of
    rows, and they stay as they are, in whatever form they are kept: the convolution picks its
    channels from among the columns.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: DeltaSpec,
        *,
        norm_eps: float,
        build: LayerContext,
    ) -> None:
        super().__init__()
        num_key_heads, num_value_heads = spec.num_key_heads, spec.num_value_heads
        key_size, value_size = spec.key_size, spec.value_size
        ranks = build.mesh.role("attention")
        heads = split("the number of key heads", num_key_heads, ranks.size, ranks.rank)
        group = num_value_heads // num_key_heads
        values = Span(heads.start * group, heads.size * group)
        self.num_key_heads, self.num_value_heads = heads.size, values.size
        self.key_size, self.value_size, self.heads_per_key = key_size, value_size, group
        self.keys_width, self.values_width = heads.size * key_size, values.size * value_size
        self.head_width = 2 * key_size + 2 * group * value_size  # columns of one key head

        self.in_proj_qkvz = ColumnLinear(
            hidden_size, (num_key_heads * self.head_width,), role="attention", bias=False,
            build=build,
        )  # fmt: skip
        # Every rank has all of these few rows: those of several may share the scale of a block.
        self.in_proj_ba = Linear(
            (whole(2 * num_value_heads),), whole(hidden_size), bias=False, build=build
        )
        self.ba_columns = slice(2 * values.start, 2 * values.stop)
        all_keys, all_values = num_key_heads * key_size, num_value_heads * value_size
        self.conv1d = ShortConv(
            (
                _channels(0, heads, key_size),
                _channels(all_keys, heads, key_size),
                _channels(2 * all_keys, values, value_size),
            ),
            2 * all_keys + all_values,
            spec.conv_width,
            build,
        )
        self.A_log = _per_head(num_value_heads, values, _TYPICAL_RATE_LOG, build)
        self.dt_bias = _per_head(num_value_heads, values, _TYPICAL_BIAS, build)
        self.out_norm = RMSNorm(value_size, norm_eps, build)
        self.out_proj = RowLinear(
            all_values, hidden_size, role="attention", bias=False, build=build
        )
        self.register_buffer("columns_F", self._columns().to(build.device), persistent=False)
        self.columns_F: Tensor
        self.run = math.gcd(key_size, group * value_size)  # of columns beside each other
        self.state = spec.state(ranks.size, str(build.dtype).removeprefix("torch."))
        self.conv_SPF: Tensor | None = None
        self.state_SVKD: Tensor | None = None
        self.drafted: _DraftedInputs | None = None

    def _columns(self) -> Tensor:
        """Which column of the fused projection each channel of the convolution reads."""
        at_HX = torch.arange(self.num_key_heads * self.head_width, dtype=torch.int32)
        at_HX = at_HX.view(self.num_key_heads, self.head_width)
        sizes = (self.key_size, self.key_size, self.heads_per_key * self.value_size)
        return torch.cat([part.flatten() for part in at_HX[:, : sum(sizes)].split(sizes, dim=1)])

    def finish(self) -> None:
        self.conv1d.finish()

    def cache_spec(self) -> RecurrentState:
        return self.state

    def bind_cache(self, *planes: Tensor) -> None:
        self.conv_SPF, self.state_SVKD = planes

    def input_format(self, num_tokens: int) -> InputFormat:
        """The one that both projections want; plain where they differ."""
        wanted = self.in_proj_qkvz.input_format(num_tokens)
        return wanted if wanted == self.in_proj_ba.input_format(num_tokens) else PLAIN

    def forward(self, x_TC: Activation, batch: ForwardBatch) -> Tensor:
        """An entry reads and renews its slot; the first tokens of a sequence begin with zeros."""
        assert self.conv_SPF is not None and self.state_SVKD is not None, "cache not bound"
        batch = batch.of_group(self.group)
        qkvz_TX = _project(self.in_proj_qkvz, x_TC, batch)
        ba_TX = _project(self.in_proj_ba, x_TC, batch)[:, self.ba_columns]
        slots_N, has_state_N = _states(batch)
        spans = batch.drafted
        if spans is None:
            entries = (batch.query_starts_N1, batch.num_decodes, 0)
        else:
            entries = (spans.starts_E1, spans.num_single, spans.num_drafted)
        places = (slots_N, has_state_N, *entries)
        qkv_TF = causal_conv(
            qkvz_TX, self.columns_F, self.run, self.conv1d.weight, self.conv_SPF, *places
        )
        widths = (self.keys_width, self.keys_width, self.values_width)
        q_TX, k_TX, v_TX = qkv_TF.split(widths, dim=1)
        g_TV, beta_TV = delta_gates(
            ba_TX.unflatten(1, (self.num_key_heads, 2 * self.heads_per_key)),
            self.A_log,
            self.dt_bias,
        )
        k_THK = k_TX.unflatten(1, (self.num_key_heads, self.key_size))
        v_TVD = v_TX.unflatten(1, (self.num_value_heads, self.value_size))
        q_THK = q_TX.unflatten(1, (self.num_key_heads, self.key_size))
        out_TVD = gated_delta(q_THK, k_THK, v_TVD, g_TV, beta_TV, self.state_SVKD, *places)
        if spans is not None:
            self.drafted = _DraftedInputs(qkvz_TX, k_THK, v_TVD, g_TV, beta_TV, slots_N, spans)
        by_head_THX = qkvz_TX.unflatten(1, (self.num_key_heads, self.head_width))
        z_THE = by_head_THX[:, :, 2 * self.key_size + self.heads_per_key * self.value_size :]
        out_TVD = rms_norm_gated(out_TVD, z_THE, self.out_norm.weight, self.out_norm.eps)
        wanted = self.out_proj.input_format(batch.num_tokens)
        return self.out_proj(converted(out_TVD.flatten(1), wanted), batch)

    def accept(self, num_accepted_N: Tensor) -> None:
        """The accepted tokens' inputs once more, this time for good."""
        assert self.conv_SPF is not None and self.state_SVKD is not None, "cache not bound"
        kept, self.drafted = self.drafted, None
        if kept is None:
            return
        spans = kept.spans
        places = kept.slots_N, spans.starts_E1, num_accepted_N, spans.num_single, spans.num_drafted
        keep_conv(kept.qkvz_TX, self.columns_F, self.run, self.conv_SPF, *places)
        keep_delta(kept.k_THK, kept.v_TVD, kept.g_TV, kept.beta_TV, self.state_SVKD, *places)


def _states(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(slot, whether it holds a state) of each sequence, found once for all layers."""
    if "states" not in batch.plans:
        slots_N, positions_N = batch.slots_T, batch.positions_T
        if batch.num_decodes < batch.num_entries or batch.drafted is not None:
            spans = batch.drafted
            starts_N1 = batch.query_starts_N1 if spans is None else spans.starts_E1
            # An entry that only fills up a CUDA graph may begin behind the last token.
            first_N = starts_N1[:-1].long().clamp(max=batch.num_tokens - 1)
            slots_N, positions_N = slots_N[first_N], positions_N[first_N]
        batch.plans["states"] = slots_N.int(), positions_N > 0
    return cast(tuple[Tensor, Tensor], batch.plans["states"])


def _project(layer: Linear, x_TC: Activation, batch: ForwardBatch) -> Tensor:
    if isinstance(x_TC, Tensor):
        x_TC = converted(x_TC, layer.input_format(batch.num_tokens))
    return layer(x_TC, batch)


def _channels(offset: int, heads: Span, size: int) -> range:
    return range(offset + heads.start * size, offset + heads.stop * size)


def _per_head(
    num_all: int, heads: Span, typical: tuple[float, float], build: LayerContext
) -> PlacedParameter:
    """One number per value head, in fp32 whatever the model has: it goes through exponentials."""
    shard = Shard(full_size=num_all, source=heads, target=Span(0, heads.size))
    pieces = (Piece((shard,)),)
    return new_parameter((heads.size,), torch.float32, build.device, pieces, typical=typical)
