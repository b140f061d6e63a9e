"""Multi-head latent attention over a paged cache of latents; states what it must remember.

Queries may have a latent, too (`q_rank`). The heads are split over the role, the latents are not.
"""

# T tokens in the step, M hidden size, H heads of this rank, C latent size, R rotated channels,
# A = C + R, D other channels of a head's query and key, V value size, E = D + V
# B cache blocks, S tokens per block

import torch
from torch import Tensor

from penstock.kernels.attention.mla import (
    PIECE_TOKENS,
    AbsorbedTokens,
    cached,
    mla_attend,
    mla_decode,
    mla_project,
    mla_write,
    prefill,
    prefill_plan,
)
from penstock.kernels.formats import Activation, InputFormat, num_rows
from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.cached import CachedLayer
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks, Tensors
from penstock.layers.fused_quant import converted, normed
from penstock.layers.linear import ColumnLinear, Linear, RowLinear
from penstock.layers.norm import RMSNorm
from penstock.layers.rope import Rope
from penstock.parallel.shard import Span, split, stack_shards, whole
from penstock.types.cache_spec import LatentKV
from penstock.types.model_spec import LatentSpec

_NORM_EPS = 1e-6  # of the latents' norms, whatever the model's other norms have


class LatentAttention(CachedLayer):
    """`scale` multiplies the scores."""

    # Behind a longer prefix pieces of expanded keys and values are faster than absorbed queries.
    max_captured_prefix = PIECE_TOKENS

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        latent: LatentSpec,
        *,
        scale: float,
        rope: Rope,
        build: LayerContext,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.latent, self.scale, self.rope = latent, scale, rope
        self.cache_dtype = str(build.cache_dtype).removeprefix("torch.")
        ranks = build.mesh.role("attention")
        heads = split("the number of attention heads", num_heads, ranks.size, ranks.rank)
        self.num_heads = heads.size
        self.head_size = latent.nope_size + latent.rope_size
        if latent.q_rank is None:
            queries = (
                num_heads * self.head_size,
                Span(heads.start * self.head_size, heads.size * self.head_size),
            )
        else:
            queries = (latent.q_rank, Span(0, latent.q_rank))
            self.q_norm = RMSNorm(latent.q_rank, _NORM_EPS, build)
            self.q_b_proj = ColumnLinear(
                latent.q_rank,
                (num_heads * self.head_size,),
                role="attention",
                bias=False,
                build=build,
            )
        cached_size = latent.kv_rank + latent.rope_size
        self.qkv_a_proj = Linear(  # two layers with the same input
            stack_shards([queries, (cached_size, Span(0, cached_size))]),
            whole(hidden_size),
            bias=bias,
            build=build,
        )
        self.widths = (queries[1].size, cached_size)
        self.kv_norm = RMSNorm(latent.kv_rank, _NORM_EPS, build)
        self.kv_b_proj = ColumnLinear(
            latent.kv_rank,
            (num_heads * (latent.nope_size + latent.value_size),),
            role="attention",
            bias=False,
            build=build,
        )
        self.o_proj = RowLinear(
            num_heads * latent.value_size, hidden_size, role="attention", bias=bias, build=build
        )
        by_reference = build.attention.name == "reference"
        self.decode_op = mla_decode.reference if by_reference else mla_decode
        self.attend_op = mla_attend.reference if by_reference else mla_attend
        self.project_op = mla_project.reference if by_reference else mla_project
        self.context = ContextRanks(build)
        self.sinks: Tensor | None = None
        self.weight_HEC: Tensor | None = None
        self.planes: Tensors = ()

    def finish(self) -> None:
        """After loading: the matrices of keys and values become plain numbers, however they were
        stored. One form serves both ways to attend, and decodes need it as a batch of matrices."""
        self.kv_b_proj.finish()
        self.weight_HEC = self.kv_b_proj.values().unflatten(0, (self.num_heads, -1))
        del self.kv_b_proj

    def cache_spec(self) -> LatentKV:
        return LatentKV(
            latent_size=self.latent.kv_rank,
            rope_size=self.latent.rope_size,
            dtype=self.cache_dtype,
        )

    def bind_cache(self, *planes: Tensor) -> None:
        self.planes = planes

    def input_format(self, num_tokens: int) -> InputFormat:
        return self.qkv_a_proj.input_format(num_tokens)

    def forward(self, x_TM: Activation, batch: ForwardBatch) -> Tensor:
        assert self.planes, "cache not bound"
        batch, num_tokens = batch.of_group(self.group), num_rows(x_TM)
        q_TQ, kv_TA = self.qkv_a_proj(x_TM, batch).split(self.widths, dim=1)
        if self.latent.q_rank is not None:
            wanted = self.q_b_proj.input_format(num_tokens)
            latent_TQ, _ = normed(q_TQ, None, self.q_norm.weight, self.q_norm.eps, wanted)
            q_TQ = self.q_b_proj(latent_TQ, batch)
        q_THD, q_THR = q_TQ.unflatten(1, (self.num_heads, self.head_size)).split(
            (self.latent.nope_size, self.latent.rope_size), dim=2
        )
        if self.context.size > 1:
            out_THV = self.context.attend(self, (q_THD, q_THR, kv_TA), batch)
        else:
            inputs = q_THD, q_THR, kv_TA
            queries = self.write(inputs, batch.positions_T, self.planes, batch.slots_T)
            out_THV = self.attend(queries, self.planes, batch)
        wanted = self.o_proj.input_format(num_tokens)
        return self.o_proj(converted(out_THV.flatten(1), wanted), batch)

    def write(
        self, inputs: Tensors, positions_T: Tensor, planes: Tensors, slots_T: Tensor
    ) -> Tensors:
        q_THD, q_THR, kv_TA = inputs
        (cache_BSA,) = planes
        rotated = mla_write(
            q_THR,
            kv_TA,
            self.kv_norm.weight,
            self.kv_norm.eps,
            self.rope.cos_sin_PR,
            positions_T,
            cache_BSA,
            slots_T,
            self.latent.is_interleaved,
        )
        return q_THD, *rotated

    def attend(self, queries: Tensors, planes: Tensors, batch: ForwardBatch) -> Tensor:
        """Decodes, whose tokens are the first, and then the others."""
        assert self.weight_HEC is not None, "not finished"
        (q_THD, q_THR, kv_TA), (cache_BSA,) = queries, planes
        num_decodes, outputs = batch.num_decodes, []
        if num_decodes:
            outputs.append(
                self._absorbed(
                    q_THD[:num_decodes],
                    q_THR[:num_decodes],
                    cache_BSA,
                    batch.rows_N[:num_decodes],
                    batch.kv_lens_N[:num_decodes],
                    batch,
                )
            )
        if num_decodes < batch.num_entries:
            if cache_BSA.dtype != kv_TA.dtype:  # a prompt reads the same at once and in chunks
                kv_TA = cached(cache_BSA, batch.slots_T, kv_TA.dtype)
            plan = prefill_plan(batch, cache_BSA.shape[1])
            out_THV = prefill(
                q_THD[num_decodes:],
                q_THR[num_decodes:],
                kv_TA[num_decodes:],
                self.weight_HEC,
                cache_BSA,
                plan,
                self.latent.value_size,
                self.scale,
                self.attend_op,
            )
            if (absorbed := plan.absorbed) is not None:
                self._put_absorbed(
                    q_THD[num_decodes:], q_THR[num_decodes:], cache_BSA, absorbed, batch, out_THV
                )
            outputs.append(out_THV)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_part(
        self, queries: Tensors, batch: ForwardBatch, kv_lens_N: Tensor, max_kv_len: int
    ) -> tuple[Tensor, Tensor]:
        (q_NHD, q_NHR, _), (cache_BSA,) = queries, self.planes
        lse_NH = torch.empty(q_NHD.shape[:2], dtype=torch.float32, device=q_NHD.device)
        out_NHV = self._absorbed(
            q_NHD, q_NHR, cache_BSA, batch.rows_N, kv_lens_N, batch, max_kv_len, lse_NH
        )
        return out_NHV, lse_NH

    def _put_absorbed(
        self,
        q_THD: Tensor,
        q_THR: Tensor,
        cache_BSA: Tensor,
        absorbed: AbsorbedTokens,
        batch: ForwardBatch,
        out_THV: Tensor,
    ) -> None:
        """As `_absorbed`, of those of the tokens that are: they are known to the device alone, and
        often there are none."""
        keys_HDC, values_HVC = self._matrices()
        q_THC = q_THD.new_empty((*q_THD.shape[:2], self.latent.kv_rank))
        self.project_op(q_THD, keys_HDC.transpose(1, 2), absorbed.kv_lens_T, q_THC)
        latents_THC = self.decode_op(
            q_THC,
            q_THR,
            cache_BSA,
            absorbed.rows_T,
            absorbed.kv_lens_T,
            batch.block_table_RM,
            self.scale,
            batch.max_kv_len,
        )
        self.project_op(latents_THC, values_HVC, absorbed.kv_lens_T, out_THV)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values."""
        assert self.weight_HEC is not None, "not finished"
        keys_HDC, values_HVC = self.weight_HEC.split(
            (self.latent.nope_size, self.latent.value_size), dim=1
        )
        return keys_HDC, values_HVC

    def _absorbed(
        self,
        q_NHD: Tensor,
        q_NHR: Tensor,
        cache_BSA: Tensor,
        rows_N: Tensor,
        kv_lens_N: Tensor,
        batch: ForwardBatch,
        max_kv_len: int | None = None,
        lse_NH: Tensor | None = None,
    ) -> Tensor:
        """One query per entry over the cached latents themselves; see `mla_decode`."""
        keys_HDC, values_HVC = self._matrices()
        out_NHC = self.decode_op(
            torch.bmm(q_NHD.transpose(0, 1), keys_HDC).transpose(0, 1),
            q_NHR,
            cache_BSA,
            rows_N,
            kv_lens_N,
            batch.block_table_RM,
            self.scale,
            max_kv_len or batch.max_kv_len,
            lse_NH,
        )
        return torch.bmm(out_NHC.transpose(0, 1), values_HVC.transpose(1, 2)).transpose(0, 1)
