"""Qwen 3 Next: gated delta nets, every fourth layer gated attention; many small experts behind."""

from penstock.layers.cached import CachedLayer
from penstock.layers.context import LayerContext
from penstock.layers.decoder import MOE_WEIGHTS, Decoder, grouped_query_attention
from penstock.layers.delta_net import GatedDeltaNet
from penstock.layers.mtp import module_names
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import rename, rules

_DELTA_PARTS = ("in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias", "out_proj")


class Qwen3NextForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        delta_parts = (
            *(rename(f"linear_attn.{part}", f"self_attn.{part}") for part in _DELTA_PARTS),
            rename("linear_attn.norm", "self_attn.out_norm"),
        )
        self.weight_rules = module_names(build.has_mtp) + rules(*delta_parts) + MOE_WEIGHTS

    def attention(
        self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext
    ) -> CachedLayer:
        assert spec.delta is not None, spec
        if spec.delta.layers[layer]:
            return GatedDeltaNet(spec.hidden_size, spec.delta, norm_eps=spec.norm_eps, build=build)
        return grouped_query_attention(spec, layer, rope, build, gated=True)
