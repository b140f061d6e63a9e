"""A step of decodes and prompts as graphs capture it, padded and built on the device, gives the
same as alone and leaves the same behind.

There is no capture without a GPU: what would be captured runs anew for each replay.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_engine import run_config
from graph_steps import BLOCK, Repeats, blocks_each, make_runner, plan_of
from local_engine import LocalEngine
from tiny_models import make_checkpoint

from penstock.runtime import capture
from penstock.runtime.capture import capture_graphs
from penstock.runtime.graphs import DecodeGraphs
from penstock.runtime.mixed_graphs import MixedGraphs
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.step_layout import StepShape
from penstock.runtime.timeline import Timeline
from penstock.types.step import LateInputs, PeerLoads, RanAs, StepLoad

ARCHITECTURES = (
    *("llama", "gpt_oss", "qwen3_next", "deepseek_v3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "llama4_text", "glm4_moe", "phi3"),
)
SHAPES = [StepShape(*sizes) for sizes in ((7, 48), (0, 32), (4, 16), (0, 16), (2, 8))]
LENGTHS = {0: 20, 1: 21, 2: 5, 3: 11, 4: 3, 5: 3, 6: 30}
# (row, first token, end); behind a row's text they are decodes.
STEPS = [
    [(0, 0, 16)],  # as large as its graph
    [(2, 0, 5), (1, 0, 7), (0, 16, 20)],  # one that does not sample yet
    [(0, 20, 21), (1, 7, 15)],  # a decode beside a chunk behind a cached prefix; neither fills up
    [(0, 21, 22), (2, 5, 6), (1, 15, 21), (3, 0, 9)],  # middle and last chunks, fresh and not
    [(0, 22, 23), (1, 21, 22), (2, 6, 7), (3, 9, 11), (4, 0, 3), (5, 0, 3)],
    [(0, 23, 24), (1, 22, 23), (2, 7, 8), (3, 11, 12), (6, 0, 25)],  # one that does not sample
    [(row, start, start + 1) for row, start in ((0, 24), (1, 23), (2, 8), (3, 12), (4, 3))],
    [(0, 25, 26), (6, 25, 30)],
]


def with_graphs(runner: ModelRunner, max_prefix: int | None = None) -> MixedGraphs:
    graphs = MixedGraphs(
        lambda shape: runner.padded_step(shape, 64),
        SHAPES[:2],
        SHAPES[2:],
        runner._rows,
        Repeats(),
        runner._model.shortened,
        max_prefix,
    )
    graphs.capture()
    while graphs.capture_next():
        pass
    runner._mixed_graphs = graphs
    return graphs


def texts(lengths: dict[int, int]) -> dict[int, np.ndarray]:
    random = np.random.default_rng(0)
    return {row: random.integers(3, 90, num, np.int32) for row, num in lengths.items()}


def assert_same_state(one: ModelRunner, other: ModelRunner) -> None:
    """Rows but the padding one, and cache blocks but block 0, whose content is nobody's."""
    assert torch.equal(one._rows.lengths_R, other._rows.lengths_R)
    assert torch.equal(one._rows.last_tokens_R, other._rows.last_tokens_R)
    for layer, same in zip(one._model.cache_layers(), other._model.cache_layers(), strict=True):
        wanted, found = (
            getattr(own, "planes", None) or (own.conv_SPF, own.state_SVKD) for own in (layer, same)
        )
        for want, got in zip(wanted, found, strict=True):
            torch.testing.assert_close(got[1:], want[1:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_steps_give_the_same_logits_and_leave_the_same_state(architecture, tmp_path):
    make_checkpoint(tmp_path, architecture)
    plain, padded = make_runner(tmp_path), make_runner(tmp_path)
    plain._cpu_graphs = padded._cpu_graphs = None
    with_graphs(padded)
    text = texts(LENGTHS)
    for number, parts in enumerate(STEPS):
        plan = plan_of(number, text, parts, blocks_each(plain))
        for runner in (plain, padded):
            runner.forward(plan)
        want, got = plain._forwarded[number], padded._forwarded[number]
        has_prompts = plan.num_decodes < plan.num_entries
        assert got.ran_as is (RanAs.GRAPH if has_prompts else RanAs.EAGER)
        assert np.array_equal(want.rows, got.rows)
        assert torch.equal(want.rows_L, got.rows_L) and torch.equal(want.kv_lens_L, got.kv_lens_L)
        if len(want.rows):
            torch.testing.assert_close(got.logits_LV, want.logits_LV, atol=1e-5, rtol=1e-5)
        results = [runner.sample(number, LateInputs()).wait() for runner in (plain, padded)]
        assert np.array_equal(*(result.token_ids for result in results))
        assert results[1].ran_as is got.ran_as
        assert_same_state(plain, padded)


def test_what_no_graph_has_room_for_runs_without_one(tmp_path):
    make_checkpoint(tmp_path, "llama")
    runner = make_runner(tmp_path)
    graphs = with_graphs(runner, max_prefix=16)
    text = texts({row: 40 for row in range(8)} | {8: 1})

    def fits(*parts: tuple[int, int, int]) -> bool:
        return graphs.fits(plan_of(0, text, list(parts), blocks_each(runner)).load)

    decodes = [(row, 40, 41) for row in range(7)]
    assert fits(*decodes, (7, 0, 40)) and not fits(*decodes, (8, 1, 2), (7, 0, 40))
    assert fits((7, 0, 32)) and not fits((7, 0, 33))  # without decodes
    assert fits((0, 40, 41), (7, 16, 20)) and not fits((0, 40, 41), (7, 17, 20))
    assert not fits((0, 40, 42), (7, 0, 8))  # a decode of two tokens
    sixteen = {row: np.ones(2, np.int32) for row in range(16)}
    chunks = [(row, 0, 1) for row in range(16)]
    assert graphs.fits(plan_of(0, sixteen, chunks[:15], [1]).load)
    assert not graphs.fits(plan_of(0, sixteen, chunks, [1]).load)


def test_prompt_logprobs_come_from_a_step_without_a_graph(tmp_path):
    make_checkpoint(tmp_path, "llama")
    runner = make_runner(tmp_path)
    with_graphs(runner)
    text = texts({0: 6, 1: 6})
    asked = plan_of(0, text, [(0, 0, 6)], blocks_each(runner), prompt_logprobs=1)
    runner.forward(asked)
    result = runner.sample(0, LateInputs()).wait()
    assert result.ran_as is RanAs.EAGER and len(result.prompt_logprobs[0].token_ids) == 5
    runner.forward(plan_of(1, text, [(0, 6, 7), (1, 0, 6)], blocks_each(runner)))  # decodes by now
    assert runner.sample(1, LateInputs()).wait().ran_as is RanAs.GRAPH


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "deepseek_v3"])
def test_an_engine_gives_the_same_tokens_with_mixed_steps_in_graphs(architecture, tmp_path):
    make_checkpoint(tmp_path, architecture)
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 90, num).tolist() for num in (3, 30, 9, 1, 17, 40)]
    outputs = []
    for has_graphs in (False, True):
        engine = LocalEngine(
            tmp_path, device="cpu", dtype="float32", attn_backend="reference", max_batch_size=7,
            max_num_tokens=48, max_seq_len=64,
            scheduler_config={"max_prompt_tokens_beside_decodes": 12},
            kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": 1024},
        )  # fmt: skip
        runner = engine.runner
        runner._cpu_graphs = None
        if has_graphs:
            with_graphs(runner)
        ids = []
        for prompt in prompts:  # each comes while those before it decode
            ids.append(engine.submit(prompt, 12))
            engine.turn()
            engine.turn()
        engine.run()
        outputs.append([engine.tokens(rid) for rid in ids])
        counted = engine.counters
        ran = (counted.mixed_graph_steps, counted.mixed_eager_steps)
        assert (min(ran), max(ran) > 5) == (0, True) and (ran[0] > 0) == has_graphs
        assert counted.prefill_graph_steps + counted.mixed_graph_steps == counted.graph_replays
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_rank_that_is_asked_to_captures_mixes_in_place_of_prompts(
    architecture, tmp_path, monkeypatch, caplog
):
    """As on a GPU, but for the pool."""
    make_checkpoint(tmp_path, architecture)
    runner = make_runner(tmp_path)
    monkeypatch.setattr(capture, "GraphPool", Repeats)
    kept = [3 << 30]  # what torch has of steps before, until it is given back
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)

    def mem_get_info() -> tuple[int, int]:
        of_graphs = 0 if runner._mixed_graphs is None else 1 << 29
        return (10 << 30) - sum(kept) - of_graphs, 100 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    config = run_config(
        max_batch_size=8, graph_batch_sizes=(1, 8), graph_token_sizes=(16,),
        graph_mixes=((8, 32),), graph_mixes_when_idle=((4, 16), (2, 8)),
    )  # fmt: skip
    model, rows, timeline = runner._model, runner._rows, Timeline()
    with caplog.at_level("INFO"):
        capture_graphs(runner, rows, model, config, 64, 1 << 30, timeline)
    assert "graphs took 0.50 GiB, 1.00 GiB were planned" in caplog.text
    assert timeline.phases[-1][0] == "capture 4 graphs"
    graphs = runner._mixed_graphs
    assert list(graphs._captured) == [StepShape(0, 16), StepShape(8, 32)]
    assert [runner.when_idle() for _ in range(4)] == [True, False, False, False]
    assert list(graphs._captured) == [
        StepShape(2, 8), StepShape(0, 16), StepShape(4, 16), StepShape(8, 32)
    ]  # fmt: skip
    assert graphs._max_prefix == (4096 if architecture == "deepseek_v3" else None)
    text = texts({0: 5, 1: 5})
    for number, parts in enumerate(([(0, 0, 5)], [(0, 5, 6), (1, 0, 5)], [(0, 6, 7), (1, 5, 6)])):
        runner.forward(plan_of(number, text, parts, blocks_each(runner)))
        assert runner.sample(number, LateInputs()).wait().ran_as is RanAs.GRAPH

    without = make_runner(tmp_path)  # not asked: prompts alone
    config = replace(config, graph_mixes=(), graph_mixes_when_idle=())
    capture_graphs(without, without._rows, without._model, config, 64, 0, timeline)
    assert list(without._mixed_graphs._captured) == [StepShape(0, 16)]
    without.when_idle()
    assert list(without._mixed_graphs._captured) == [StepShape(0, 16)]


def test_data_parallel_ranks_replay_the_graph_of_the_busiest(tmp_path):
    """Whatever a rank has of a step itself: as much as another one, less, other things, nothing."""
    make_checkpoint(tmp_path, "llama")
    plain, padded = make_runner(tmp_path), make_runner(tmp_path)
    text = texts(LENGTHS)
    with_graphs(padded)
    padded._graphs = DecodeGraphs(padded.decode_step(64), (2, 4), True, padded._rows)
    padded._graphs.capture(Repeats())
    seen = []
    mixed = {shape: kinds[False] for shape, kinds in padded._mixed_graphs._captured.items()}
    decodes = {size: captured for (size, _), captured in padded._graphs._captured.items()}
    for shape, captured in {**mixed, **decodes}.items():
        replay = captured.replay
        captured.replay = lambda x, shape=shape, replay=replay: (seen.append(shape), replay(x))[1]
    none = np.zeros(0, np.int32)
    steps = [  # own parts; (decodes, chunks, prompt tokens) of the busiest rank; its graph
        ([(0, 0, 20), (2, 0, 5)], (0, 3, 30), StepShape(0, 32)),
        ([(0, 20, 21), (2, 5, 6)], (4, 0, 0), 4),
        ([(0, 21, 22), (2, 6, 7)], (3, 1, 12), StepShape(4, 16)),  # a prompt elsewhere
        ([(3, 0, 11)], (4, 1, 11), StepShape(4, 16)),  # decodes elsewhere
        ([], (1, 0, 0), 2),
        ([], (0, 1, 5), StepShape(0, 16)),
        ([(0, 22, 23), (3, 11, 12)], (4, 0, 0), 4),
    ]
    for number, (parts, (num_decodes, num_chunks, num_tokens), _) in enumerate(steps):
        plan = plan_of(number, text, parts or [(0, 0, 1)], blocks_each(plain))
        if parts:
            plain.forward(plan)
        else:
            plan = replace(
                plan, joins=(), rows=none, starts=none, num_tokens=none, num_logit_rows=none,
                growth=replace(plan.growth, groups=none), max_kv_lens=none, num_decodes=0,
            )  # fmt: skip
        most = StepLoad(
            num_decodes=num_decodes, num_chunks=num_chunks, num_prompt_tokens=num_tokens,
            longest_prefix=0, is_eager=False,
        )  # fmt: skip
        padded.forward(
            replace(plan, peers=PeerLoads(num_tokens=(1, 1), num_sampling=(1, 1), most=most))
        )
        got = padded.sample(number, LateInputs()).wait()
        assert got.ran_as is RanAs.GRAPH and len(got.token_ids) == len(parts)
        if parts:
            assert np.array_equal(
                got.token_ids, plain.sample(number, LateInputs()).wait().token_ids
            )
    assert seen == [graph for _, _, graph in steps]
    assert torch.equal(plain._rows.lengths_R, padded._rows.lengths_R)
