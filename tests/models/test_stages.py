"""The stages of a pipeline hold the model's parameters between them, each under its own name."""

import pytest
import torch
from paged_driver import load_model
from tiny_models import make_checkpoint

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.parallel.stages import Elsewhere
from penstock.types.mesh import MeshShape


def parameters(folder, number=0, num_stages=1):
    mesh = RankMesh.place(number, MeshShape(pp=num_stages))
    return {name: value.clone() for name, value in load_model(folder, mesh).named_parameters()}


@pytest.mark.parametrize(
    ("arch", "num_stages", "settings"),
    [
        ("llama", 2, {"num_hidden_layers": 3}),
        ("qwen3_moe", 3, {"num_hidden_layers": 5}),
        ("qwen2", 2, {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    ],
)
def test_stages_hold_the_model_between_them(tmp_path, arch, num_stages, settings):
    folder = make_checkpoint(tmp_path, arch, **settings)
    whole = parameters(folder)
    parts = [parameters(folder, number, num_stages) for number in range(num_stages)]
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    names = [name for part in parts for name in part]
    twice = {"embed.weight"} if "tie_word_embeddings" in settings else set()  # also the head's
    assert set(names) == set(whole) and {n for n in names if names.count(n) > 1} == twice
    assert "embed.weight" in parts[0] and "norm.weight" in parts[-1]
    assert "norm.weight" not in parts[0]


def test_a_tensor_that_no_stage_knows_is_refused_all_the_same(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    spec = parse_model_spec(folder, {"num_hidden_layers": 2})
    mesh = RankMesh.place(0, MeshShape(pp=2))
    model = build_model(spec, mesh, torch.float32, torch.device("meta"), get_backend("reference"))
    assert [isinstance(layer, Elsewhere) for layer in model.layers] == [False, True]
    (folder / "config.json").write_text(
        (folder / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.2\."):
        load_model(folder, mesh)
