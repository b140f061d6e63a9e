"""Quicker ways to compute what transformers' modules compute, for training on short rows.

Each is the same function (tests compare them): all experts as two matrix products, the causal mask
left to the attention kernel, norms as one kernel, and the gated delta rule in small chunks without
a triangular solve. A checkpoint does not know of them.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

# T tokens, D hidden size, E experts, F size of an expert, A experts chosen per token;
# B rows, S tokens of a row, H heads, P heads of all rows, N chunks, C tokens of a chunk,
# K and V sizes of a head, X experts and their size as one

CAUSAL = "causal_without_mask"
_CHUNK = 16


def dense_experts(experts: Any, x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """Every expert on every token, weighted by zero where it was not chosen.

    More arithmetic than routing, but plain matrix products: no sort and no wait for the GPU.
    """
    num_tokens, num_experts = x_TD.shape[0], experts.num_experts
    chosen_TE = x_TD.new_zeros(num_tokens, num_experts).scatter(1, index_TA, weight_TA.to(x_TD))
    if experts.has_bias:
        hidden_TEF, share_TE = _clamped_gate(experts, x_TD, chosen_TE)
        down_EFD = experts.down_proj
        bias_TD = chosen_TE @ experts.down_proj_bias
    else:
        up_DX = experts.gate_up_proj.flatten(0, 1).T
        hidden_TEF = experts._apply_gate((x_TD @ up_DX).view(num_tokens, num_experts, -1))
        share_TE, down_EFD, bias_TD = chosen_TE, experts.down_proj.transpose(1, 2), None
    flat_TX = (hidden_TEF * share_TE.unsqueeze(-1)).flatten(1)
    down_XD = down_EFD.reshape(-1, x_TD.shape[-1])
    return flat_TX @ down_XD if bias_TD is None else torch.addmm(bias_TD, flat_TX, down_XD)


def _clamped_gate(experts: Any, x_TD: Tensor, chosen_TE: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-OSS's gate [T E F] and what to weight it with, in few passes over the memory.

    gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha: alpha goes into the weights before
    and the routing weights behind, and the 1 that is added to `up` goes into its bias.
    """
    alpha, limit = experts.alpha, experts.limit
    weight_DXP = experts.gate_up_proj.permute(1, 0, 2).reshape(x_TD.shape[-1], -1, 2)
    bias_XP = experts.gate_up_proj_bias.reshape(-1, 2)
    gate_TX = torch.addmm(bias_XP[:, 0] * alpha, x_TD, weight_DXP[..., 0] * alpha)
    up_TX = torch.addmm(bias_XP[:, 1] + 1, x_TD, weight_DXP[..., 1])
    gate_TX = F.hardtanh(gate_TX, float("-inf"), alpha * limit)
    up_TX = F.hardtanh(up_TX, 1 - limit, 1 + limit)
    hidden_TX = F.silu(gate_TX) * up_TX
    return hidden_TX.view(*chosen_TE.shape, -1), chosen_TE / alpha


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Every earlier token of the row; transformers makes no masks for a name it does not know."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
ALL_ATTENTION_FUNCTIONS.register(CAUSAL, causal_attention)


def row_masks(model: PreTrainedModel, num_tokens: int) -> dict[str, Tensor] | None:
    """The masks that GPT-OSS needs for rows of one chat; the others train with `CAUSAL`."""
    if model.config._attn_implementation == CAUSAL:
        return None
    row_S = torch.arange(num_tokens, device=model.device)
    distance_SS = row_S[:, None] - row_S[None, :]
    seen = distance_SS >= 0
    masks = {
        "full_attention": seen,
        "sliding_attention": seen & (distance_SS < model.config.sliding_window),
    }
    lowest = torch.finfo(model.dtype).min
    return {
        kind: torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, lowest)[None, None]
        for kind, mask in masks.items()
    }


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _centred_norm(module: Any, x: Tensor) -> Tensor:
    """Qwen3-Next's: its weight is what the scale has over one."""
    unit = F.rms_norm(x, module.weight.shape, None, module.eps)
    return torch.addcmul(unit, unit, module.weight)


def _gated_norm(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    return _norm(module, x) * F.silu(gate)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular matrices, by doubling the inverted blocks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
        block = 1
        while block < size:
            pair, half = index // (2 * block), index // block % 2
            is_corner = (pair[:, None] == pair) & (half[:, None] > half)
            inverse = inverse - inverse @ (a * is_corner) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grads[0] @ turned).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    result: Tensor = _UnitLowerInverse.apply(a)  # type: ignore[no-untyped-call]
    return result


_chunk_rule = qwen3_next.torch_chunk_gated_delta_rule
_convolution = qwen3_next.causal_conv1d_fn


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over rows [B S H K]; with a state, transformers' own."""
    is_fitting = use_qk_l2norm_in_kernel and query.shape[1] % _CHUNK == 0
    if initial_state is not None or output_final_state or not is_fitting:
        return _chunk_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )
    # Newer releases of transformers leave it to the rule to share q and k between heads of v.
    num_shared = value.shape[2] // query.shape[2]
    query, key = (x.repeat_interleave(num_shared, dim=2) for x in (query, key))
    dtype, (rows, num_tokens, heads, size) = query.dtype, query.shape
    shape = (rows, num_tokens // _CHUNK, _CHUNK, heads, -1)

    def chunks(x: Tensor) -> Tensor:
        x = x.reshape(shape).permute(0, 3, 1, 2, 4)
        return x.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)

    q, k, v = chunks(_unit(query, size**-0.5)), chunks(_unit(key)), chunks(value)
    beta_PNC1 = chunks(beta)
    sum_PNC1 = chunks(g).cumsum(2)
    lower_CC = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    gap = sum_PNC1 - sum_PNC1.transpose(-1, -2)
    decay_PNCC = gap.masked_fill(~lower_CC, float("-inf")).exp()
    k_turned = k.transpose(-1, -2)
    within_PNCC = q @ k_turned * decay_PNCC
    # a chunk's matrices are a quarter of its keys and values: what scales those goes into these
    overlap_PNCC = k @ k_turned * decay_PNCC * beta_PNC1
    inverse_PNCC = unit_lower_inverse(overlap_PNCC.tril(-1)) * beta_PNC1.transpose(-1, -2)
    grown_PNC1 = sum_PNC1.exp()
    new_PNCV = inverse_PNCC @ v
    read_PNCK = (inverse_PNCC * grown_PNC1.transpose(-1, -2)) @ k
    last = sum_PNC1[:, :, -1:]
    left_PNCK = k * (last - sum_PNC1).exp()
    state_PKV = v.new_zeros(rows * heads, size, v.shape[-1])
    outs = []
    # taken apart at once: a chunk taken alone would have a gradient as large as all of them
    parts = (new_PNCV, read_PNCK, q * grown_PNC1, within_PNCC, left_PNCK, last.exp())
    for new, read, asked, within, left, fade in zip(*(x.unbind(1) for x in parts), strict=True):
        added_PCV = torch.baddbmm(new, read, state_PKV, alpha=-1)
        outs.append(torch.baddbmm(asked @ state_PKV, within, added_PCV))
        state_PKV = torch.baddbmm(state_PKV * fade, left.transpose(1, 2), added_PCV)
    out = torch.stack(outs, 1).unflatten(0, (rows, heads)).permute(0, 2, 3, 1, 4)
    return out.reshape(rows, num_tokens, heads, -1).to(dtype), None


def _unit(x: Tensor, length: float = 1.0) -> Tensor:
    """Vectors of a length, as transformers' l2norm makes them, by the kernel of the norms."""
    size = x.shape[-1]
    return F.rms_norm(x, (size,), x.new_full((size,), length * size**-0.5), 1e-6 / size)


def short_convolution(
    x_BDS: Tensor, weight_DW: Tensor, bias: Tensor | None = None, activation: str = "silu", **_: Any
) -> Tensor:
    """A causal convolution per channel as a few shifted products."""
    if bias is not None or activation != "silu":
        raise ValueError(f"only without bias and with silu, got {activation}")
    width, num_tokens = weight_DW.shape[-1], x_BDS.shape[-1]
    padded = F.pad(x_BDS, (width - 1, 0))
    out = padded[..., :num_tokens] * weight_DW[:, :1]
    for i in range(1, width):
        out = torch.addcmul(out, padded[..., i : i + num_tokens], weight_DW[:, i : i + 1])
    return F.silu(out)


def use(model: nn.Module) -> None:
    """Let the model's modules compute by the ways above; the experts' is chosen in its config."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Qwen3NextRMSNorm":
            module.forward = MethodType(_centred_norm, module)
        elif kind == "Qwen3NextRMSNormGated":
            module.forward = MethodType(_gated_norm, module)
        elif kind.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
    qwen3_next.torch_chunk_gated_delta_rule = chunk_delta_rule
    qwen3_next.causal_conv1d_fn = short_convolution
