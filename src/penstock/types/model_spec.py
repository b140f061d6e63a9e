"""`ModelSpec`: the HF config parsed once into typed fields; the raw config is read nowhere else."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from penstock.types.cache_spec import RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: `kind` is default, linear, dynamic, llama3, yarn or longrope; with none
    nothing is rotated."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_factor: float = 1.0
    # Of longrope, one number per pair of channels: up to the trained length, and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Spec:
    """Matrices of 8 bits a number, and inputs of the same kind to multiply them with."""

    weights: str  # a scale per "tensor", "channel" (output) or "block" (128 x 128)
    inputs: str  # "static": one, from the checkpoint; found by the values: per "row", per "group"
    scale_name: str = "weight_scale"  # of the tensor with the scales of a weight
    numbers: Literal["e4m3", "int8"] = "e4m3"


ActivationFormat = Literal["fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOnlySpec:
    """Matrices of 4 or 8 bits a number, multiplied with inputs in the model's own dtype, or with
    quantized ones where a GPU can."""

    # of the tensors
    layout: Literal["awq", "gptq", "packed", "modelopt", "nvfp4", "mxfp4", "fp8", "bitsandbytes"]
    bits: int
    group: int  # neighboring inputs of an output that share a scale; 0: all of them
    has_zeros: bool = False  # integers have a zero point of their own
    zero_offset: int = 0  # what is added to a stored zero point
    inputs: ActivationFormat | Literal["plain"] = "plain"  # what the checkpoint was made for


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How a checkpoint is quantized."""

    # "mxfp4": experts of 4-bit floats (e2m1) with a power of two per 32 inputs, and nothing else;
    # None: nothing is so. It crosses to other ranks, so at most one of these is a record.
    format: W8A8Spec | Literal["mxfp4"] | None
    weight_only: WeightOnlySpec | None = None  # in the place of a format
    mixed: tuple["QuantPart", ...] = ()  # in the place of both: some modules are quantized so
    has_input_scales: bool = False  # activations may be multiplied by a number per input first
    excluded: tuple[str, ...] = ()  # patterns of the modules that are not quantized
    cache_dtype: str | None = None  # what it has scales for; None: it says nothing

    @property
    def is_quantized(self) -> bool:
        """Its weights are, or some of them."""
        return bool(self.format or self.weight_only or self.mixed)

    @property
    def activation_formats(self) -> frozenset[ActivationFormat]:
        """Those that some of its weights of 4 bits can be multiplied with."""
        if self.format == "mxfp4":
            return frozenset(("mxfp8",))
        if self.weight_only is not None and self.weight_only.inputs != "plain":
            return frozenset((self.weight_only.inputs,))
        return frozenset().union(*(part.spec.activation_formats for part in self.mixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPart:
    """Modules of a checkpoint, by name, that are quantized alike."""

    modules: tuple[str, ...]
    spec: QuantSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads follow from one small vector."""

    kv_rank: int  # size of that vector
    q_rank: int | None  # of the one that queries follow from; None: they have none
    nope_size: int  # channels of a head's query and key that are not rotated
    rope_size: int  # those that are; all heads share their key
    value_size: int
    is_interleaved: bool  # channels 2i and 2i + 1 are rotated together, not i and i + half


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Layers with a gated delta net in the place of attention."""

    layers: tuple[bool, ...]  # one per layer: whether it is one of them
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    def state(self, num_ranks: int, dtype: str) -> RecurrentState:
        """What such a layer remembers on one of `num_ranks` that share the heads."""
        num_keys = self.num_key_heads // num_ranks * self.key_size
        num_value_heads = self.num_value_heads // num_ranks
        return RecurrentState(
            num_past=self.conv_width - 1,
            num_channels=2 * num_keys + num_value_heads * self.value_size,
            conv_dtype=dtype,
            num_value_heads=num_value_heads,
            key_size=self.key_size,
            value_size=self.value_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Layers of experts, of which each token uses `num_active`."""

    layers: tuple[bool, ...]  # one per layer: whether it is one of them
    num_experts: int
    num_active: int
    intermediate_size: int
    renormalize: bool = False  # weights of a token's experts sum to one
    score: str = "softmax"  # or "sigmoid"
    scale: float = 1.0
    num_groups: int = 1  # experts come from the best `num_active_groups` of these
    num_active_groups: int = 1
    num_best: int = 2  # a group is as good as the sum of so many of its experts
    shared_intermediate_size: int = (
        0  # of the expert that every token goes through; 0: there is none
    )
    has_shared_gate: bool = False  # what that one gives is multiplied by a sigmoid of the input
    has_correction: bool = False  # a number per expert counts for the choice alone
    scales_inputs: bool = False  # a token's weight multiplies what its (only) expert is given
    gate_limit: float | None = None  # of what an expert's gate and up projections give


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries far from the beginning are larger: 1 + factor * log(1 + floor((p + 1) / interval))
    times at position p."""

    factor: float
    interval: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str  # "LlamaForCausalLM"
    model_type: str  # "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    norm_eps: float
    hidden_act: str
    rope: RopeSpec
    tie_embeddings: bool
    embedding_scale: float = 1.0  # of what the layers are given
    logit_soft_cap: float | None = None  # cap * tanh(logit / cap)
    attention_bias: bool = False  # on q, k, v (and o where the model says so)
    attention_out_bias: bool = False
    attention_scale: float | None = None  # of the scores; None: by the head size
    attention_soft_cap: float | None = None  # of the scores, as that of the logits
    mlp_bias: bool = False
    qk_norm: bool = False
    query_growth: "QueryGrowth | None" = None  # of layers without a window
    zero_centered_norms: bool = False  # the checkpoint has what is added to one
    layer_norms: bool = False  # of the residual stream: they subtract the mean, and have a bias
    sandwich_norms: bool = False  # what a layer's two parts give is normalized, too
    latent: LatentSpec | None = None  # with it, `head_size` is that of the rotated part
    delta: DeltaSpec | None = None
    num_nextn_predict_layers: int = 0  # behind the others, to predict more than one token
    window: int | None = None
    layer_windows: tuple[int | None, ...] = ()  # one per layer: None = full attention
    has_chunks: bool = False  # a window begins at the last multiple of its size
    window_rope: RopeSpec | None = None  # of layers with a window; None: as the others
    dtype: str = "bfloat16"  # as the checkpoint says
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization: QuantSpec | None = None
    moe: MoeSpec | None = None

    def window_of(self, layer: int) -> int | None:
        """How many tokens this layer's attention sees, itself included; None: all of them."""
        return self.layer_windows[layer] if self.layer_windows else self.window

    def rope_of(self, layer: int) -> RopeSpec:
        if self.window_rope is None or self.window_of(layer) is None:
            return self.rope
        return self.window_rope

    def layer_kind(self, layer: int) -> Hashable:
        """Layers of one kind are built alike; a checkpoint may quantize them differently."""
        has_experts = self.moe is not None and self.moe.layers[layer]
        is_recurrent = self.delta is not None and self.delta.layers[layer]
        return has_experts, is_recurrent, None if is_recurrent else self.window_of(layer)

    def with_mtp_layer(self) -> "ModelSpec":
        """The same model with its MTP head's layer as the last one: it attends to all tokens."""
        windows, moe, delta = self.layer_windows, self.moe, self.delta
        return replace(
            self,
            num_layers=self.num_layers + 1,
            layer_windows=windows and (*windows, None),
            moe=moe and replace(moe, layers=(*moe.layers, True)),
            delta=delta and replace(delta, layers=(*delta.layers, False)),
        )

    def shortened(self) -> "ModelSpec":
        """The same model with one layer of each kind."""
        layers = first_of_each(map(self.layer_kind, range(self.num_layers)))
        windows, moe, delta = self.layer_windows, self.moe, self.delta
        return replace(
            self,
            num_layers=len(layers),
            num_nextn_predict_layers=0,
            layer_windows=windows and tuple(windows[layer] for layer in layers),
            moe=moe and replace(moe, layers=tuple(moe.layers[layer] for layer in layers)),
            delta=delta and replace(delta, layers=tuple(delta.layers[layer] for layer in layers)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A checkpoint that drafts for the model: a small one, or a head, whose one layer `spec` is."""

    path: str  # local folder
    spec: ModelSpec


def first_of_each(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """The index of the first of each kind, in order."""
    first: dict[Hashable, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    return tuple(first.values())
