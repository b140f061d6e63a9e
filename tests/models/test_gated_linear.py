"""An MLP takes the gate into the GEMM where that is the shorter way, with the same result.

Only a GPU fuses; here layers on a CPU are told that they lie on one, and the op's reference
computes. On a GPU: `ops_check.py gated_linear`, and the engine's parity with transformers.
"""

import pytest
import torch
from fp8_models import make_fp8_checkpoint
from paged_driver import CPU, load_model
from tiny_models import make_checkpoint

from penstock.kernels.formats import Activation, Fp8
from penstock.kernels.gemm.gated import MAX_TOKENS
from penstock.layers.fused_quant import converted, gated
from penstock.layers.linear import ColumnLinear
from penstock.layers.mlp import GatedMLP

KINDS = ["llama", "llama biases", "qwen3", "fp8 modelopt"]


@pytest.fixture(params=KINDS)
def mlp(request, tmp_path) -> GatedMLP:
    kind = request.param
    if kind.startswith("fp8"):
        folder = make_fp8_checkpoint(tmp_path / "model", kind.removeprefix("fp8 "))
    else:
        biases = {"attention_bias": True, "mlp_bias": True} if "biases" in kind else {}
        folder = make_checkpoint(tmp_path / "model", kind.split()[0], **biases)
    model = load_model(folder)
    model.finish()
    return next(one for one in model.modules() if isinstance(one, GatedMLP))


def hidden(layer: ColumnLinear, num_tokens: int) -> Activation:
    x_TD = torch.randn(num_tokens, layer.shape.in_features, generator=torch.Generator(CPU))
    return converted(x_TD.to(layer.dtype), layer.input_format(num_tokens))


def put_on_gpu(layer: ColumnLinear) -> None:
    """As far as the layer can tell; a GPU's weights are not packed, either."""
    if layer.weight.is_mkldnn:
        layer.weight = layer.values()
    layer.device = torch.device("cuda")


def numbers(x: Activation) -> torch.Tensor:
    return x.values_TD.float() * x.scale if isinstance(x, Fp8) else x


@pytest.mark.parametrize("num_tokens", [1, 5, MAX_TOKENS])
def test_the_fused_gate_gives_what_gemm_and_gate_give(mlp, num_tokens):
    layer, wanted = mlp.gate_up_proj, mlp.down_proj.input_format(num_tokens)
    x = hidden(layer, num_tokens)
    expected = gated(layer(x, None), wanted)
    assert layer.scheme.apply_gated(layer, x, wanted) is None, "a CPU has no such kernel"
    put_on_gpu(layer)
    fused = layer.scheme.apply_gated(layer, x, wanted)
    assert type(fused) is type(expected)
    torch.testing.assert_close(numbers(fused), numbers(expected), atol=1e-4, rtol=1e-4)
    assert torch.equal(numbers(layer.gated(x, wanted, None)), numbers(fused))


def test_many_tokens_keep_the_gate_apart(mlp):
    layer, num_tokens = mlp.gate_up_proj, MAX_TOKENS + 1
    put_on_gpu(layer)
    x, wanted = hidden(layer, num_tokens), mlp.down_proj.input_format(num_tokens)
    assert layer.scheme.apply_gated(layer, x, wanted) is None


def test_an_adapter_sees_the_output_before_the_gate(mlp):
    layer, seen = mlp.gate_up_proj, []
    put_on_gpu(layer)
    layer.post_op = lambda x, y_TO, batch: seen.append(y_TO.shape) or y_TO
    layer.gated(hidden(layer, 2), mlp.down_proj.input_format(2), None)
    assert seen == [(2, layer.shape.out_features)]
