"""GGUF files give the model that was packed into them."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_models import HALVES, QUANT, write_gguf
from paged_driver import CPU, load_model, mixed_run, prompts
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError
from penstock.hub.gguf_file import GgufFile
from penstock.kernels.gemm.quantized_cpu import CpuPackedWeight, unpack_cpu
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.types.mesh import MeshShape
from penstock.weights.gguf_tensors import stream_gguf


@pytest.mark.parametrize("kind", [QUANT.F32, QUANT.F16, QUANT.Q8_0, QUANT.Q4_1], ids=str)
@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    ],
    ids=["llama", "tied", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"],
)
def test_a_packed_model_gives_the_logits_of_its_numbers(tmp_path, arch, fields, kind):
    model = reference_model(make_checkpoint(tmp_path / "hf", arch, **fields))
    held = write_gguf(tmp_path / "model.gguf", model, kind)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in held.items()}, strict=False)
    texts = prompts(model.config.vocab_size)
    ours = mixed_run(load_model(tmp_path / "model.gguf"), texts)
    for text, logits in zip(texts, ours, strict=True):
        with torch.inference_mode():
            truth = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, truth, atol=1e-4, rtol=0)


MIXED = {"v_proj": QUANT.Q8_0, "o_proj": QUANT.Q5_1, "up_proj": QUANT.F16, "embed": QUANT.Q8_0}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [QUANT.Q4_0, QUANT.Q4_1, QUANT.Q5_0, QUANT.Q8_0], ids=str)
@pytest.mark.parametrize("kinds", [{}, MIXED], ids=["one", "mixed"])
def test_weights_that_stay_packed_give_the_same_logits(tmp_path, kind, kinds, tied):
    checkpoint = make_checkpoint(tmp_path / "hf", "qwen2", tie_word_embeddings=tied)
    path, model = tmp_path / "model.gguf", reference_model(checkpoint)
    held = write_gguf(path, model, kind, kinds=kinds)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in held.items()}, strict=False)
    packed = load_model(path, schemes=choose_schemes(None, path, torch.float32, CPU))
    attention, mlp = packed.layers[0].attention, packed.layers[0].mlp
    assert isinstance(attention.qkv_proj.weight, CpuPackedWeight)
    assert attention.qkv_proj.weight.form.bits == (4 if kind.name[1] == "4" and not kinds else 8)
    # Half of gate_up has no codes: fp16.
    assert isinstance(mlp.gate_up_proj.weight, CpuPackedWeight) == (not kinds)
    assert isinstance(packed.embed.weight, CpuPackedWeight)
    assert (packed.embed.weight is packed.head.weight) == tied
    texts = prompts(model.config.vocab_size)
    for text, logits in zip(texts, mixed_run(packed, texts), strict=True):
        with torch.inference_mode():
            truth = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, truth, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [QUANT.BF16, *HALVES], ids=str)
def test_types_that_others_pack_give_the_logits_of_their_numbers(tmp_path, kind):
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    path = tmp_path / "model.gguf"
    model = reference_model(make_checkpoint(tmp_path / "hf", "qwen2", **sizes))
    held = write_gguf(path, model, kind)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in held.items()}, strict=False)
    packed = load_model(path, schemes=choose_schemes(None, path, torch.float32, CPU))
    is_packed = isinstance(packed.layers[0].attention.qkv_proj.weight, CpuPackedWeight)
    assert is_packed == kind.name.endswith("_K")  # for the others there are no codes
    texts = prompts(model.config.vocab_size)
    for text, logits in zip(texts, mixed_run(packed, texts), strict=True):
        with torch.inference_mode():
            truth = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, truth, atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("kinds", [{}, {"up_exps": QUANT.F16}], ids=["one", "mixed"])
def test_experts_that_stay_packed_give_the_same_logits(tmp_path, arch, kinds):
    checkpoint = make_checkpoint(tmp_path / "hf", arch, norm_topk_prob=arch != "qwen2_moe")
    path, model = tmp_path / "model.gguf", reference_model(checkpoint)
    held = write_gguf(path, model, QUANT.Q4_1, kinds=kinds)
    model.load_state_dict({n: torch.from_numpy(v) for n, v in held.items()}, strict=False)
    packed = load_model(path, schemes=choose_schemes(None, path, torch.float32, CPU))
    experts = packed.layers[0].mlp.experts
    assert [isinstance(w, CpuPackedWeight) for w in experts.gate_up.weight] == [not kinds] * 6
    assert all(isinstance(w, CpuPackedWeight) for w in experts.down.weight)
    texts = prompts(model.config.vocab_size)
    for text, logits in zip(texts, mixed_run(packed, texts), strict=True):
        with torch.inference_mode():
            truth = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, truth, atol=1e-4, rtol=0)


# Widths that transformers does not read from the file: those of its configurations.
WIDE = {
    "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"moe_intermediate_size": 768, "norm_topk_prob": True},
}


@pytest.mark.parametrize("arch", WIDE)
def test_transformers_reads_the_same_model_from_the_file(tmp_path, arch):
    folder = make_checkpoint(tmp_path / "hf", arch, num_experts=4, **WIDE[arch])
    write_gguf(tmp_path / "model.gguf", reference_model(folder), QUANT.Q8_0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = prompts(theirs.config.vocab_size)
    ours = mixed_run(load_model(tmp_path / "model.gguf"), texts)
    for text, logits in zip(texts, ours, strict=True):
        with torch.inference_mode():
            truth = theirs(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, truth, atol=2e-4, rtol=0)


def test_a_share_of_the_inputs_stays_packed_where_it_is_whole_groups(tmp_path):
    fields = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
    path = tmp_path / "model.gguf"
    model = reference_model(make_checkpoint(tmp_path / "hf", "llama", **fields))
    held = write_gguf(path, model, QUANT.Q4_1)
    shares = []
    for rank in range(2):
        mesh = RankMesh.place(rank, MeshShape(tp=2))
        schemes = choose_schemes(None, path, torch.float32, CPU)
        shares.append(load_model(path, mesh, schemes=schemes))
    for name, dim in (("attention.qkv_proj", 0), ("attention.o_proj", 1), ("embed", 0)):
        weights = [model.get_submodule(_in_layer(name)).weight for model in shares]
        parts = [unpack_cpu(weight) for weight in weights]
        if name == "attention.qkv_proj":  # each rank has a part of each of the three
            first, second = (part.split((64, 32, 32)) for part in parts)
            parts = [torch.cat(both) for both in zip(first, second, strict=True)]
            names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
            expected = np.concatenate([held[name] for name in names])
        else:
            expected = held[_NAMES_OF[name]]
        whole = torch.cat(parts, dim)[: len(expected)]
        assert torch.equal(whole, torch.from_numpy(expected)), name
    # 96 inputs are 48 per rank, one and a half groups.
    assert not isinstance(shares[0].layers[0].mlp.down_proj.weight, CpuPackedWeight)
    x_TI = torch.randn(3, 48)
    with torch.inference_mode():
        y_TO = (
            shares[1]
            .layers[0]
            .mlp.down_proj.scheme.apply(shares[1].layers[0].mlp.down_proj, x_TI, add_bias=False)
        )
    expected = torch.from_numpy(held["model.layers.0.mlp.down_proj.weight"][:, 48:])
    torch.testing.assert_close(y_TO, x_TI @ expected.T)


_NAMES_OF = {
    "attention.o_proj": "model.layers.0.self_attn.o_proj.weight",
    "embed": "model.embed_tokens.weight",
}


def _in_layer(name: str) -> str:
    return name if name == "embed" else f"layers.0.{name}"


def test_the_configuration_is_that_of_the_packed_model(tmp_path):
    model = reference_model(make_checkpoint(tmp_path / "hf", "qwen3", head_dim=32))
    write_gguf(tmp_path / "model.gguf", model)
    theirs, ours = parse_model_spec(tmp_path / "hf"), parse_model_spec(tmp_path / "model.gguf")
    for name in ("architecture", "vocab_size", "head_size", "num_kv_heads", "rope", "qk_norm"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    assert ours.eos_token_ids == (2, 5)


def llama3_factors(num: int, theta: float, factor: float) -> np.ndarray:
    """As transformers scales them: frequency before over frequency after."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(
        rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    config = LlamaConfig(head_dim=2 * num, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return theta ** -(np.arange(num) / num) / scaled.numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_found_in_its_stored_factors(tmp_path, factor):
    model = reference_model(make_checkpoint(tmp_path / "hf", "llama", head_dim=64))
    factors = llama3_factors(32, 10000.0, factor)
    write_gguf(tmp_path / "model.gguf", model, rope_factors=factors)
    rope = parse_model_spec(tmp_path / "model.gguf").rope
    assert (rope.kind, rope.original_max_position) == ("llama3", 8192)
    assert rope.factor == pytest.approx(factor)


def test_other_stored_factors_are_refused(tmp_path):
    model = reference_model(make_checkpoint(tmp_path / "hf", "llama", head_dim=64))
    write_gguf(tmp_path / "model.gguf", model, rope_factors=np.linspace(1, 9, 32))
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        parse_model_spec(tmp_path / "model.gguf")


def test_only_the_rows_asked_for_are_unpacked(tmp_path):
    model = reference_model(make_checkpoint(tmp_path / "hf", "llama"))
    held = write_gguf(tmp_path / "model.gguf", model, QUANT.Q8_0)
    for tensor in stream_gguf(tmp_path / "model.gguf"):
        if len(tensor.shape) == 2:
            part = tensor.read((slice(8, 24), slice(32, 64)))
            assert np.array_equal(part.numpy(), held[tensor.name][8:24, 32:64]), tensor.name


@pytest.mark.parametrize("cut", [0, 3, 20, 200, 2000])
def test_a_damaged_file_is_a_config_error(tmp_path, cut):
    model = reference_model(make_checkpoint(tmp_path / "hf", "llama"))
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < 1000 else whole[: len(whole) - cut])
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        for tensor in stream_gguf(path):
            tensor.read(tuple(slice(None) for _ in tensor.shape))


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GgufFile(tmp_path / "model.gguf").metadata["general.architecture"] == "mamba"
    with pytest.raises(ConfigError, match="mamba"):
        parse_model_spec(tmp_path / "model.gguf")
