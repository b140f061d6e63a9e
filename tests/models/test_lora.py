"""Adapters in PEFT's layout: logits are those of transformers with the adapter merged by hand."""

import json
import re

import numpy as np
import pytest
import torch
from fp8_models import make_fp8_checkpoint, truth
from lora_models import ALL, hook, make_adapter, merge, write_adapter
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, reference_model
from weight_only_models import make_weight_only_checkpoint

from penstock.config.run import LoraRun
from penstock.errors import ConfigError
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.runtime.adapters import AdapterField
from penstock.types.adapter import Adapter, AdapterInSlot
from penstock.types.mesh import MeshShape
from penstock.types.sampling import SamplingParams
from penstock.types.step import RowJoin

CLOSE = 2e-4
RUN = LoraRun(max_rank=8, num_slots=3, num_host=4)


def with_slots(folder, *adapters, run=RUN, model=None, **further):
    """The model with these adapters in its first slots."""
    model = model or load_model(folder, finished=True)
    field = AdapterField(run, model, max_rows=4, device=CPU, **further)
    field.join([joining(path, slot, row=slot) for slot, path in enumerate(adapters)])
    return model, field


def joining(path, slot: int, row: int) -> RowJoin:
    adapter = Adapter(id=str(path), name=path.name, path=str(path))
    return RowJoin(
        request_id=1, dp_rank=0, row=row, token_ids=np.zeros(1, np.int32), num_computed=0,
        num_prompt=1, sampling=SamplingParams(), stop_ids=(),
        adapter=AdapterInSlot(adapter=adapter, slot=slot),
    )  # fmt: skip


@torch.no_grad()
def logits_of(reference, ids):
    return reference(torch.tensor([ids])).logits[0]


def merged_logits(reference, ids, adapter):
    if adapter is None:
        return logits_of(reference, ids)
    merge(reference, adapter)
    logits = logits_of(reference, ids)
    merge(reference, adapter, -1.0)
    return logits


ARCHS = {
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "phi3": {},  # q, k, v and gate, up are one matrix each, and have one adapter each
    "glm4": {},  # rows of queries and keys are read in another order
    "qwen2_moe": {},  # attention and the shared expert
    "deepseek_v3": {},  # latents, and dense layers beside experts
    "qwen3_next": {},  # recurrent layers, gates of attention
}
_MLP = ALL[4:]
MODULES = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*ALL[:4], "gate_up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *_MLP),
    "qwen3_next": (*ALL, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}


@pytest.mark.parametrize("name", ARCHS)
def test_a_batch_of_several_adapters_and_none_has_the_logits_of_each_merged(tmp_path, name):
    arch = name.partition(",")[0]
    folder = make_checkpoint(tmp_path / "model", arch, **ARCHS[name])
    reference = reference_model(folder)
    modules = MODULES.get(arch, ALL)
    first = make_adapter(tmp_path / "one", reference, modules, seed=1)
    some = modules[:1] + modules[-1:]
    second = make_adapter(tmp_path / "two", reference, some, rank=7, seed=2, rslora=True)
    model, _ = with_slots(folder, first, second)
    sequences = prompts(500)
    found = mixed_run(model, sequences, adapter_slots=[1, -1, 0, -1])
    for ids, adapter, logits in zip(sequences, (second, None, first), found, strict=True):
        expected = merged_logits(reference, ids, adapter)
        torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=0)
        if adapter is not None:
            assert (logits - logits_of(reference, ids)).abs().max() > 0.1
    # Where nobody has an adapter, the layers do what they would without slots.
    alone = mixed_run(model, sequences)[1]
    torch.testing.assert_close(alone, found[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["awq", "gptq", "nf4"])
def test_weight_only_bases_add_the_adapter_to_their_output(tmp_path, kind):
    folder = make_weight_only_checkpoint(tmp_path / "model", kind)
    reference = reference_model(folder / "plain")
    adapter = make_adapter(tmp_path / "one", reference)
    schemes = choose_schemes(parse_model_spec(folder).quantization, folder, torch.float32, CPU)
    model, _ = with_slots(folder, adapter, model=load_model(folder, schemes=schemes))
    sequences = prompts(500)
    found = mixed_run(model, sequences, adapter_slots=[0, -1, 0, -1])
    for ids, own, logits in zip(sequences, (adapter, None, adapter), found, strict=True):
        expected = merged_logits(reference, ids, own)
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("dialect", ["fp8 static", "fp8 blocks"])
def test_fp8_bases_add_the_adapter_to_their_output(tmp_path, dialect):
    folder = make_fp8_checkpoint(tmp_path / "model", dialect)
    reference = truth(folder, dialect)
    adapter = make_adapter(tmp_path / "one", reference)
    schemes = choose_schemes(parse_model_spec(folder).quantization, folder, torch.float32, CPU)
    model, _ = with_slots(folder, adapter, model=load_model(folder, schemes=schemes))
    sequences = prompts(500)
    first, second, _ = mixed_run(model, sequences, adapter_slots=[0, -1, -1, -1])
    plain = logits_of(reference, sequences[1])
    hook(reference, adapter)
    expected = logits_of(reference, sequences[0])
    size = expected.abs().mean()
    assert (second - plain).abs().mean() < 0.01 * size
    assert (first - expected).abs().mean() < 0.02 * size  # a tie may fall either way
    assert (first - logits_of(truth(folder, dialect), sequences[0])).abs().mean() > 0.2 * size


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def reference(llama):
    return reference_model(llama)


def test_ranks_and_alphas_of_single_modules_count(tmp_path, llama, reference):
    one = make_adapter(
        tmp_path / "one",
        reference,
        rank_pattern={"layers.1.self_attn.v_proj": 2, "down_proj": 5},
        alpha_pattern={"layers.0.mlp.gate_proj": 30.0},
    )
    model, _ = with_slots(llama, one)
    ids = prompts(500)
    found = mixed_run(model, ids, adapter_slots=[0, 0, 0, 0])
    expected = merged_logits(reference, ids[2], one)
    torch.testing.assert_close(found[2], expected, atol=CLOSE, rtol=0)


def test_a_slot_forgets_what_it_held(tmp_path, llama, reference):
    """Of a larger adapter nothing is left, also where the next one changes fewer layers."""
    large = make_adapter(tmp_path / "large", reference, rank=8, seed=3)
    small = make_adapter(tmp_path / "small", reference, ("v_proj",), rank=2, seed=4)
    model, field = with_slots(llama, large)
    field.join([joining(small, slot=0, row=1)])
    ids = prompts(500)
    found = mixed_run(model, ids, adapter_slots=[0, 0, 0, 0])
    expected = merged_logits(reference, ids[1], small)
    torch.testing.assert_close(found[1], expected, atol=CLOSE, rtol=0)


def test_one_that_cannot_be_read_any_more_spoils_its_rows_alone(tmp_path, llama, reference, caplog):
    """Another rank has read it; this one must not go on with what the slot held before."""
    adapter = make_adapter(tmp_path / "one", reference)
    (adapter / "adapter_model.safetensors").write_bytes(b"broken")
    model, _ = with_slots(llama, adapter)
    ids = prompts(500)
    found = mixed_run(model, ids, adapter_slots=[0, -1, -1, -1])
    assert found[0].isnan().all() and "'one' cannot be read" in caplog.text
    torch.testing.assert_close(found[1], logits_of(reference, ids[1]), atol=CLOSE, rtol=0)


def test_only_layers_that_are_named_have_slots(llama, tmp_path, reference):
    run = LoraRun(max_rank=8, num_slots=1, num_host=1, target_modules=("q_proj", "down_proj"))
    _, field = with_slots(llama, run=run)
    names = {name.rpartition(".")[2] for name in field._slots}
    assert names == {"qkv_proj", "down_proj"}
    other = make_adapter(tmp_path / "other", reference, ("up_proj",))
    with pytest.raises(ConfigError, match=r"up_proj': no layer of this run takes it; .*down_proj"):
        field.host._reader.read(other)
    wrong = LoraRun(max_rank=8, num_slots=1, num_host=1, target_modules=("c_attn",))
    with pytest.raises(ConfigError, match="names c_attn: this model has no such"):
        with_slots(llama, run=wrong)


def test_a_stage_has_slots_for_its_own_layers_and_reads_what_is_theirs(llama, tmp_path, reference):
    path = make_adapter(tmp_path / "one", reference)
    _, whole = with_slots(llama, path)
    stages = [load_model(llama, RankMesh.place(number, MeshShape(pp=2))) for number in range(2)]
    messages = []
    for stage in stages:
        with_slots(llama, model=stage, gather=lambda own: messages.append(own) or [own])
    readers, halves = [], []
    for stage in stages:
        _, field = with_slots(llama, path, model=stage, gather=lambda own: messages)
        readers.append(field.host._reader)
        halves.append(readers[-1].read(path).layers)
        assert set(halves[-1]) == set(field._slots)
    assert not set(halves[0]) & set(halves[1])
    assert set(halves[0]) | set(halves[1]) == set(whole._slots)
    outside = tmp_path / "outside"
    names = ("model.embed_tokens", "model.layers.1.mlp.experts.0.up_proj")
    for name, why in zip(names, ("embeddings and the head", "experts"), strict=True):
        a, b = (torch.zeros(shape) for shape in ((4, 64), (64, 4)))
        prefix = f"base_model.model.{name}"
        tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        write_adapter(outside, tensors, ("up_proj",), rank=4, alpha=4.0)
        for reader in readers:
            with pytest.raises(ConfigError, match=f"{why} take no adapters"):
                reader.read(outside)


def test_known_adapters_say_which_layers_have_slots(llama, tmp_path, reference):
    path = make_adapter(tmp_path / "one", reference, ("v_proj", "o_proj"))
    known = (Adapter(id="1", name="one", path=str(path)),)
    _, field = with_slots(llama, run=LoraRun(max_rank=8, num_slots=1, num_host=1, adapters=known))
    assert {name.rpartition(".")[2] for name in field._slots} == {"qkv_proj", "o_proj"}
    field.start()
    assert field.host.num_kept == 1
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        with_slots(
            llama, run=LoraRun(max_rank=8, num_slots=1, num_host=1, adapters=known, may_load=True)
        )[1].start()


REFUSED = {
    "bias": ({"bias": "all"}, "bias is all: biases of adapters"),
    "dora": ({"use_dora": True}, "use_dora is True: DoRA is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3', only LORA"),
    "rank": ({"r": 0}, "r is 0, it must be 1"),
    "large rank": ({"r": 9}, "has rank 9, at most 8 are taken; raise lora_config.max_lora_rank"),
    "other rank": ({"r": 5}, "adapter_config.json says rank 5"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
    "pattern": ({"rank_pattern": {"(a+)+b": 3}}, "no regular expressions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_name(tmp_path, llama, reference, name):
    fields, message = REFUSED[name]
    folder = make_adapter(tmp_path / "one", reference)
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _, field = with_slots(llama)
    with pytest.raises(ConfigError, match=message):
        field.host._reader.read(folder)


TENSORS = {
    "embed_tokens.lora_embedding_A": "embeddings take no adapters",
    "lm_head.lora_A.weight": "embeddings and the head take no adapters",
    "model.layers.0.mlp.experts.3.up_proj.lora_A.weight": "experts take no adapters",
    "model.layers.0.self_attn.rotary.lora_A.weight": "no layer of this run takes it",
    "model.layers.0.mlp.up_proj.lora_magnitude_vector": "not known",
    "model.layers.9.mlp.up_proj.lora_A.weight": "no layer of this run takes it",
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_no_layer_takes_are_refused_by_name(tmp_path, llama, reference, name):
    folder = make_adapter(tmp_path / "one", reference, ("q_proj",))
    file = folder / "adapter_model.safetensors"
    added = {f"base_model.model.{name}": torch.zeros(4, 64)}
    if ".lora_A." in name:
        added[f"base_model.model.{name.replace('lora_A', 'lora_B')}"] = torch.zeros(64, 4)
    save_file(load_file(file) | added, file)
    _, field = with_slots(llama)
    with pytest.raises(ConfigError, match=re.escape(TENSORS[name])):
        field.host._reader.read(folder)


def test_one_of_another_model_is_refused(tmp_path, llama):
    other = reference_model(make_checkpoint(tmp_path / "other", "llama", intermediate_size=80))
    folder = make_adapter(tmp_path / "one", other)
    _, field = with_slots(llama)
    with pytest.raises(ConfigError, match=r"matrix of \[64, 80\].*made for another model"):
        field.host._reader.read(folder)


def test_host_memory_keeps_those_used_last_and_those_that_are_needed(tmp_path, llama, reference):
    adapters = [
        Adapter(id=str(i), name=str(i), path=str(make_adapter(tmp_path / str(i), reference)))
        for i in range(6)
    ]
    _, field = with_slots(llama)
    host = field.host
    for one in adapters[:4]:
        host.prepare(one)
    host.prepare(adapters[0])
    host.prepare(adapters[4], ["1"])  # 2 goes, which was used before 3 and 0
    assert list(host._kept) == ["1", "3", "0", "4"]
    again = host.get(adapters[0])
    assert host.get(adapters[0]) is again and host.num_kept == 4
