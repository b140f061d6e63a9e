"""Grouped-query self-attention over a paged cache; states what it must remember."""

# T tokens in the step, C hidden size, H query heads and K kv heads of this rank, D head size
# B cache blocks, S tokens per block

from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.activation import sigmoid_mul
from penstock.kernels.attention.backend import AttentionParams, CacheScales
from penstock.kernels.attention.partial import partial_decode
from penstock.kernels.formats import Activation, Fp8, Fp8Static, InputFormat, num_rows
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.rope import rope_kv_write
from penstock.layers.cached import CachedLayer
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks, Tensors
from penstock.layers.fused_quant import converted
from penstock.layers.linear import QKVLinear, RowLinear
from penstock.layers.norm import RMSNorm
from penstock.layers.rope import Rope
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, Shard, Span, split_heads
from penstock.types.cache_spec import NVFP4, FullKV
from penstock.types.model_spec import QueryGrowth

# Of a cache: the scales of keys and of values where the checkpoint has none. NVFP4 has a second
# scale per 16 channels, E4M3, which is precise from 2^-6 on: these are for keys up to 84 and
# values up to 21.
_USUAL_SCALES = {"float8_e4m3fn": (1.0, 1.0), NVFP4: (1 / 32, 1 / 128)}
# That many times what the scales are for is still held. A power of two moves the exponents of the
# second scales and changes no number but those of groups that are 1 / 3584 of the largest or less.
_HEADROOM = 8.0


class Attention(CachedLayer):
    """`window=w`: a token sees itself and the w - 1 before it.

    `qk_norm_eps`: query and key heads are normalized before the rotation.
    `gated`: a head's output is multiplied by a sigmoid of one more projection of the input.
    `zero_centered_norms`: of queries and keys, see `RMSNorm`. `has_norm_weights` False: both are
    scaled to one and by nothing else.
    `query_growth`: queries are multiplied by a number that follows from their position.
    `has_chunks`: the window begins at the last multiple of w that is not behind the token.
    `scale`: of the scores; None is by the head size. `soft_cap`: they become cap * tanh(s / cap).
    `in_size`: of the input, where it is not the hidden size.
    `sinks`: each head has a score that takes part in the softmax and has no value.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        rope: Rope,
        build: LayerContext,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        has_chunks: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        gated: bool = False,
        zero_centered_norms: bool = False,
        has_norm_weights: bool = True,
        query_growth: QueryGrowth | None = None,
        in_size: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.params = AttentionParams(
            head_size**-0.5 if scale is None else scale,
            window,
            has_chunks=has_chunks and window is not None,
            soft_cap=soft_cap,
        )
        self.rope = rope
        self.backend = build.attention
        self.cache_dtype = str(build.cache_dtype).removeprefix("torch.")
        self.cache_scales = (1.0, 1.0)  # a stored key times the first is the key; the second: value
        if (usual := _USUAL_SCALES.get(self.cache_dtype)) is not None:
            self.k_scale, self.v_scale = (
                new_parameter((1,), torch.float32, build.device, default=scale) for scale in usual
            )
        self.gated = gated
        self.qkv_proj = QKVLinear(
            in_size or hidden_size,
            num_heads,
            num_kv_heads,
            head_size,
            bias=qkv_bias,
            build=build,
            gated=gated,
        )
        self.o_proj = RowLinear(
            num_heads * head_size, hidden_size, role="attention", bias=out_bias, build=build
        )
        self.qk_norm_eps = qk_norm_eps or 0.0
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norm_ones: Tensor | None = None  # in the place of both weights
        if qk_norm_eps is not None and has_norm_weights:
            self.q_norm, self.k_norm = (
                RMSNorm(head_size, qk_norm_eps, build, zero_centered=zero_centered_norms)
                for _ in range(2)
            )
        elif qk_norm_eps is not None:
            self.norm_ones = torch.ones(head_size, dtype=build.dtype, device=build.device)
        self.query_growth = query_growth
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.sinks: Tensor | None = None
        if sinks:
            ranks = build.mesh.role("attention")
            heads = split_heads(num_heads, num_kv_heads, ranks.size, ranks.rank).query
            shard = Shard(full_size=num_heads, source=heads, target=Span(0, heads.size))
            self.sinks = new_parameter(
                (heads.size,), torch.float32, build.device, (Piece((shard,)),), typical=(0.0, 1.0)
            )
        self.context = ContextRanks(build)
        self.partial_op = (
            partial_decode.reference if build.attention.name == "reference" else partial_decode
        )
        self.planes: Tensors = ()  # of keys and values; of int8 and NVFP4 also their scales

    def finish(self) -> None:
        """After loading: scales become numbers, that of keys a factor of the scores' scale."""
        if self.cache_dtype in _USUAL_SCALES:
            headroom = _HEADROOM if self.cache_dtype == NVFP4 else 1.0
            k_scale, v_scale = float(self.k_scale) * headroom, float(self.v_scale) * headroom
            self.cache_scales = k_scale, v_scale
            self.params = replace(self.params, scale=self.params.scale * k_scale, v_scale=v_scale)

    def cache_spec(self) -> FullKV:
        return FullKV(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.cache_dtype,
            window=self.params.window,
        )

    def bind_cache(self, *planes: Tensor) -> None:
        self.planes = planes

    def input_format(self, num_tokens: int) -> InputFormat:
        return self.qkv_proj.input_format(num_tokens)

    def forward(self, x_TC: Activation, batch: ForwardBatch) -> Tensor:
        assert self.planes, "cache not bound"
        batch, num_tokens = batch.of_group(self.group), num_rows(x_TC)
        qkv_TND = self.qkv_proj(x_TC, batch).view(num_tokens, -1, self.head_size)
        wanted = self.o_proj.input_format(num_tokens)
        out_scale_1 = None
        if self.context.size > 1:
            out_THD = self.context.attend(self, (qkv_TND,), batch)
        else:
            if isinstance(wanted, Fp8Static) and not self.gated:
                out_scale_1 = wanted.scale_1
            queries = self.write((qkv_TND,), batch.positions_T, self.planes, batch.slots_T)
            out_THD = self.attend(queries, self.planes, batch, out_scale_1)
        if self.gated:
            out_THD = sigmoid_mul(out_THD, qkv_TND[:, 1 : 2 * self.num_heads : 2])
        out_TD = out_THD.flatten(1)
        if out_scale_1 is not None:
            return self.o_proj(Fp8(out_TD, out_scale_1), batch)
        return self.o_proj(converted(out_TD, wanted), batch)

    def write(
        self, inputs: Tensors, positions_T: Tensor, planes: Tensors, slots_T: Tensor
    ) -> Tensors:
        (qkv_TND,) = inputs
        k_cache_BKSD, v_cache_BKSD, *token_scales = planes
        q_THD = rope_kv_write(
            qkv_TND,
            self.q_norm.weight if self.q_norm is not None else self.norm_ones,
            self.k_norm.weight if self.k_norm is not None else self.norm_ones,
            self.qk_norm_eps,
            self.rope.cos_sin_PR,
            positions_T,
            k_cache_BKSD,
            v_cache_BKSD,
            slots_T,
            *self.cache_scales,
            self.gated,
            *token_scales,
        )
        if self.query_growth is not None:
            q_THD = _grown(q_THD, positions_T, self.query_growth)
        return (q_THD,)

    def attend(
        self,
        queries: Tensors,
        planes: Tensors,
        batch: ForwardBatch,
        out_scale_1: Tensor | None = None,
    ) -> Tensor:
        (q_THD,), (k_cache_BKSD, v_cache_BKSD, *token_scales) = queries, planes
        return self.backend.attend(
            q_THD,
            k_cache_BKSD,
            v_cache_BKSD,
            batch,
            self.params,
            self.sinks,
            CacheScales(*token_scales) if token_scales else None,
            out_scale_1,
        )

    def attend_part(
        self, queries: Tensors, batch: ForwardBatch, kv_lens_N: Tensor, max_kv_len: int
    ) -> tuple[Tensor, Tensor]:
        (q_NHD,), (k_cache_BKSD, v_cache_BKSD, *token_scales) = queries, self.planes
        return self.partial_op(
            q_NHD,
            k_cache_BKSD,
            v_cache_BKSD,
            batch.rows_N,
            kv_lens_N,
            batch.block_table_RM,
            replace(self.params, window=None, has_chunks=False),
            max_kv_len,
            *token_scales,
        )


def _grown(q_THD: Tensor, positions_T: Tensor, growth: QueryGrowth) -> Tensor:
    intervals_T = torch.floor((positions_T.float() + 1.0) / growth.interval)
    scale_T = torch.log1p(intervals_T) * growth.factor + 1.0
    return (q_THD * scale_T[:, None, None]).to(q_THD.dtype)
