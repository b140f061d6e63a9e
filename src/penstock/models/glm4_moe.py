"""GLM-4.5, 4.6: half of a head is rotated; after the first layers, experts beside a shared one."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import MOE_WEIGHTS, Decoder
from penstock.layers.mtp import layer_names
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import rename, rules


class Glm4MoeForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        self.weight_rules = (
            layer_names(spec, build.has_mtp)
            + MOE_WEIGHTS
            + rules(rename("mlp.shared_experts", "mlp.shared"))
        )
