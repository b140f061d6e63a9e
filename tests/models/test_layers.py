"""What layers promise beyond the numbers: one hook per linear, cache specs, low-precision files."""

import pytest
import torch
from paged_driver import PagedDriver, load_model, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from penstock.types.cache_spec import FullKV


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


def test_post_op_sees_input_output_and_batch_and_replaces_the_output(folder):
    (ids,) = prompts(500, [5])
    plain = PagedDriver(load_model(folder)).step([(0, ids)])[0]
    model = load_model(folder)
    seen = []

    def double_the_last_layer(x, y, batch):
        seen.append((x.shape, y.shape, batch.num_tokens))
        return 2 * y

    model.layers[1].mlp.down_proj.post_op = double_the_last_layer
    changed = PagedDriver(model).step([(0, ids)])[0]
    assert seen == [((5, 96), (5, 64), 5)]
    assert not torch.allclose(plain, changed, atol=0.01)
    model.layers[1].mlp.down_proj.post_op = lambda x, y, batch: y
    torch.testing.assert_close(PagedDriver(model).step([(0, ids)])[0], plain)


def test_every_attention_layer_states_its_cache(folder):
    model = load_model(folder, dtype=torch.bfloat16)
    specs = [layer.cache_spec() for layer in model.cache_layers()]
    assert specs == [FullKV(num_kv_heads=2, head_size=16, dtype="bfloat16")] * 2


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_into_any_dtype(folder, tmp_path, stored):
    tensors = {
        name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path, dtype=dtype)
        found = model.layers[0].mlp.down_proj.weight
        assert torch.equal(found, tensors["model.layers.0.mlp.down_proj.weight"].to(dtype))


def test_no_parameter_asks_for_gradients(folder):
    assert not any(parameter.requires_grad for parameter in load_model(folder).parameters())
