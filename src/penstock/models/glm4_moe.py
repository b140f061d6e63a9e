"""GLM-4.5, 4.6: half of a head is rotated; after the first layers, experts beside a shared one."""

from penstock.layers.context import LayerContext
from penstock.layers.decoder import MOE_WEIGHTS, Decoder
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import rename, rules, skip_module


class Glm4MoeForCausalLM(Decoder):
    def __init__(self, spec: ModelSpec, build: LayerContext) -> None:
        super().__init__(spec, build)
        drafts = range(spec.num_layers, spec.num_layers + spec.num_nextn_predict_layers)
        self.weight_rules = (
            rules(*(skip_module(f"model.layers.{layer}") for layer in drafts))
            + MOE_WEIGHTS
            + rules(rename("mlp.shared_experts", "mlp.shared"))
        )
