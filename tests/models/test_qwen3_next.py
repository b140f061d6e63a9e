"""Qwen 3 Next beyond its logits: names of its weights, low precision, 8-bit floats, its memory."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from local_engine import LocalEngine
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.layers.linear import Linear
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.unquantized import Unquantized
from penstock.types.cache_spec import RecurrentState
from penstock.types.mesh import MeshShape
from penstock.types.setting_choice import SettingChoice

SIBLING = Path(__file__).parents[1] / "siblings" / "qwen3_next"
REAL = Path(__file__).parents[3] / "shared" / "configs" / "Qwen3-Next-80B-A3B-Thinking"
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
ENGINE = {"device": "cpu", "dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("next"), "qwen3_next", max_position_embeddings=256
    )


@pytest.fixture(scope="module")
def truth(folder):
    return reference_model(folder)


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def with_tensors(folder: Path, to: Path, change) -> Path:
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def test_tensors_of_further_tokens_are_left_in_the_file(folder, tmp_path):
    def add(tensors):
        tensors["mtp.fc.weight"] = torch.ones(64, 128)
        tensors["mtp.norm.weight"] = torch.ones(64)
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(256, 64)

    without = dict(load_model(folder).named_parameters())
    loaded = dict(load_model(with_tensors(folder, tmp_path / "mtp", add)).named_parameters())
    assert loaded.keys() == without.keys()
    assert all(torch.equal(loaded[name], without[name]) for name in loaded)


def test_missing_tensors_have_the_checkpoints_names(folder, tmp_path):
    names = {f"model.layers.0.linear_attn.{part}" for part in ("norm.weight", "A_log", "dt_bias")}
    names |= {f"model.layers.0.linear_attn.{part}.weight" for part in ("conv1d", "in_proj_ba")}
    names |= {"model.layers.1.self_attn.q_proj.weight", "model.layers.3.mlp.gate.weight"}

    def remove(tensors):
        for name in names:
            del tensors[name]

    with pytest.raises(ConfigError) as caught:
        load_model(with_tensors(folder, tmp_path / "less", remove))
    assert f"missing: {', '.join(sorted(names))};" in str(caught.value)


def test_bfloat16_is_as_close_to_the_truth_as_transformers_is(folder, truth):
    texts = prompts(500)
    ours = mixed_run(load_model(folder, dtype=torch.bfloat16, finished=True), texts)
    rounded = reference_model(folder).bfloat16()
    for text, logits in zip(texts, ours, strict=True):
        with torch.inference_mode():
            expected = truth(torch.tensor([text])).logits[0]
            theirs = rounded(torch.tensor([text])).logits[0].float()
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).norm() < 1.3 * (theirs - expected).norm()


@pytest.mark.skipif(not REAL.is_dir(), reason="the real config is not here")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_release_in_8_bit_floats_builds_on_ranks(num_ranks):
    """With its shapes, and with modules left out as its 8-bit sibling does."""
    left_out = ["model.layers.1.linear_attn.in_proj_ba", "lm_head", "*.mlp.experts.*"]
    changes = {
        "num_hidden_layers": 4,
        "num_experts": 16,
        "quantization_config": FP8 | {"modules_to_not_convert": left_out},
    }
    spec = parse_model_spec(REAL, changes)
    mesh = RankMesh.place(0, MeshShape(tp=num_ranks))
    model = build_model(spec, mesh, torch.bfloat16, torch.device("meta"), get_backend("reference"))
    plain = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and isinstance(layer.scheme, Unquantized)
    }
    assert plain == {"layers.1.attention.in_proj_ba"}
    qkvz = model.layers[0].attention.in_proj_qkvz
    assert qkvz.weight.dtype == torch.float8_e4m3fn
    assert qkvz.weight.shape == (12288 // num_ranks, 2048)
    assert qkvz.weight_scale_inv.shape == (96 // num_ranks, 16)
    state = model.layers[0].attention.cache_spec()
    assert state == spec.delta.state(num_ranks, "bfloat16") and state.state_dtype == "float32"


def test_layers_of_8_bit_floats_give_what_their_numbers_give(tmp_path):
    """The same weights in 8-bit blocks and as plain numbers."""
    sizes = {"hidden_size": 128, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes |= {"head_dim": 128, "mlp_only_layers": [0, 1]}  # rounding chooses no experts
    sizes |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = make_checkpoint(tmp_path / "plain", "qwen3_next", **sizes)
    tensors = load_file(folder / "model.safetensors")
    (quantized := tmp_path / "fp8").mkdir()
    stored = dict(tensors)
    for name, weight in tensors.items():
        if "attn." in name and "proj" in name:
            stored[name] = weight.to(torch.float8_e4m3fn)
            num_blocks = [-(-size // 128) for size in weight.shape]
            stored[f"{name}_scale_inv"] = torch.ones(num_blocks)
            tensors[name] = stored[name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8 | {"modules_to_not_convert": ["lm_head", "*.mlp.*"]}
    (quantized / "config.json").write_text(json.dumps(config))
    texts = prompts(500)
    ours, plain = (
        mixed_run(load_model(place, finished=True), texts) for place in (quantized, folder)
    )
    for found, expected in zip(ours, plain, strict=True):
        distance = (found - expected).norm() / expected.norm()
        assert 1e-4 < distance < 0.15  # inputs are rounded, too


def test_a_state_goes_on_from_copies_at_the_interval_and_at_the_prompts_end(folder, truth):
    settings = {"tokens_per_block": 8, "mamba_state_cache_interval": 16}
    engine = LocalEngine(folder, **ENGINE, kv_cache_config=settings)
    (text,) = prompts(500, [90])
    answer = greedy(truth, text[:45])
    assert engine.generate([text[:45]], NUM_TOKENS) == [answer]
    for prompt, num_hit in (
        (text[:45], 32),  # every 16 tokens; also the last of 8 before 45 - 8
        ([*text[:20], *text[60:80]], 16),  # parts from it after 20 tokens
        ([*text[:45], *answer[:20], *text[60:70]], 45),  # goes on from its end
        ([*text[1:40]], 0),
    ):
        before = engine.counters.prefix_hit_tokens
        (tokens,) = engine.generate([prompt], NUM_TOKENS)
        assert tokens == greedy(truth, prompt)
        assert engine.counters.prefix_hit_tokens - before == num_hit
    assert engine.counters.used_blocks == 0


@pytest.mark.parametrize("thinks", [False, True])
def test_the_next_turn_of_a_chat_finds_the_turn_before(thinks):
    """Told not to think, the template opens the answer with an empty thought that the next turn
    does not repeat: it goes on from the block before. Else it repeats the prompt to its end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(SIBLING)

    def rendered(messages) -> list[int]:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, enable_thinking=thinks
        )

    kv = {"tokens_per_block": 8}
    engine = LocalEngine(SIBLING, **ENGINE, max_seq_len=1024, kv_cache_config=kv)
    asked = "What is the capital of France? Tell me its name, please."
    messages = [{"role": "user", "content": asked}]
    num_cached = []
    for _ in range(3):
        prompt = rendered(messages)
        rid = engine.submit(prompt, 60)
        engine.run()
        num_cached.append(engine.deltas[rid][0].num_cached_tokens)
        answer = tokenizer.decode(engine.tokens(rid)).partition("<|im_end|>")[0]
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And which river flows through it?"},
        ]
    sizes = [len(rendered(messages[: 2 * turn + 1])) for turn in range(3)]
    assert num_cached == [0, *(size if thinks else (size - 8) // 8 * 8 for size in sizes[:2])]


def test_a_sequence_that_was_preempted_goes_on_from_a_copy(folder, truth):
    texts = prompts(500, [40, 41, 42, 43])
    kv = {"tokens_per_block": 16, "max_tokens": 160, "mamba_state_cache_interval": 16}
    packed = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    engine = LocalEngine(
        folder, **ENGINE, max_num_tokens=24, kv_cache_config=kv, scheduler_config=packed
    )
    assert engine.generate(texts, NUM_TOKENS) == [greedy(truth, text) for text in texts]
    assert engine.counters.preemptions > 0
    states = engine.engine.scheduler._kvs[0].groups[1].pool
    assert states.num_held == states.num_quarantined == 0 < states.num_reusable


def test_without_block_reuse_there_are_states_for_the_rows_alone(folder, truth):
    kv = {"enable_block_reuse": False}
    engine = LocalEngine(folder, **ENGINE, max_batch_size=3, kv_cache_config=kv)
    assert engine.engine.scheduler._kvs[0].groups[1].pool.num_blocks == 1 + 3
    texts = prompts(500, [30, 9, 50, 3, 17])
    for _ in range(2):
        assert engine.generate(texts, NUM_TOKENS) == [greedy(truth, text) for text in texts]
    assert engine.counters.prefix_hit_tokens == 0


def test_fewer_states_than_rows_limit_the_batch_and_it_is_said(folder, truth, monkeypatch, caplog):
    spec = parse_model_spec(folder)
    one = sum(spec.delta.layers) * sum(
        plane.block_bytes for plane in spec.delta.state(1, "float32").planes(1)
    )
    monkeypatch.setattr("penstock.config.resolve_cache._cpu_states", lambda *args: 11 * one)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        logging.getLogger("penstock").propagate = True
        engine = LocalEngine(folder, **ENGINE, max_batch_size=50)
    assert engine.info.max_batch_size == engine.engine.config.max_batch_size == 5
    reason = "the memory holds the states of 5 sequences at once, 50 were asked for"
    limited = SettingChoice(name="max_batch_size", value="5", reason=reason)
    assert limited in engine.info.choices
    words = "5 sequences, 5 snapshots for prefix reuse, one for padding"
    assert SettingChoice(name="state_slots", value="11", reason=words) in engine.info.choices
    memory = engine.info.memory
    assert (memory["states_bytes"], memory["state_bytes"]) == (11 * one, one)
    assert f"max_batch_size is 5: {reason}" in caplog.text
    texts = prompts(500, [20 + n for n in range(8)])
    ids = [engine.submit(text, NUM_TOKENS) for text in texts]
    most = 0
    while engine.inbox or engine.engine.scheduler.has_work or engine.loop._steps:
        engine.turn()
        most = max(most, engine.counters.running)
    assert most == 5
    assert [engine.tokens(rid) for rid in ids] == [greedy(truth, text) for text in texts]


def test_only_recurrent_layers_have_states(folder):
    model = load_model(folder)
    kinds = [isinstance(layer.cache_spec(), RecurrentState) for layer in model.cache_layers()]
    assert kinds == [True, False, True, True]
    assert next(model.parameters()).device == CPU
