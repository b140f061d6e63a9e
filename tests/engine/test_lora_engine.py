"""Adapters through the whole engine: batches that mix them, prefixes, drafts, few slots, two ranks.
The truth is transformers with the adapter merged by hand. Graphs are stand-ins: what would be
replayed runs anew."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from graph_ranks import use_stand_ins
from graph_steps import Repeats, mixed_graphs
from local_engine import LocalEngine
from lora_models import ALL, make_adapter, merge, write_adapter
from safetensors.torch import load_file
from tiny_models import make_checkpoint, reference_model

from penstock.errors import ConfigError
from penstock.ipc.messages import Submit
from penstock.runtime.graphs import DecodeGraphs
from penstock.types.lora_request import adapter_of
from penstock.types.request import FinishReason, Request, request_id
from penstock.types.sampling import SamplingParams

NUM_TOKENS = 8
PROMPTS = [[3, 4, 5, 6] * 5, [(7 * i) % 50 + 3 for i in range(25)]]
NUM_ADAPTERS = 5
COMMON = dict(
    dtype="float32", device="cpu", max_seq_len=96, seed=1, max_batch_size=6, max_num_tokens=48,
    num_threads=1, kv_cache_config={"tokens_per_block": 8, "max_tokens": 600},
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The model's folder, its adapters, and the greedy tokens of each prompt with each of them."""
    root = tmp_path_factory.mktemp("lora")
    folder = make_checkpoint(root / "model", "llama")
    reference = reference_model(folder)
    paths = [make_adapter(root / f"a{i}", reference, seed=i) for i in range(NUM_ADAPTERS)]
    truth = {}
    for name, path in [(None, None), *((one.name, one) for one in paths)]:
        if path is not None:
            merge(reference, path)
        for number, prompt in enumerate(PROMPTS):
            truth[name, number] = greedy(reference, prompt)
        if path is not None:
            merge(reference, path, -1.0)
    assert len({tuple(tokens) for tokens in truth.values()}) > NUM_ADAPTERS
    return folder, {path.name: path for path in paths}, truth


@torch.no_grad()
def greedy(model, prompt):
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def engine(folder, **settings):
    return LocalEngine(folder, **(COMMON | settings))


def submit(local, serial, prompt, path=None, **further):
    """As `frontend/limits` makes a request of one prompt."""
    adapter = None if path is None else adapter_of(path.name, str(path))
    keys = () if adapter is None else ("adapter", adapter.id, adapter.name)
    request = Request(
        id=request_id(1, 1000 + serial),
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=NUM_TOKENS,
        adapter=adapter,
        cache_keys=keys,
        **further,
    )
    local.inbox.append(Submit(requests=(request,)))
    return request.id


def lora(num_slots=2, **fields):
    return {"lora_config": {"max_loras": num_slots, "max_lora_rank": 8, **fields}}


@pytest.mark.parametrize("num_slots", [1, 2, NUM_ADAPTERS])
def test_every_request_gets_the_tokens_of_its_adapter_however_few_slots_there_are(made, num_slots):
    folder, paths, truth = made
    local = engine(folder, **lora(num_slots))
    names = [None, *paths, *reversed(paths), None]
    asked = {
        submit(local, i, PROMPTS[i % 2], paths.get(name)): (name, i % 2)
        for i, name in enumerate(names)
    }
    local.run()
    for rid, (name, number) in asked.items():
        assert local.tokens(rid) == truth[name, number], name
    assert local.engine.adapters._slots.adapters.count(None) == 0
    assert all(local.engine.adapters._slots.num_pins(slot) == 0 for slot in range(num_slots))


def test_a_prefix_is_shared_only_by_those_with_the_same_adapter(made):
    folder, paths, truth = made
    local = engine(folder, **lora())
    for i, name in enumerate([None, "a0", "a1", "a0", None]):
        rid = submit(local, i, PROMPTS[1], paths.get(name))
        local.run()
        assert local.tokens(rid) == truth[name, 1]
        cached = max(delta.num_cached_tokens for delta in local.deltas[rid])
        assert (cached >= 16) == (i >= 3), name


def test_drafts_are_checked_under_the_adapter(made):
    folder, paths, truth = made
    drafting = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
    local = engine(folder, **lora(), speculative_config=drafting)
    asked = {submit(local, i, PROMPTS[0], paths.get(n)): n for i, n in enumerate((None, *paths))}
    local.run()
    for rid, name in asked.items():
        assert local.tokens(rid) == truth[name, 0]
    assert local.counters.drafted_tokens > 0


def test_preempted_requests_come_back_with_their_adapter(made):
    folder, paths, truth = made
    tight = {"tokens_per_block": 8, "max_tokens": 56, "enable_block_reuse": False}
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    known = lora(lora_dir=[str(paths["a0"])])  # nobody waits until it is read
    local = engine(folder, **known, kv_cache_config=tight, scheduler_config=policy)
    asked = [submit(local, i, PROMPTS[0], paths["a0"]) for i in range(4)]
    local.run()
    assert local.counters.preemptions > 0
    assert [local.tokens(rid) for rid in asked] == [truth["a0", 0]] * 4


def test_steps_without_adapters_do_not_know_of_them(made, monkeypatch):
    """They run as in an engine that has none, on a CPU in a graph."""
    folder, paths, truth = made
    local = engine(folder, **lora())
    seen = []
    model = local.loop._executor._executor._runner._model
    run = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, batch: seen.append(batch.adapters) or run(self, batch),
    )
    rid = submit(local, 0, PROMPTS[0])
    local.run()
    assert local.tokens(rid) == truth[None, 0] and seen and all(one is None for one in seen)
    seen.clear()
    submit(local, 1, PROMPTS[0], paths["a1"])
    local.run()
    assert seen and all(one is not None for one in seen)
    seen.clear()
    submit(local, 2, PROMPTS[1])  # in the row that had one
    local.run()
    assert all(one is None for one in seen)


def test_graphs_of_steps_without_adapters_do_not_run_them(made, monkeypatch):
    """Each size is captured with adapters and without; a step takes the one that it needs."""
    folder, paths, truth = made
    local = engine(folder, **lora())
    runner = local.loop._executor._executor._runner
    graphs = DecodeGraphs(runner.decode_step(COMMON["max_seq_len"]), (1, 4), True, runner._rows)
    graphs.capture(Repeats())
    runner.use_graphs(graphs, mixed_graphs(runner, COMMON["max_seq_len"]))
    seen = []
    for captured in graphs._captured.values():
        monkeypatch.setattr(captured, "step", watched(captured.step, seen))
    for kinds in runner._mixed_graphs._captured.values():
        for captured in kinds.values():
            monkeypatch.setattr(captured, "step", watched(captured.step, seen))
    rid = submit(local, 0, PROMPTS[0])
    local.run()
    assert local.tokens(rid) == truth[None, 0] and len(seen) == NUM_TOKENS and not any(seen)
    both = [submit(local, 1, PROMPTS[0], paths["a1"]), submit(local, 2, PROMPTS[1])]
    local.run()
    assert [local.tokens(one) for one in both] == [truth["a1", 0], truth[None, 1]]
    assert any(seen)
    seen.clear()
    rid = submit(local, 3, PROMPTS[1])  # in a row that had one
    local.run()
    assert local.tokens(rid) == truth[None, 1] and seen and not any(seen)


DP = {"tensor_parallel_size": 2, "enable_attention_dp": True}
SMALL_MODEL = {"decoding_type": "Draft_Target", "max_draft_len": 2, "adaptive_draft_len": False}
RANKS = {
    "tensor-parallel": ({"tensor_parallel_size": 2}, False),
    "stages, in graphs": ({"pipeline_parallel_size": 2}, True),
    "context-parallel": ({"context_parallel_size": 2}, False),
    "data-parallel": (DP, False),
    "data-parallel, in graphs": (DP, True),
    "data-parallel, a small model drafts": (DP | {"speculative_config": SMALL_MODEL}, True),
}


@pytest.mark.parametrize(("sizes", "has_graphs"), RANKS.values(), ids=list(RANKS))
def test_two_ranks_give_the_tokens_of_each_adapter(made, sizes, has_graphs, monkeypatch):
    """With fewer slots than adapters, beside requests without one, without any, and one alone."""
    folder, paths, truth = made
    if has_graphs:
        use_stand_ins(monkeypatch.setattr)
    if drafts := sizes.get("speculative_config"):
        sizes = sizes | {"speculative_config": drafts | {"speculative_model": str(folder)}}
    local = engine(folder, **lora(), **sizes, attn_backend="reference")
    try:
        names = [None, None, *paths, None, *reversed(paths)]
        for first, some in ((0, [None, None]), (2, ["a0"]), (3, names)):
            asked = {
                submit(local, i, PROMPTS[i % 2], paths.get(name)): (name, i % 2)
                for i, name in enumerate(some, first)
            }
            local.run()
            for rid, (name, number) in asked.items():
                assert local.tokens(rid) == truth[name, number], name
        assert (local.counters.graph_replays > 0) == has_graphs
    finally:
        local.engine._ranks.stop()
        with contextlib.suppress(AssertionError):
            dist.destroy_process_group()


def test_an_adapter_that_does_not_fit_another_stage_is_refused_with_the_reason(made, tmp_path):
    folder, paths, truth = made
    tensors = load_file(paths["a0"] / "adapter_model.safetensors")
    name = max(name for name in tensors if name.endswith("o_proj.lora_B.weight"))  # the last layer
    tensors[name] = tensors[name][:-4].contiguous()
    write_adapter(tmp_path / "bad", tensors, ALL, rank=4, alpha=6.0)
    local = engine(folder, **lora(), pipeline_parallel_size=2)
    try:
        bad = submit(local, 0, PROMPTS[0], tmp_path / "bad")
        good = submit(local, 1, PROMPTS[0], paths["a0"])
        local.run()
        [delta] = local.deltas[bad]
        assert delta.finish is FinishReason.ERROR
        module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        assert f"'{module}' changes a matrix of" in delta.error
        assert local.tokens(good) == truth["a0", 0]
    finally:
        local.engine._ranks.stop()
        with contextlib.suppress(AssertionError):
            dist.destroy_process_group()


def watched(step, seen):
    return lambda inputs, has_fields: seen.append(has_fields) or step(inputs, has_fields)


def test_a_folder_that_is_none_ends_its_request_alone(made, tmp_path):
    folder, paths, truth = made
    local = engine(folder, **lora(1))
    bad = submit(local, 0, PROMPTS[0], tmp_path / "nothing")
    good = submit(local, 1, PROMPTS[0], paths["a2"])
    local.run()
    [delta] = local.deltas[bad]
    assert delta.finish is FinishReason.ERROR and "has no adapter_config.json" in delta.error
    assert local.tokens(good) == truth["a2", 0]


def test_aborted_requests_leave_no_slot_pinned(made):
    folder, paths, truth = made
    local = engine(folder, **lora(1))
    first = submit(local, 0, PROMPTS[0], paths["a0"])
    waiting = submit(local, 1, PROMPTS[0], paths["a1"])
    while not local.tokens(first):
        local.turn()
    local.abort(waiting)
    local.abort(first)
    last = submit(local, 2, PROMPTS[1], paths["a2"])
    local.run()
    assert local.tokens(last) == truth["a2", 1]
    assert local.engine.adapters._slots.adapters == (adapter_of("a2", str(paths["a2"])).id,)


def test_an_adapter_of_the_settings_that_cannot_be_used_stops_the_start(made, tmp_path):
    folder, paths, _ = made
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        engine(folder, **lora(lora_dir=[str(tmp_path)]))
    with pytest.raises(ConfigError, match="has rank 4, at most 2"):
        engine(folder, lora_config={"lora_dir": [str(paths["a0"])], "max_lora_rank": 2})
