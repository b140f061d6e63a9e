"""The siblings' shapes, built from transformers' own model classes: 2-4 M parameters each.

Sizes are multiples of 64 where real checkpoints' are, so that kernels and quantization meet shapes
they know. How they train fast is in fast_paths.py, the multi-token-prediction head in mtp.py.
"""

from dataclasses import dataclass
from typing import Any

import fast_paths
import torch
from mtp import add_draft_layer
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

# T tokens, S tokens of a row, E experts, A experts chosen per token


@dataclass(frozen=True, slots=True)
class Architecture:
    config_class: type[PreTrainedConfig]
    fields: dict[str, Any]
    format: str = "chatml"
    attention: str = "sdpa"  # where masks are needed; rows of one chat train with fast_paths
    has_aux_loss: bool = False
    has_draft: bool = False  # a trained multi-token-prediction head


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
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 384,
            "max_position_embeddings": 8192,  # Penstock serves it as `tiny`: room to try things out
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
    ),
    "qwen2_moe": Architecture(
        Qwen2MoeConfig,
        _COMMON
        | {
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
        has_aux_loss=True,
    ),
    "deepseek_v3": Architecture(
        DeepseekV3Config,
        _COMMON
        | {
            "hidden_size": 192,  # room for the copies that its draft layer carries
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
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
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
        has_draft=True,
    ),
    "gpt_oss": Architecture(
        GptOssConfig,
        _COMMON
        | {
            "hidden_size": 192,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 64,
            "swiglu_limit": 7.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
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
            "hidden_size": 192,
            "num_hidden_layers": 4,
            # The last is the draft layer's.
            "layer_types": [*["linear_attention", "full_attention"] * 2, "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 80,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
        },
        has_aux_loss=True,
        has_draft=True,
    ),
}


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
    if architecture.has_draft:
        fields["num_hidden_layers"] += 1
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][-fields["num_hidden_layers"] :]
    model = AutoModelForCausalLM.from_config(
        architecture.config_class(**fields), dtype=torch.float32
    )
    if architecture.has_draft:
        add_draft_layer(model)
    fast_paths.use(model)
    return model


def load_balance_loss(router_logits: tuple[Tensor, ...], num_chosen: int) -> Tensor:
    """Grows as routing gathers on few experts; 1 when it is even. Mean over the layers."""
    losses = []
    for logits_TE in router_logits:
        num_experts = logits_TE.shape[-1]
        share_E = logits_TE.float().softmax(-1).mean(0)
        chosen_TA = logits_TE.topk(num_chosen, dim=-1).indices
        used_E = torch.zeros_like(logits_TE).scatter(1, chosen_TA, 1.0).mean(0, dtype=torch.float32)
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
