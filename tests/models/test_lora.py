"""Adapters in PEFT's layout: logits are those of transformers with the adapter merged by hand."""

import pytest
import torch
from fp8_models import make_fp8_checkpoint
from lora_models import ALL, make_adapter, merge
from paged_driver import CPU, load_model, mixed_run, prompts
from tiny_models import make_checkpoint, reference_model
from weight_only_models import make_weight_only_checkpoint

from penstock.config.run import LoraRun
from penstock.models.spec import parse_model_spec
from penstock.quantization.choose import choose_schemes
from penstock.runtime.adapters import AdapterField
from penstock.types.adapter import Adapter, AdapterInSlot
from penstock.types.sampling import SamplingParams
from penstock.types.step import RowJoin

CLOSE = 2e-4
RUN = LoraRun(max_rank=8, num_slots=3, num_host=4)


def with_slots(folder, *adapters, run=RUN, model=None):
    """The model with these adapters in its first slots."""
    model = model or load_model(folder, finished=True)
    field = AdapterField(run, model, max_rows=4, device=CPU)
    for slot, path in enumerate(adapters):
        hold(field, slot, path)
    return model, field


def hold(field, slot, path, row=0):
    import numpy as np

    adapter = Adapter(id=str(path), name=path.name, path=str(path))
    field.join(
        [
            RowJoin(
                request_id=1, dp_rank=0, row=row, token_ids=np.zeros(1, np.int32), num_computed=0,
                num_prompt=1, sampling=SamplingParams(), stop_ids=(),
                adapter=AdapterInSlot(adapter=adapter, slot=slot),
            )
        ]
    )  # fmt: skip


@torch.no_grad()
def expected(reference, ids, adapter):
    if adapter is None:
        return reference(torch.tensor([ids])).logits[0]
    merge(reference, adapter)
    logits = reference(torch.tensor([ids])).logits[0]
    merge(reference, adapter, -1.0)
    return logits


ARCHS = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "phi3": {},
    "glm4": {},
}
MODULES = {"phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
MODULES["glm4"] = (*ALL[:4], "gate_up_proj", "down_proj")


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
        theirs = expected(reference, ids, adapter)
        torch.testing.assert_close(logits, theirs, atol=CLOSE, rtol=0)
    plain = expected(reference, sequences[0], None)
    assert (found[0] - plain).abs().max() > 0.1  # it does make a difference


@pytest.mark.parametrize("kind", ["fp8", "awq", "gptq", "nf4"])
def test_quantized_bases_add_the_adapter_to_their_output(tmp_path, kind):
    if kind == "fp8":
        folder = make_fp8_checkpoint(tmp_path / "model", "llama", "channel")
    else:
        folder = make_weight_only_checkpoint(tmp_path / "model", kind)
    spec = parse_model_spec(folder)
    schemes = choose_schemes(spec.quantization, folder, torch.float32, CPU)
    base = load_model(folder, schemes=schemes)
    plain_model = reference_model(make_checkpoint(tmp_path / "plain", "llama"))
    adapter = make_adapter(tmp_path / "one", plain_model, seed=1)
    sequences = prompts(500)
    plain = mixed_run(base, sequences)
    with_adapter, field = with_slots(folder, adapter, model=base)
    found = mixed_run(with_adapter, sequences, adapter_slots=[0, -1, 0, -1])
    torch.testing.assert_close(found[1], plain[1], atol=1e-3, rtol=0)
