"""GPT-OSS's own: configurations of the real models, how stacked experts are loaded, full sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_driver import CPU, PagedDriver, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import nn
from transformers import AutoConfig

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.layers.rope import attention_factor
from penstock.models.gpt_oss import WEIGHTS
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, Shard, Span, split, whole
from penstock.quantization.scheme import ExpertsShape
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import ModelSpec
from penstock.weights.load import dummy_weights, load_weights
from penstock.weights.stored import StoredTensor

REAL = Path(__file__).parents[3] / "shared" / "configs"
FILE = "model.safetensors"
META = torch.device("meta")
PLAIN = {"quantization_config": None}  # the real configurations as if of plain numbers
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


def mesh_of(rank: int, size: int) -> RankMesh:
    return RankMesh.place(rank, MeshShape(tp=size))


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_real_configurations_are_read_as_transformers_does(name):
    spec, theirs = (
        parse_model_spec(REAL / name, PLAIN),
        AutoConfig.from_pretrained(REAL / name),
    )
    assert spec.head_size == theirs.head_dim == 64
    assert spec.norm_eps == theirs.rms_norm_eps == 1e-5
    assert spec.attention_bias and spec.attention_out_bias and not spec.tie_embeddings
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert spec.layer_windows == tuple(windows[kind] for kind in theirs.layer_types)
    assert set(spec.layer_windows) == {128, None}
    assert spec.rope.kind == "yarn" and not spec.rope.truncate
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"] == 150000
    assert spec.rope.original_max_position == 4096 and spec.max_position == 131072
    assert attention_factor(spec.rope) == pytest.approx(1.3466, abs=1e-4)
    moe = spec.moe
    assert moe.num_experts == theirs.num_local_experts and moe.num_active == 4
    assert moe.intermediate_size == theirs.intermediate_size and all(moe.layers)
    assert moe.renormalize and moe.gate_limit == 7.0
    assert spec.eos_token_ids == (200002,) and spec.pad_token_id == 199999


def test_fields_left_out_have_the_defaults_of_transformers(tmp_path):
    names = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    theirs = AutoConfig.for_model("gpt_oss", num_hidden_layers=3)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    fields = {size: getattr(theirs, size) for size in sizes} | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(names | fields))
    generation = {"eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = parse_model_spec(tmp_path)
    assert (spec.num_kv_heads, spec.head_size) == (theirs.num_key_value_heads, theirs.head_dim)
    assert spec.layer_windows == (theirs.sliding_window, None, theirs.sliding_window)
    assert spec.norm_eps == theirs.rms_norm_eps and spec.attention_bias == theirs.attention_bias
    assert spec.moe.num_experts == theirs.num_local_experts
    assert spec.moe.num_active == theirs.num_experts_per_tok
    rope = theirs.rope_parameters
    assert (spec.rope.kind, spec.rope.factor) == (rope["rope_type"], rope["factor"])
    assert (spec.rope.theta, spec.rope.truncate) == (rope["rope_theta"], rope["truncate"])
    assert spec.max_position == theirs.max_position_embeddings
    assert spec.eos_token_ids == (200002, 199999, 200012) and spec.pad_token_id == 199999


def real_spec(name: str, num_layers: int) -> ModelSpec:
    layers = {"num_hidden_layers": num_layers, "layer_types": None}
    return parse_model_spec(REAL / name, PLAIN | layers)


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(("name", "num_experts"), [("gpt-oss-20b", 32), ("gpt-oss-120b", 128)])
def test_parameters_have_the_sizes_of_the_release(name, num_experts, size):
    spec, mesh = real_spec(name, 2), mesh_of(0, size)
    model = build_model(spec, mesh, torch.bfloat16, META, get_backend("reference"))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    features, heads = 2880 // size, 64 // size
    layer = {name.removeprefix("layers.1."): s for name, s in shapes.items() if "layers.1." in name}
    assert layer == {
        "input_norm.weight": (2880,),
        "post_norm.weight": (2880,),
        "attention.sinks": (heads,),
        "attention.qkv_proj.weight": (80 * 64 // size, 2880),
        "attention.qkv_proj.bias": (80 * 64 // size,),
        "attention.o_proj.weight": (2880, heads * 64),
        "attention.o_proj.bias": (2880,),
        "mlp.router.weight": (num_experts, 2880),
        "mlp.router.bias": (num_experts,),
        "mlp.experts.gate_up.weight": (num_experts, 2 * features, 2880),
        "mlp.experts.gate_up.bias": (num_experts, 2 * features),
        "mlp.experts.down.weight": (num_experts, 2880, features),
        "mlp.experts.down.bias": (num_experts, 2880),
    }
    assert [layer.cache_spec().window for layer in model.cache_layers()] == [128, None]
    assert {layer.cache_spec().num_kv_heads for layer in model.cache_layers()} == {8 // size}


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_hold_whole_groups_of_packed_experts(size):
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    spec, widths = parse_model_spec(REAL / "gpt-oss-120b", layers), []
    for rank in range(size):
        backend = get_backend("reference")
        model = build_model(spec, mesh_of(rank, size), torch.bfloat16, META, backend)
        experts = model.layers[0].mlp.experts
        widths.append(experts.gate_up.blocks.shape[1] // 2)
        assert experts.down.scales.shape == (128, 2880, widths[-1] // 32)
        assert experts.gate_up.bias.shape == (128, 2 * widths[-1])
    assert sum(widths) == 2880 and max(widths) - min(widths) <= 32
    assert all(width % 32 == 0 for width in widths)


@pytest.mark.skipif(not REAL.is_dir(), reason="real configs are not here")
def test_random_weights_of_full_width_run():
    spec = real_spec("gpt-oss-20b", 2)
    spec = replace(spec, vocab_size=999, moe=replace(spec.moe, num_experts=4), max_position=64)
    model = build_model(spec, RankMesh.single(), torch.bfloat16, CPU, get_backend("sdpa"))
    dummy_weights(model, seed=3)
    with torch.inference_mode():
        model.finish()
    driver = PagedDriver(model, max_len=64)
    ids = prompts(999, [20])[0]
    logits = torch.cat([*driver.step([(0, ids[:-1])]), *driver.step([(0, ids[-1:])])])
    assert torch.isfinite(logits).all() and logits.float().std() > 0.1


def test_gate_and_up_take_turns_and_each_rank_reads_its_share_only(folder, monkeypatch):
    stored = load_file(folder / FILE)
    num_read: dict[str, int] = {}
    read = StoredTensor.read

    def counted(tensor: StoredTensor, part: tuple[slice, ...]) -> torch.Tensor:
        found = read(tensor, part)
        name = tensor.name.partition("[")[0]
        num_read[name] = num_read.get(name, 0) + found.numel()
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    halves = [load_model(folder, mesh_of(rank, 2)).layers[1] for rank in range(2)]
    experts = [half.mlp.experts for half in halves]

    for name, dim in (("weight", 1), ("bias", 1)):
        pairs = [getattr(half.gate_up, name).chunk(2, dim=1) for half in experts]
        gate, up = (torch.cat(parts, dim) for parts in zip(*pairs, strict=True))
        theirs = stored[f"{EXPERTS}.gate_up_proj" + "_bias" * (name == "bias")]
        theirs = theirs.transpose(1, 2) if name == "weight" else theirs
        assert torch.equal(gate, theirs[:, 0::2]) and torch.equal(up, theirs[:, 1::2])
    down = torch.cat([half.down.weight for half in experts], dim=2)
    assert torch.equal(down, stored[f"{EXPERTS}.down_proj"].transpose(1, 2))
    for half in experts:
        assert torch.equal(half.down.bias, stored[f"{EXPERTS}.down_proj_bias"])
    sinks = torch.cat([half.attention.sinks for half in halves])
    assert torch.equal(sinks, stored["model.layers.1.self_attn.sinks"])
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"):
        assert num_read[f"{EXPERTS}.{name}"] == stored[f"{EXPERTS}.{name}"].numel()


class CpuWeightOnlyExperts(nn.Module):
    """The parameters of packed experts alone, as a scheme would make them."""

    weight_rules = WEIGHTS

    def __init__(self, num_slots: int, hidden: int, features: int, mesh: RankMesh) -> None:
        super().__init__()
        span = split("features", features, mesh.shape.size, mesh.rank)
        shape = ExpertsShape(
            num_experts=num_slots,
            experts=tuple(range(num_slots)),
            hidden_size=hidden,
            intermediate_size=features,
            features=span,
            has_bias=False,
        )
        for name in ("layers", "mlp", "experts", "gate_up", "down"):
            self.add_module(name, nn.Module())
        self.layers.add_module("1", nn.Module())
        self.layers.get_submodule("1").mlp = self.mlp
        self.mlp.experts = self.experts
        self.experts.gate_up, self.experts.down = self.gate_up, self.down
        for name, per_row in (("blocks", 2), ("scales", 32)):
            pieces = [
                Piece((*piece.shards[:2], whole(hidden // per_row)))
                for piece in shape.gate_up_pieces()
            ]
            size = (num_slots, 2 * span.size, hidden // per_row)
            setattr(self.gate_up, name, new_parameter(size, torch.uint8, CPU, tuple(pieces)))
            columns = Span(span.start // per_row, span.size // per_row)
            shard = Shard(
                full_size=features // per_row, source=columns, target=Span(0, columns.size)
            )
            pieces = [Piece((*piece.shards[:2], shard)) for piece in shape.down_pieces()]
            size = (num_slots, hidden, columns.size)
            setattr(self.down, name, new_parameter(size, torch.uint8, CPU, tuple(pieces)))
        del self.mlp, self.experts, self.gate_up, self.down

    @property
    def parts(self) -> nn.Module:
        return self.layers.get_submodule("1.mlp.experts")


def test_packed_blocks_and_scales_go_to_their_slots(folder, tmp_path):
    num_experts, hidden, features = 3, 64, 128
    torch.manual_seed(0)
    shapes = {
        "gate_up_proj_blocks": (num_experts, 2 * features, hidden // 32, 16),
        "gate_up_proj_scales": (num_experts, 2 * features, hidden // 32),
        "down_proj_blocks": (num_experts, hidden, features // 32, 16),
        "down_proj_scales": (num_experts, hidden, features // 32),
    }
    tensors = {
        f"{EXPERTS}.{name}": torch.randint(0, 256, shape, dtype=torch.uint8)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / FILE)
    spec = parse_model_spec(folder)
    halves = []
    for rank in range(2):
        mesh = mesh_of(rank, 2)
        halves.append(CpuWeightOnlyExperts(num_experts, hidden, features, mesh))
        load_weights(halves[-1], tmp_path, spec, mesh, progress=False)
    for name in ("blocks", "scales"):
        theirs = tensors[f"{EXPERTS}.gate_up_proj_{name}"].flatten(2)
        pairs = [getattr(half.parts.gate_up, name).chunk(2, dim=1) for half in halves]
        gate, up = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
        assert torch.equal(gate, theirs[:, 0::2]) and torch.equal(up, theirs[:, 1::2])
        down = torch.cat([getattr(half.parts.down, name) for half in halves], dim=2)
        assert torch.equal(down, tensors[f"{EXPERTS}.down_proj_{name}"].flatten(2))

    floats = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(floats, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"\[0\]' is stored as F32, but .* asks for U8"):
        load_weights(halves[0], tmp_path, spec, mesh_of(0, 2), progress=False)


def test_random_quantized_values_are_all_and_random_scales_near_what_is_typical():
    model = CpuWeightOnlyExperts(2, 64, 128, RankMesh.single())
    scales = model.parts.down.scales
    scales.typical = (120.0, 1.0)
    dummy_weights(model, seed=1)
    blocks = model.parts.gate_up.blocks
    assert len(blocks.unique()) == 256
    assert 118 < scales.float().mean() < 122 and 0.5 < scales.float().std() < 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{EXPERTS}.down_proj_bias"),
            rf"missing: {EXPERTS}\.down_proj_bias; unexpected: none",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(7, 64, 192)}),
            rf"missing: none; unexpected: {EXPERTS}\.gate_up_proj\[6\]$",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(6, 192, 64)}),
            r"gate_up_proj\[0\]' has shape \[32, 192\], config\.json asks for \[1, 96, 64\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(6)}),
            rf"missing: {EXPERTS}\.down_proj; unexpected: {EXPERTS}\.down_proj$",
        ),
    ],
)
def test_what_does_not_fit_is_named_as_the_file_names_it(folder, tmp_path, change, message):
    tensors = load_file(folder / FILE)
    change(tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_sinks_count(folder):
    model = load_model(folder)
    before = mixed_run(model, prompts(500))
    for layer in model.layers:
        layer.attention.sinks.data.fill_(-torch.inf)
    for with_sinks, without in zip(before, mixed_run(model, prompts(500)), strict=True):
        assert (with_sinks - without).abs().max() > 0.1


def test_low_precision_model_stays_near_the_fp32_one(folder):
    exact, rounded = (
        mixed_run(load_model(folder, dtype=dtype, finished=True), prompts(500))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert 0 < (ours.float() - theirs).norm() / theirs.norm() < 0.08
