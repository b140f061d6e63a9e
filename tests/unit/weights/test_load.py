"""A checkpoint fits its model or is refused with the names; dummy weights behave like real ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.types.mesh import MeshShape
from penstock.weights.load import dummy_weights, load_weights
from penstock.weights.stream import stream, weight_files

SINGLE = RankMesh.single()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny model whose tensors a test may change: (folder, tensors)."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    return tmp_path, load_file(tiny / "model.safetensors")


def build(folder, mesh=SINGLE, dtype=torch.float32, **overrides):
    spec = parse_model_spec(folder, overrides)
    return spec, build_model(spec, mesh, dtype, torch.device("cpu"), get_backend("reference"))


def load(folder, mesh=SINGLE, progress=False, **overrides):
    spec, model = build(folder, mesh, **overrides)
    load_weights(model, folder, spec, mesh, progress)
    return model


def test_missing_and_unexpected_tensors_are_named(copy):
    folder, tensors = copy
    tensors["model.layers.7.what"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert "missing: model.layers.1.self_attn.k_proj.weight;" in str(caught.value)
    assert str(caught.value).endswith("unexpected: model.layers.7.what")


def test_wrong_shape_is_named(copy):
    folder, tensors = copy
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' has shape \[5\].* \[64\]"):
        load(folder)


def test_integer_weights_are_refused(copy):
    folder, tensors = copy
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'lm_head.weight' is stored as I8"):
        load(folder)


def test_old_rotary_buffers_are_skipped(copy):
    folder, tensors = copy
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])


def test_tied_model_ignores_a_head_in_the_file(copy):
    folder, tensors = copy
    save_file(tensors, folder / "model.safetensors")
    model = load(folder, tie_word_embeddings=True)
    assert model.head.weight is model.embed.weight
    embed = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.embed.weight[: len(embed)], embed)


def test_rows_beyond_the_vocabulary_are_zero_and_have_no_logits(tiny):
    model = load(tiny)
    vocab_size = json.loads((tiny / "config.json").read_text())["vocab_size"]
    assert model.embed.weight.shape[0] % 64 == 0 and model.embed.weight.shape[0] > vocab_size
    assert not model.embed.weight[vocab_size:].any()
    assert model.logits(torch.ones(2, 64)).shape == (2, vocab_size)


def test_ranks_hold_consecutive_parts_of_each_tensor(tiny):
    full = load_file(tiny / "model.safetensors")
    parts = [load(tiny, RankMesh.place(rank, MeshShape(tp=2))) for rank in range(2)]
    gate = [part.layers[0].mlp.gate_up_proj.weight.chunk(2)[0] for part in parts]
    assert torch.equal(torch.cat(gate), full["model.layers.0.mlp.gate_proj.weight"])
    down = [part.layers[0].mlp.down_proj.weight for part in parts]
    assert torch.equal(torch.cat(down, dim=1), full["model.layers.0.mlp.down_proj.weight"])
    key = [part.layers[1].attention.qkv_proj.weight[32:48] for part in parts]
    assert torch.equal(torch.cat(key), full["model.layers.1.self_attn.k_proj.weight"])


def test_folder_without_weights_says_what_is_read(copy):
    folder, _ = copy
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        load(folder)


def test_incomplete_download_names_the_files(copy):
    folder, _ = copy
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 2 of 2 weight files: model-1.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd"])
def test_index_may_not_leave_its_folder(copy, name):
    folder, _ = copy
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="not a file of the same folder"):
        weight_files(folder)


def test_broken_file_is_a_config_error(copy):
    folder, _ = copy
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="cannot read"):
        load(folder)


def test_a_pointer_of_git_lfs_is_named(copy):
    folder, _ = copy
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 6959504\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match=r"points to the weights, in Git LFS; .*git lfs pull"):
        load(folder)


def test_stream_reads_a_part_without_reading_the_rest(tiny):
    tensors = {tensor.name: tensor for tensor in stream(weight_files(tiny))}
    full = load_file(tiny / "model.safetensors")
    assert tensors.keys() == full.keys()
    name = "model.layers.0.mlp.down_proj.weight"
    part = tensors[name].read((slice(2, 5), slice(20, 70)))
    assert torch.equal(part, full[name][2:5, 20:70])


def test_progress_bar_does_not_change_what_is_loaded(tiny):
    quiet, shown = load(tiny), load(tiny, progress=True)
    for (name, ours), (_, theirs) in zip(
        quiet.named_parameters(), shown.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_repeatable_and_never_degenerate(tiny, dtype):
    _, model = build(tiny, dtype=dtype)
    dummy_weights(model, seed=3)
    _, again = build(tiny, dtype=dtype)
    dummy_weights(again, seed=3)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        assert ours.isfinite().all() and ours.float().std() > 0, name
        if name.endswith("norm.weight"):
            assert ours.float().mean() == pytest.approx(1.0, abs=0.05)
    hidden = torch.randn(4, 64, dtype=dtype)
    logits = model.logits(hidden).float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2.0


def test_dummy_weights_differ_by_seed(tiny):
    _, one = build(tiny)
    _, two = build(tiny)
    dummy_weights(one, seed=1)
    dummy_weights(two, seed=2)
    assert not torch.equal(one.embed.weight, two.embed.weight)
