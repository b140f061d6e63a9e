"""The tables are those of transformers, bit for bit, for real configurations."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.layers.rope import Rope, attention_factor, cos_sin_table, inverse_frequencies
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.model_loader import load_model
from penstock.runtime.timeline import Timeline

TINY = local_folder("tiny")
SHAPE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
VARIANTS = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 1.7},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn without trained length": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.7,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.8,
        "mscale_all_dim": 1.1,
    },
    "yarn betas, not truncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_equals_that_of_transformers(tmp_path, variant):
    config = LlamaConfig(**SHAPE, rope_parameters=dict(VARIANTS[variant]))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = parse_model_spec(tmp_path)
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(spec.rope, 128, 4096), theirs.inv_freq)
    assert attention_factor(spec.rope) == theirs.attention_scaling

    positions = torch.tensor([[0, 1, 17, 1023, 4095]])
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), positions)
    table = cos_sin_table(spec.rope, 128, 4096)
    assert table.shape == (4096, 128) and table.dtype == torch.float32
    expected = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    torch.testing.assert_close(table[positions[0]], expected, atol=1e-6, rtol=0)


def test_dynamic_table_is_unscaled_up_to_the_trained_length_and_scaled_beyond(tmp_path):
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    for max_position in (512, 4096):
        spec = parse_model_spec(tmp_path, {"max_position_embeddings": max_position})
        found = inverse_frequencies(spec.rope, 128, spec.max_position)
        assert torch.equal(found, plain)
    spec = parse_model_spec(tmp_path, {"max_position_embeddings": 16384})
    found = inverse_frequencies(spec.rope, 128, spec.max_position)
    assert found[0] == 1.0 and (found[1:] < plain[1:]).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shorter_table_is_the_beginning_of_the_model_s(tmp_path, variant):
    """A run with a short max_seq_len rotates as the model does: no angle depends on the run."""
    config = LlamaConfig(**SHAPE, rope_parameters=dict(VARIANTS[variant]))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = parse_model_spec(tmp_path, {"max_position_embeddings": 8192})
    whole = cos_sin_table(spec.rope, 128, spec.max_position)
    assert torch.equal(cos_sin_table(spec.rope, 128, spec.max_position, 300), whole[:300])


def test_the_table_of_a_run_is_as_long_as_its_sequences():
    """A checkpoint with 8.4 M positions asked for 5.4 GB before the first weight was read."""
    spec = replace(parse_model_spec(TINY), max_position=1 << 23)
    settings = EngineConfig(model=str(TINY), device="cpu", max_seq_len=100)
    config = resolve(settings, spec, probe(), str(TINY))
    model, _, _ = load_model(config, spec, RankMesh.single(), Timeline())
    [rope] = {module for module in model.modules() if isinstance(module, Rope)}
    assert rope.cos_sin_PR.shape == (config.max_seq_len + config.depth, spec.head_size)
