"""INT8 checkpoints: weights bit for bit, logits of transformers that rounds.

The quantization here is written with torch alone, in the layout of compressed-tensors.
"""

import json
import shutil

import pytest
import torch
from fp8_models import fused_with
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model
from weight_only_models import FILE, LEFT, SHAPE

from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.weights.load import dummy_weights, load_weights

SINGLE = RankMesh.single()
CLOSE = 0.002  # mean error over mean size of logits; 0.01 and more without rounding
WAYS = [("channel", "token"), ("channel", "tensor"), ("tensor", "token")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("int8")
    return {ways: make(root / "-".join(ways), *ways) for ways in WAYS}


def make(folder, weights, inputs, arch="llama", overrides=None):
    make_checkpoint(folder, arch, **(SHAPE | (overrides or {})))
    (folder / "plain").mkdir()
    shutil.copy(folder / "config.json", folder / "plain")
    amax = largest_inputs(folder) if inputs == "tensor" else {}
    tensors, plain = {}, {}
    for name, tensor in load_file(folder / FILE).items():
        module = name.removesuffix(".weight")
        tensors[name] = plain[name] = tensor
        if not module.endswith("_proj") or module == LEFT:
            continue
        scale = tensor.abs().amax(1 if weights == "channel" else None, keepdim=True) / 127
        tensors[name] = (tensor / scale).round().to(torch.int8)
        plain[name] = tensors[name] * scale
        tensors[f"{module}.weight_scale"] = scale.view(-1, 1) if weights == "channel" else scale[0]
        if inputs == "tensor":
            tensors[f"{module}.input_scale"] = amax[module] / 127
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": weights},
        "input_activations": number | {"strategy": inputs, "dynamic": inputs == "token"},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", LEFT],
    }
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
    save_file(tensors, folder / FILE)
    save_file(plain, folder / "plain" / FILE, metadata={"format": "pt"})
    return folder


@torch.no_grad()
def largest_inputs(folder):
    model, amax = reference_model(folder), {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, args, name=name: amax.update({name: args[0].abs().amax()})
            )
    model(torch.arange(3, 99)[None])
    return amax


def truth(folder, inputs):
    """transformers with the numbers that the checkpoint stands for, rounding its inputs."""
    model, tensors = reference_model(folder / "plain"), load_file(folder / FILE)
    for name, module in model.named_modules():
        if not name.endswith("_proj") or name == LEFT:
            continue
        fixed = None
        if inputs == "tensor":
            fixed = max(tensors[f"{part}.input_scale"] for part in fused_with(name))

        def rounded(_, args, fixed=fixed):
            scale = args[0].abs().amax(-1, keepdim=True) / 127 if fixed is None else fixed
            return ((args[0] / scale).round().clamp(-127, 127) * scale,)

        module.register_forward_pre_hook(rounded)
    return model


def build(folder):
    return build_model(
        parse_model_spec(folder), SINGLE, torch.float32, CPU, get_backend("reference")
    )


def load(folder):
    model, spec = build(folder), parse_model_spec(folder)
    load_weights(model, folder, spec, SINGLE, progress=False)
    model.finish()
    return model


@torch.inference_mode()
def error_against(model, ours) -> float:
    theirs = [model(torch.tensor([ids])).logits[0] for ids in prompts(500)]
    errors = [(x - y).abs().mean() for x, y in zip(ours, theirs, strict=True)]
    return float(sum(errors) / sum(y.abs().mean() for y in theirs))


@pytest.mark.parametrize("ways", WAYS)
def test_weights_and_logits(checkpoints, ways):
    folder = checkpoints[ways]
    model, plain = load(folder), load_file(folder / "plain" / FILE)
    for layer in range(2):
        down = model.layers[layer].mlp.down_proj
        name = f"model.layers.{layer}.mlp.down_proj"
        assert torch.equal(down.values(), plain[f"{name}.weight"])
        assert (down.weight.dtype == torch.int8) == (name != LEFT)
    ours = mixed_run(model, prompts(500))
    assert error_against(truth(folder, ways[1]), ours) < CLOSE
    assert error_against(reference_model(folder / "plain"), ours) > 2 * CLOSE


def test_random_weights_behave_like_those_of_a_plain_model(checkpoints):
    def logits(folder):
        model = build(folder)
        dummy_weights(model, seed=3)
        model.finish()
        return torch.cat(mixed_run(model, prompts(500)))

    folder = checkpoints[WAYS[0]]
    assert 0.7 < logits(folder).std() / logits(folder / "plain").std() < 1.4
