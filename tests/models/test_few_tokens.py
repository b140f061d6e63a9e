"""Steps of a few tokens take the gate into the product, with the same result.

Only GPUs do so; here a CPU is told to, and computes the references.
"""

import pytest
import torch
from fp8_models import make_fp8_checkpoint
from paged_driver import CPU, mixed_run, prompts
from tiny_models import make_checkpoint

from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quant import eight_bits, none
from penstock.weights.load import load_weights


def logits_of(folder) -> list[torch.Tensor]:
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"))
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    return mixed_run(model, prompts(spec.vocab_size))


@pytest.mark.parametrize("kind", ["llama", "llama biases", "qwen3", "fp8 modelopt"])
def test_few_tokens_give_the_same_logits(kind, tmp_path, monkeypatch) -> None:
    if kind.startswith("fp8"):
        folder = make_fp8_checkpoint(tmp_path / "model", kind.removeprefix("fp8 "))
    else:
        biases = {"attention_bias": True, "mlp_bias": True} if "biases" in kind else {}
        folder = make_checkpoint(tmp_path / "model", kind.split()[0], **biases)
    expected = logits_of(folder)

    scheme, calls = eight_bits if kind.startswith("fp8") else none, []
    gated_linear = scheme.gated_linear
    monkeypatch.setattr(scheme, "gated_linear", lambda *a: calls.append(a) or gated_linear(*a))
    monkeypatch.setattr(scheme, "gates_with_product", lambda layer, num_tokens: num_tokens <= 4)
    monkeypatch.setattr(none, "packed", lambda weight_OI: weight_OI)  # what a GPU multiplies with
    actual = logits_of(folder)

    assert calls
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
