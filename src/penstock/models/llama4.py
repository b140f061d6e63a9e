"""Llama 4: in most layers rotated heads that see a chunk, in the others heads that see everything
and know no positions; experts, of which a token has one, beside a shared one."""

from penstock.layers.attention import Attention
from penstock.layers.context import LayerContext
from penstock.layers.decoder import MOE_WEIGHTS, Decoder, grouped_query_attention
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import TEXT_NAMES, Rules, pair, rename, rules, unstack_some


def _weights(spec: ModelSpec) -> Rules:
    """Experts of the releases are transposed matrices in one tensor."""
    return (
        rules(
            pair("q_proj", spec.num_heads, spec.head_size, spec.head_size),
            pair("k_proj", spec.num_kv_heads, spec.head_size, spec.head_size),
            unstack_some(
                "feed_forward.experts",
                "gate_up_proj",
                ("gate_proj.weight", "up_proj.weight"),
                transposed=True,
            ),
            unstack_some(
                "feed_forward.experts", "down_proj", ("down_proj.weight",), transposed=True
            ),
            rename("feed_forward", "mlp"),
            rename("mlp.router", "mlp.gate"),  # what others call it
        )
        + MOE_WEIGHTS
    )


class Llama4ForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        self.weight_rules = _weights(spec)

    def attention(self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext) -> Attention:
        is_rotated = spec.window_of(layer) is not None
        return grouped_query_attention(
            spec,
            layer,
            rope,
            build,
            qk_norm_eps=spec.norm_eps if spec.qk_norm and is_rotated else None,
            has_norm_weights=False,
            query_growth=None if is_rotated else spec.query_growth,
        )


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The language model of a checkpoint for text and images."""

    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        self.weight_rules = TEXT_NAMES + self.weight_rules
