"""Weight-only experts: numbers of the checkpoint, logits of transformers, ranks."""

import pytest
import torch
from paged_driver import CPU, mixed_run, prompts
from safetensors.torch import load_file
from test_int8_models import make as make_int8
from tiny_models import reference_model
from weight_only_models import FILE, LAYOUTS, make_weight_only_checkpoint

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.wna16_packing import GpuPackedWeight, unpack_gpu
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import Schemes, choose_schemes
from penstock.quantization.unquantized import Unquantized
from penstock.quantization.weight_only import Int8Experts, WeightOnlyExperts
from penstock.types.mesh import MeshShape
from penstock.weights.load import dummy_weights, load_weights

SINGLE = RankMesh.single()
SHAPE = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
CLOSE = 2e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("weight_only_experts")
    return {
        name: make_weight_only_checkpoint(root / name, name, "qwen3_moe", **SHAPE)
        for name in LAYOUTS
    }


def load(folder, *, has_kernel: bool, mesh=SINGLE, is_dummy=False):
    """`has_kernel`: as on a GPU."""
    spec = parse_model_spec(folder)
    plain = Unquantized()
    path = None if is_dummy else folder
    schemes = choose_schemes(spec.quantization, path, torch.float32, CPU)
    if has_kernel:
        codes = spec.quantization.weight_only
        experts = (
            WeightOnlyExperts(codes, has_kernel=True)
            if codes is not None
            else Int8Experts(spec.quantization.format, has_kernel=True)
        )
        schemes = Schemes(tables=plain, linear=schemes.linear, experts=lambda names: experts)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"), schemes)
    if is_dummy:
        dummy_weights(model, seed=1)
    else:
        load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    return model


@torch.inference_mode()
def check_logits(model, theirs, close):
    for ids, logits in zip(prompts(500), mixed_run(model, prompts(500)), strict=True):
        expected = theirs(torch.tensor([ids])).logits[0]
        assert torch.allclose(logits, expected, atol=close, rtol=close)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers_with_the_plain_numbers(checkpoints, layout, has_kernel):
    folder = checkpoints[layout]
    model = load(folder, has_kernel=has_kernel)
    down = model.layers[1].mlp.experts.down.weight
    assert isinstance(down, GpuPackedWeight) == has_kernel
    if has_kernel:
        expected = load_file(folder / "plain" / FILE)[
            "model.layers.1.mlp.experts.3.down_proj.weight"
        ]
        assert torch.allclose(unpack_gpu(down.slot(3)).values(), expected, rtol=2e-7, atol=0)
    check_logits(model, reference_model(folder / "plain"), CLOSE)


@pytest.mark.parametrize("layout", ["awq", "nvfp4 modelopt", "nf4"])
def test_ranks_share_experts_by_whole_groups(checkpoints, layout):
    folder = checkpoints[layout]
    plain = load_file(folder / "plain" / FILE)["model.layers.0.mlp.experts.2.down_proj.weight"]
    parts = []
    for rank in range(2 if layout != "nf4" else 1):
        size = 2 if layout != "nf4" else 1
        mesh = RankMesh.place(rank, MeshShape(tp=size))
        down = load(folder, has_kernel=True, mesh=mesh).layers[0].mlp.experts.down.weight
        parts.append(unpack_gpu(down.slot(2)).values())
    assert torch.allclose(torch.cat(parts, dim=1), plain, rtol=2e-7, atol=0)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_experts_of_whole_numbers_have_plain_inputs(tmp_path, has_kernel):
    folder = make_int8(tmp_path / "int8", "channel", "token", "qwen3_moe", SHAPE)
    model = load(folder, has_kernel=has_kernel)
    weight = model.layers[0].mlp.experts.gate_up.weight
    plain = load_file(folder / "plain" / FILE)
    names = [f"model.layers.0.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")]
    found = unpack_gpu(weight.slot(2)).values() if has_kernel else weight[2].to_dense()
    assert torch.equal(found, torch.cat([plain[name] for name in names]))


@pytest.mark.parametrize("layout", ["awq", "nvfp4 modelopt", "packed 8 bits"])
def test_random_experts_are_sensible(checkpoints, layout):
    model = load(checkpoints[layout], has_kernel=True, is_dummy=True)
    logits = torch.cat(mixed_run(model, prompts(500)))
    assert torch.isfinite(logits).all() and logits.std() > 0.1
