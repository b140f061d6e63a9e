"""`Family`: how a model type reads `config.json`: its defaults, what it fixes, what only it has.

One record per model type, beside its model (`llama_config.py`, ...). `spec.py` reads what all
models have. Needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.models.fields import Fields
from penstock.models.windows import WindowReader, full_attention
from penstock.types.model_spec import DeltaSpec, LatentSpec, MoeSpec

_MAX_EXPERTS = 1 << 16  # far more than any model has


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    architecture: str
    vocab_size: int | None = None  # None: the file must say it
    max_position: int = 32768
    num_heads: int | None = None  # None: the file must say it
    num_kv_heads: int | None = 32  # None: as many as query heads
    head_size: int | None = None  # None: hidden size / heads
    bos: int | None = None
    eos: int | None = None
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    reads_qkv_bias: bool = True  # the field `qkv_bias` counts where there is one
    out_bias: bool | None = None  # None: as `attention_bias` says
    attention_bias: bool = False  # where `attention_bias` says nothing
    mlp_bias: bool | None = False  # None: as `mlp_bias` says
    qk_norm: bool = False
    activation: str = "silu"  # as `hidden_act` must say it
    activation_field: str = "hidden_act"
    tie_embeddings: bool = False
    rotated: float | None = None  # share of a head where the file says none; None: always all
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    sandwich_norms: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)  # where the file says nothing of it
    window_theta: float | None = None  # layers with a window have their own; None: they have not
    rotates_windows_only: bool = False  # heads of layers without a window are not rotated
    num_nextn_predict_layers: int | None = None  # where that says nothing; None: there are none
    windows: WindowReader = full_attention
    latent: Callable[[Fields], LatentSpec] | None = None
    delta: Callable[[Fields, int], DeltaSpec] | None = None  # given the number of layers
    moe: Callable[[Fields, int], MoeSpec] | None = None  # the same
    further: Callable[[Fields], dict[str, Any]] | None = None  # more fields of `ModelSpec`


def experts(
    *,
    num_experts: int,
    num_active: int,
    intermediate_size: int | None = None,
    shared_intermediate_size: int = 0,
    renormalize: bool | None = None,
    norm_topk: bool = False,
    gate_limit: float | None = None,
) -> Callable[[Fields, int], MoeSpec]:
    """Reader of the fields that most models with experts have, with these defaults.

    `intermediate_size`: None is that of the model's MLPs. `renormalize`: None is as
    `norm_topk_prob` says, `norm_topk` where that says nothing. `gate_limit`: where `swiglu_limit`
    says nothing; None: there is never one.
    """

    def read(config: Fields, num_layers: int) -> MoeSpec:
        name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        total = config.count(name, num_experts, most=_MAX_EXPERTS)
        active = config.count("num_experts_per_tok", num_active)
        if active > total:
            config.refuse("num_experts_per_tok", f"is {active}, of {total} experts")
        step = config.count("decoder_sparse_step", 1)
        dense = set(config.counts("mlp_only_layers"))
        shared_size = shared_intermediate_size
        if shared_size:
            shared_size = config.count("shared_expert_intermediate_size", shared_size)
        size = config.count("intermediate_size")
        if intermediate_size is not None:
            size = config.count("moe_intermediate_size", intermediate_size)
        limit = None if gate_limit is None else config.number("swiglu_limit", gate_limit)
        return MoeSpec(
            layers=tuple(n not in dense and (n + 1) % step == 0 for n in range(num_layers)),
            num_experts=total,
            num_active=active,
            intermediate_size=size,
            renormalize=(
                config.flag("norm_topk_prob", norm_topk) if renormalize is None else renormalize
            ),
            shared_intermediate_size=shared_size,
            has_shared_gate=shared_size > 0,
            gate_limit=limit,
        )

    return read
