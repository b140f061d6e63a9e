"""GPT-OSS: attention with sinks, windowed in every second layer; experts with a clamped gate."""

import math

from penstock.kernels.moe import Gate, Routing
from penstock.layers.attention import Attention
from penstock.layers.context import LayerContext
from penstock.layers.decoder import Decoder, grouped_query_attention
from penstock.layers.moe import MoE
from penstock.layers.rope import Rope
from penstock.types.model_spec import ModelSpec
from penstock.weights.mapping import DECODER_NAMES, fuse, rules, stack, unstack

# All experts of a layer lie in one tensor: the matrices as numbers, or as packed MXFP4 blocks and
# their scales. Rows of gate and up take turns.
WEIGHTS = DECODER_NAMES + rules(
    unstack("mlp.experts", "gate_up_proj", ("gate_proj.weight", "up_proj.weight"), transposed=True),
    unstack("mlp.experts", "gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias")),
    unstack("mlp.experts", "gate_up_proj_blocks", ("gate_proj.blocks", "up_proj.blocks")),
    unstack("mlp.experts", "gate_up_proj_scales", ("gate_proj.scales", "up_proj.scales")),
    unstack("mlp.experts", "down_proj", ("down_proj.weight",), transposed=True),
    unstack("mlp.experts", "down_proj_bias", ("down_proj.bias",)),
    unstack("mlp.experts", "down_proj_blocks", ("down_proj.blocks",)),
    unstack("mlp.experts", "down_proj_scales", ("down_proj.scales",)),
    stack("mlp.experts", "gate_up", ("gate_proj", "up_proj")),
    stack("mlp.experts", "down", ("down_proj",)),
    fuse("qkv_proj", ("q_proj", "k_proj", "v_proj")),
)


class GptOssForCausalLM(Decoder):
    weight_rules = WEIGHTS

    def attention(self, spec: ModelSpec, layer: int, rope: Rope, build: LayerContext) -> Attention:
        return grouped_query_attention(spec, layer, rope, build, sinks=True)

    def mlp(self, spec: ModelSpec, layer: int, build: LayerContext) -> MoE:
        moe = spec.moe
        assert moe is not None, spec
        # The softmax of the chosen scores alone: that of all of them, renormalized.
        return MoE(
            spec.hidden_size,
            moe.num_experts,
            moe.intermediate_size,
            routing=Routing(num_active=moe.num_active, renormalize=moe.renormalize),
            gate=Gate(alpha=1.702, shift=1.0, limit=moe.gate_limit or math.inf),
            bias=True,
            router_bias=True,
            build=build,
        )
