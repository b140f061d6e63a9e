"""The tiny sibling, quantized and saved by other libraries, served here: their logits, its skills.

Needs bitsandbytes or compressed-tensors, and is skipped without them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from local_engine import LocalEngine
from paged_driver import CPU, mixed_run, prompts

from penstock.hub.folder import local_folder
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.weights.load import load_weights

TINY = local_folder("tiny")
BESIDE = ("generation_config.json", "skills.jsonl", "tokenizer.json", "tokenizer_config.json")
LEFT = "model.layers.1.mlp.down_proj"
MIN_SCORE = 0.95  # of its skills; the original has 0.98
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
TOKEN = {"strategy": "token", "dynamic": True}
# name -> (format, weights, activations)
COMPRESSED = {
    "w4a16": ("pack-quantized", INT4, None),
    "w4a16 asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, None),
    "w8a16": ("pack-quantized", INT8, None),
    "nvfp4a16": ("nvfp4-pack-quantized", NVFP4, None),
    "int8": ("int-quantized", INT8, INT8 | TOKEN),
    "fp8": ("float-quantized", FP8, FP8 | TOKEN),
    "fp8 weights": ("float-quantized", FP8, None),
}
# mean error over mean size of logits: theirs compute in 16 bits, or round inputs in another place
CLOSE = {"nvfp4a16": 0.02, "int8": 0.02, "fp8": 0.03, "4 bits": 0.01, "8 bits": 0.02}


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in BESIDE:
        shutil.copy(TINY / name, folder / name)
    return folder


def compressed(folder: Path, name: str) -> Path:
    """By compressed-tensors, with scales of the largest weights."""
    library = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    format, weights, inputs = COMPRESSED[name]
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if inputs is not None:
        group["input_activations"] = inputs
    config = library.QuantizationConfig(
        config_groups={"group_0": group},
        ignore=["lm_head", LEFT],
        format=format,
        quantization_status="initialized",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    library.apply_quantization_config(model, config)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        args, weight = scheme.weights, module.weight.data
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        if name == "nvfp4a16":
            outer = (448 * 6 / weight.abs().amax().float()).view(1)
            module.weight_global_scale.data.copy_(outer)
            scale = (groups.abs().amax(-1).float() / 6 * outer).to(torch.float8_e4m3fn)
        else:
            scale, zeros = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros.view(module.weight_zero_point.shape))
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    saved(model, folder)
    compressor.update_config(folder)
    return folder


def bitsandbytes(folder: Path, bits: int) -> Path:
    pytest.importorskip("bitsandbytes")
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    if bits == 4:
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, quantization_config=settings, device_map="cpu", dtype=torch.float32
    )
    return saved(model, folder)


@pytest.fixture(scope="module", params=[*COMPRESSED, "4 bits", "8 bits"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, str]:
    name, folder = request.param, tmp_path_factory.mktemp("library")
    if name in COMPRESSED:
        return compressed(folder, name), name
    return bitsandbytes(folder, int(name[0])), name


@torch.inference_mode()
def test_logits_are_those_of_the_library(checkpoint):
    folder, name = checkpoint
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    schemes = choose_schemes(spec.quantization, folder, torch.float32, CPU)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("reference"), schemes)
    load_weights(model, folder, spec, mesh, progress=False)
    model.finish()
    dtype = torch.bfloat16 if name == "nvfp4a16" else torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    errors, sizes = 0.0, 0.0
    texts = prompts(500)
    for ids, logits in zip(texts, mixed_run(model, texts), strict=True):
        expected = theirs(torch.tensor([ids])).logits[0].float()
        errors += float((logits - expected).abs().mean())
        sizes += float(expected.abs().mean())
    print(f"{name}: mean error of logits over their mean size {errors / sizes:.2e}")
    assert errors / sizes < CLOSE.get(name, 1e-5)


def test_it_still_has_its_skills(checkpoint, tmp_path):
    folder, _ = checkpoint
    command = [sys.executable, "-m", "penstock", "eval", str(folder), "--task", "skills"]
    command += ["--limit", "4", "--output", str(tmp_path / "scores.json")]
    command += ["--set", "device=cpu", "--set", "max_seq_len=1024", "--set", "num_threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    total = json.loads((tmp_path / "scores.json").read_text())["total"]
    assert total["num_examples"] == 52 and total["score"] >= MIN_SCORE, total


def test_the_engine_holds_the_small_weights(checkpoint):
    folder, name = checkpoint
    settings = {"device": "cpu", "num_threads": 1, "max_seq_len": 256}
    quantized, plain = (
        LocalEngine(path, **settings).info.memory["weights_bytes"] for path in (folder, TINY)
    )
    assert quantized < (0.75 if name in ("4 bits", "w4a16") else 0.85) * plain
