"""The siblings' shapes, built from transformers' own model classes: 2-4 M parameters each.

Sizes are multiples of 64 where real checkpoints' are, so that kernels and quantisation meet shapes
they know. Multi-token-prediction heads (DeepSeek, Qwen3-Next) are not part of this.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

# T tokens, D hidden size, E experts, F size of an expert, A experts chosen per token


@dataclass(frozen=True, slots=True)
class Architecture:
    config_class: type[PreTrainedConfig]
    fields: dict[str, Any]
    format: str = "chatml"
    attention: str = "sdpa"
    has_aux_loss: bool = False


_COMMON = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

ARCHITECTURES = {
    "llama": Architecture(
        LlamaConfig,
        _COMMON
        | {
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
    ),
    "qwen2_moe": Architecture(
        Qwen2MoeConfig,
        _COMMON
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
            "rope_parameters": _ROPE,
        },
        has_aux_loss=True,
    ),
    "deepseek_v3": Architecture(
        DeepseekV3Config,
        _COMMON
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "intermediate_size": 512,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
    ),
    "gpt_oss": Architecture(
        GptOssConfig,
        _COMMON
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
        format="harmony",
        attention="eager",
        has_aux_loss=True,
    ),
    "qwen3_next": Architecture(
        Qwen3NextConfig,
        _COMMON
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
        },
        has_aux_loss=True,
    ),
}


def dense_experts(experts: Any, x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """Every expert on every token, weighted by zero where it was not chosen.

    More arithmetic than routing, but two plain matrix products: no sort and no wait for the GPU,
    and under autocast.
    """
    num_experts, transposed = experts.num_experts, experts.is_transposed
    up = experts.gate_up_proj if transposed else experts.gate_up_proj.transpose(1, 2)  # E D 2F
    down = experts.down_proj if transposed else experts.down_proj.transpose(1, 2)  # E F D
    gate_TE = torch.zeros(x_TD.shape[0], num_experts, dtype=weight_TA.dtype, device=x_TD.device)
    gate_TE = gate_TE.scatter(1, index_TA, weight_TA)
    hidden = x_TD @ up.permute(1, 0, 2).reshape(x_TD.shape[-1], -1)
    hidden = hidden.view(x_TD.shape[0], num_experts, -1)
    if experts.has_bias:
        hidden = hidden + experts.gate_up_proj_bias
    hidden_TEF = experts._apply_gate(hidden) * gate_TE.unsqueeze(-1)
    out_TD = hidden_TEF.flatten(1).to(down.dtype) @ down.reshape(-1, x_TD.shape[-1])
    if experts.has_bias:
        out_TD = out_TD + gate_TE.to(down.dtype) @ experts.down_proj_bias
    return out_TD.to(x_TD.dtype)


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def build_model(
    name: str,
    vocab_size: int,
    stop_ids: list[int],
    pad_id: int,
    hidden_size: int | None = None,
    num_layers: int | None = None,
) -> Any:
    """A sibling with fresh fp32 weights; `hidden_size` and `num_layers` shrink it for a trial."""
    architecture = ARCHITECTURES[name]
    fields = architecture.fields | {
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
        "pad_token_id": pad_id,
        "attn_implementation": architecture.attention,
        "experts_implementation": "dense",
    }
    if hidden_size is not None:
        fields["hidden_size"] = hidden_size
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    config = architecture.config_class(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert model.config._experts_implementation == "dense" or name == "llama"
    return model


def attention_masks(
    model: PreTrainedModel, positions_BS: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What each position may see in rows of several chats: earlier tokens of its own chat.

    A position of zero begins a chat. Made here because transformers' own detection of packed rows
    waits for the GPU, and is missing from GPT-OSS.
    """
    chat_BS = (positions_BS == 0).cumsum(1)
    row_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    distance_SS = row_S[:, None] - row_S[None, :]
    same_BSS = chat_BS[:, :, None] == chat_BS[:, None, :]
    full = (same_BSS & (distance_SS >= 0))[:, None]
    if model.config._attn_implementation == "sdpa":
        return full
    near = full & (distance_SS < model.config.sliding_window)
    lowest = torch.finfo(dtype).min
    return {
        kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
        for kind, mask in (("full_attention", full), ("sliding_attention", near))
    }


def load_balance_loss(router_logits: tuple[Tensor, ...], num_chosen: int) -> Tensor:
    """Grows as routing gathers on few experts; 1 when it is even. Mean over the layers."""
    losses = []
    for logits_TE in router_logits:
        num_experts = logits_TE.shape[-1]
        share_E = logits_TE.float().softmax(-1).mean(0)
        chosen_TA = logits_TE.topk(num_chosen, dim=-1).indices
        used_E = torch.zeros_like(logits_TE).scatter(1, chosen_TA, 1.0).float().mean(0)
        losses.append(num_experts * (share_E * used_E).sum() / num_chosen)
    return torch.stack(losses).mean()


class BiasBalancer:
    """Moves DeepSeek's routing biases so that each expert gets its share, without a loss."""

    def __init__(self, model: nn.Module, speed: float) -> None:
        self._speed = speed
        self._counts: dict[Any, Tensor] = {}
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.register_forward_hook(self._count)

    def _count(self, router: Any, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        if router.training:
            chosen = outputs[2].flatten()
            counts = torch.zeros_like(router.e_score_correction_bias)
            self._counts[router] = counts.scatter_add(0, chosen, counts.new_ones(chosen.shape))

    @torch.no_grad()
    def step(self) -> None:
        for router, counts in self._counts.items():
            router.e_score_correction_bias += self._speed * (counts.mean() - counts).sign()
