"""Checkpoints made for a KV cache that is not ours: refused by name, and run with one that is."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from fp8_models import SHAPE, make_fp8_checkpoint
from local_engine import LocalEngine
from paged_driver import load_model
from safetensors.torch import load_file, save_file

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec

SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "bfloat16"}
BLOCKS = {"tokens_per_block": 16, "max_tokens": 1024}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SCHEMES = {  # as compressed-tensors writes them, and what they are called
    "int8": (PER_TENSOR | {"type": "int"}, "INT8"),
    "fp4": (PER_TENSOR | {"num_bits": 4, "strategy": "tensor_group"}, "FP4 by tensor_group"),
    "by head": (PER_TENSOR | {"strategy": "attn_head"}, "FP8 by attn_head"),
    "dynamic": (PER_TENSOR | {"dynamic": True}, "dynamic FP8"),
    "asymmetric": (PER_TENSOR | {"type": "int", "symmetric": False}, "asymmetric INT8"),
    "a string": ("int4", "'int4'"),
}
CASES = pytest.mark.parametrize("case", SCHEMES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return make_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "plain", "compressed dynamic")


@pytest.fixture
def folder(plain, tmp_path, case) -> Path:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"]["kv_cache_scheme"] = SCHEMES[case][0]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    size = (SHAPE["num_key_value_heads"], 1, 1) if case == "by head" else (1,)
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        for name in ("k_scale", "v_scale"):
            tensors[f"{at}.{name}"] = torch.full(size, 0.02)
        if case == "asymmetric":
            tensors[f"{at}.k_zero_point"] = tensors[f"{at}.v_zero_point"] = torch.zeros(1).char()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("case", [case for case in SCHEMES if case != "int8"])
def test_another_cache_is_refused_by_its_name(folder, case):
    wanted = f"a KV cache in {SCHEMES[case][1]}, which is not supported; set kv_cache_config.dtype"
    with pytest.raises(ConfigError) as refusal:
        LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS)
    assert wanted in str(refusal.value)


@pytest.mark.parametrize("case", ["int8"])
def test_int8_is_ours_with_finer_scales(folder, case):
    spec = parse_model_spec(folder)
    asked = EngineConfig(model=str(folder), **SETTINGS)
    assert resolve(asked, spec, probe(), str(folder)).kv_dtype == "int8"
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS)
    assert [len(tokens) for tokens in engine.generate([[5, 6, 7]], 4)] == [4]


@CASES
def test_it_runs_with_the_cache_that_the_user_names(folder, case):
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=BLOCKS | {"dtype": "bfloat16"})
    assert [len(tokens) for tokens in engine.generate([[5, 6, 7]], 4)] == [4]


@CASES
def test_scales_of_another_cache_are_not_those_of_fp8(folder, case, caplog):
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, finished=True, cache_dtype=torch.float8_e4m3fn)
    assert [layer.attention.cache_scales for layer in model.layers] == [(1.0, 1.0)] * 2
    assert "4 scales of the KV cache are not used" in caplog.text
