"""Expert parallelism: outputs of ranks with other experts, or shards of them, add up."""

from pathlib import Path

import pytest
import torch
from fp8_models import DIALECTS, make_fp8_checkpoint
from gguf_models import QUANT, write_gguf
from mxfp4_models import make_packed_checkpoint
from paged_driver import CPU, load_model
from tiny_models import make_checkpoint, reference_model

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.moe import Routing, route
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.types.mesh import MeshShape

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
SHAPE = {"moe_intermediate_size": 256, "num_experts": 5, "num_experts_per_tok": 2}
MADE = ("fp8", "int8", "nf4")
KINDS = ["plain", "mxfp4", "gguf", *DIALECTS, *MADE]
EXACT = ("plain", "mxfp4", "gguf", "fp8 blocks", "nf4")
# Scales that are found per rank: of the largest of its inputs, or of its experts' static ones.
BY_SHARE = [kind for kind in KINDS if kind not in EXACT]
BY_EXPERTS = [kind for kind, (_, _, inputs) in DIALECTS.items() if inputs == "static"]


def make(folder, kind):
    if kind == "mxfp4":
        return make_packed_checkpoint(folder)
    if kind in DIALECTS:
        return make_fp8_checkpoint(folder, kind, "qwen3_moe", **SHAPE)
    made = make_checkpoint(folder, "qwen3_moe", **SHAPE)
    if kind != "gguf":
        return made
    write_gguf(folder / "model.gguf", reference_model(made), QUANT.Q8_0)
    return folder / "model.gguf"


def load(folder, kind, rank=0, size=1, ep_size=1):
    spec = parse_model_spec(folder)
    schemes = choose_schemes(
        spec.quantization, folder, torch.float32, CPU, online=kind if kind in MADE else None
    )
    mesh = RankMesh.place(rank, MeshShape(dp=size, ep=ep_size))  # heads stay whole
    mesh.roles["mlp"] = RankMesh.single().roles["mlp"]
    return load_model(folder, mesh, schemes=schemes).layers[1].mlp.experts


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_shares_of_all_ranks_sum_up_to_the_whole(tmp_path, kind):
    folder = make(tmp_path, kind)
    whole = load(folder, kind)
    x = torch.randn(7, whole.hidden_size, generator=torch.Generator().manual_seed(3))
    scores = torch.randn(7, whole.num_experts, generator=torch.Generator().manual_seed(4))
    load_S = torch.zeros(whole.num_experts, dtype=torch.int64)

    def computed(experts):
        slots, weights = route(scores, Routing(num_active=2), None, experts.slot_of_E, load_S)
        return experts(x, slots, weights)

    expected = computed(whole)
    for size, ep_size in ((4, 2), (3, 3)):
        parts = [load(folder, kind, rank, size, ep_size) for rank in range(size)]
        held = [part.num_slots for part in parts]
        assert sum(held) == whole.num_experts * size // ep_size and max(held) - min(held) <= 1
        error = (sum(computed(part) for part in parts) - expected).norm() / expected.norm()
        is_rounded = kind in (BY_EXPERTS if size == ep_size else BY_SHARE)
        assert error < (0.08 if is_rounded else 1e-6)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize(
    ("name", "size", "ep_size", "experts_shape"),
    [
        ("gpt-oss-120b", 8, 8, (16, 5760, 2880 // 2)),
        ("DeepSeek-R1-0528", 8, 8, (32, 4096, 7168)),
        ("Qwen3-Next-80B-A3B-Thinking", 4, 4, (128, 1024, 2048)),
        ("Qwen1.5-MoE-A2.7B", 8, 4, (15, 1408, 2048)),
    ],
)
def test_published_models_build_on_the_ranks_of_their_recipes(name, size, ep_size, experts_shape):
    spec = parse_model_spec(CONFIGS / name, {"num_hidden_layers": 4, "layer_types": None})
    mesh = RankMesh.place(1, MeshShape(tp=size, ep=ep_size))
    device, backend = torch.device("meta"), get_backend("reference")
    model = build_model(spec, mesh, torch.bfloat16, device, backend)
    experts = model.layers[3].mlp.experts
    values = experts.gate_up.blocks if name.startswith("gpt") else experts.gate_up.weight
    assert values.shape == experts_shape
    assert experts.span.start == experts.span.size  # the second group
