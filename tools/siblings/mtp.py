"""The multi-token-prediction head of DeepSeek-V3 and Qwen3-Next, which transformers does not have.

One more decoder layer reads the main model's last hidden state at t (after its final norm) beside
the embedding of token t+1, and says token t+2 through the main model's embedding and output matrix.
The layer is kept as the model's layer behind its last, which transformers builds, initialises and
saves but does not run; `to_checkpoint_names` gives its tensors the names of real checkpoints.
"""

from typing import Any

import torch
from torch import Tensor, nn

# B rows, S tokens of a row, D hidden size

_QWEN3_NEXT_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head_norm.": "mtp.norm.",
}


def add_draft_layer(model: Any) -> None:
    """Make the last layer of a fresh model its draft layer."""
    config = model.config
    config.num_hidden_layers -= 1
    if getattr(config, "layer_types", None) is not None:
        if config.layer_types[-1] != "full_attention":
            raise ValueError(f"a draft layer needs full attention, got {config.layer_types[-1]}")
        config.layer_types = config.layer_types[:-1]
    layer, norm, size = draft_layer(model), model.model.norm, config.hidden_size
    eps = config.rms_norm_eps
    layer.enorm, layer.hnorm, layer.shared_head_norm = (type(norm)(size, eps) for _ in range(3))
    layer.eh_proj = nn.Linear(2 * size, size, bias=False)
    nn.init.normal_(layer.eh_proj.weight, std=config.initializer_range)


def draft_layer(model: Any) -> Any:
    return model.model.layers[model.config.num_hidden_layers]


def draft_hidden(model: Any, hidden_BSD: Tensor, tokens_BS: Tensor) -> Tensor:
    """What the output matrix turns into logits of token t+2, at every t; the last is of no use."""
    layer = draft_layer(model)
    next_BS = tokens_BS.roll(-1, dims=1)
    embedding_BSD = layer.enorm(model.model.embed_tokens(next_BS))
    x_BSD = layer.eh_proj(torch.cat([embedding_BSD, layer.hnorm(hidden_BSD)], dim=-1))
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
    out_BSD = layer(
        x_BSD,
        attention_mask=None,
        position_embeddings=model.model.rotary_emb(x_BSD, positions),
        position_ids=positions,
    )
    return layer.shared_head_norm(out_BSD)


def to_checkpoint_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a saved model, the draft layer's named as DeepSeek's or Qwen's loaders ask."""
    num_layers = model.config.num_hidden_layers
    prefix = f"model.layers.{num_layers}."
    renamed = {}
    for name, tensor in tensors.items():
        rest = name.removeprefix(prefix)
        if rest == name:
            renamed[name] = tensor
        elif model.config.model_type == "deepseek_v3":
            renamed[prefix + rest.replace("shared_head_norm.", "shared_head.norm.")] = tensor
        else:
            own = [
                new + rest[len(old) :]
                for old, new in _QWEN3_NEXT_NAMES.items()
                if rest.startswith(old)
            ]
            renamed[own[0] if own else f"mtp.layers.0.{rest}"] = tensor
    if model.config.model_type == "deepseek_v3":  # real ones carry copies of both
        embedding = tensors["model.embed_tokens.weight"]
        renamed[prefix + "embed_tokens.weight"] = embedding.clone()
        renamed[prefix + "shared_head.head.weight"] = embedding.clone()
    return renamed
