"""Drafted tokens change nothing but the number of steps: same tokens with and without, on every
kind of model and cache, whatever is right or wrong in the drafts."""

import numpy as np
import pytest
import torch
from graph_steps import Repeats
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from tiny_models import make_checkpoint

from penstock.ipc.messages import Submit
from penstock.runtime.graphs import DecodeGraphs
from penstock.types.request import FinishReason, Request, request_id
from penstock.types.sampling import SamplingParams

MAX_DRAFTS = 3
KINDS = {
    "llama": {},
    "gpt_oss": {"sliding_window": 24},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "qwen3_next": {},
}
PROMPTS = [[3, 4, 5, 6] * 5, [(7 * i) % 50 + 3 for i in range(25)]]
SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 1, "logprob_token_ids": [9, 4, 30]},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.7, "seed": 3, "logit_bias": {9: 4.0, 4: -3.0}, "frequency_penalty": 1.0},
]
REQUESTS = [(PROMPTS[i % 2], sampling) for i, sampling in enumerate(SAMPLINGS + SAMPLINGS[:2])]
# 8 blocks of 8 tokens: two sequences of 41 do not fit together, prompts come in chunks.
TIGHT = {"max_tokens": 8 * 8, "tokens_per_block": 8, "host_cache_size": 1 << 22}
COMMON = dict(
    dtype="float32", device="cpu", max_seq_len=96, seed=1, max_batch_size=5, max_num_tokens=24,
    kv_cache_config=TIGHT, scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
)  # fmt: skip
NUM_TOKENS = 16
FIXED = {"adaptive_draft_len": False}


class ScriptedDrafter:
    """Drafts what will come, and spoils some of it: `spoil` says of a position how many tokens to
    draft behind it and how many of them are right."""

    max_drafts = MAX_DRAFTS

    def __init__(self, outputs: list[list[int]]) -> None:
        self.texts = [
            [*prompt, *output] for (prompt, _), output in zip(REQUESTS, outputs, strict=True)
        ]
        self.of_request: dict[int, list[int]] = {}
        self.rows: dict[int, list[int]] = {}
        self.spoil = lambda position: (MAX_DRAFTS, MAX_DRAFTS)

    def join(self, joins) -> None:
        for join in joins:
            self.rows[join.row] = self.of_request[join.request_id]

    def draft(self, step):
        drafts_NK = np.full((len(step.rows_N), MAX_DRAFTS), -1)
        ends_N = (step.indices_N + step.num_accepted_N).tolist()
        for i, (row, end) in enumerate(zip(step.rows_N.tolist(), ends_N, strict=True)):
            assert end <= step.max_kv_len + 1
            count, num_right = self.spoil(end)
            following = self.rows[row][end : end + count]
            spoiled = [t + (j >= num_right) for j, t in enumerate(following)]
            drafts_NK[i, : len(spoiled)] = spoiled
        return torch.from_numpy(drafts_NK)


class Drafting:
    """An engine whose drafts are scripted, and what the same engine says without any."""

    def __init__(self, folder, depth: int) -> None:
        overlap = {"disable_overlap_scheduler": depth == 1}
        plain = LocalEngine(folder, **COMMON, **overlap)
        # To the digits that another shape of a GEMM leaves.
        self.expected = self.run(plain, about=lambda x: pytest.approx(x, abs=1e-4))
        self.outputs = [[token_id for token_id, *_ in one] for one in self.expected]
        config = {"decoding_type": "NGram", "max_draft_len": MAX_DRAFTS, **FIXED}
        self.engine = LocalEngine(folder, speculative_config=config, **COMMON, **overlap)
        self.runner = self.engine.runner
        self.by_ngrams, self.scripted = self.runner.drafting.drafter, ScriptedDrafter(self.outputs)

    def run(self, engine, drafter=None, about=float):
        ids = [engine.submit(prompt, NUM_TOKENS, **sampling) for prompt, sampling in REQUESTS]
        if drafter is not None:
            drafter.of_request |= dict(zip(ids, drafter.texts, strict=True))
        engine.run()
        return [list(tokens_of(engine, rid, about)) for rid in ids]

    def drafted(self, drafter):
        self.runner.drafting.drafter = drafter
        return self.run(self.engine, drafter if drafter is self.scripted else None)


def tokens_of(engine, rid, about):
    """Each with what was asked about it."""
    for delta in engine.deltas[rid]:
        if not delta.logprobs:
            yield from ((token_id,) for token_id in delta.token_ids)
        for one in delta.logprobs:
            top = [token_id for token_id, _ in one.top]
            yield one.token_id, one.rank, about(one.logprob), top


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    extra = {"max_position_embeddings": 256} | KINDS[request.param]
    return make_checkpoint(folder, request.param, **extra) or folder


@pytest.fixture(scope="module")
def synchronous(kind):
    return Drafting(kind, depth=1)


@pytest.fixture(scope="module")
def overlapped(kind):
    return Drafting(kind, depth=2)


@pytest.fixture(params=["synchronous", "overlapped"])
def drafting(kind, request):
    return request.getfixturevalue(request.param)


def test_right_drafts_give_the_same_tokens_in_fewer_steps(drafting):
    counters = drafting.engine.counters
    before, decodes = counters.accepted_tokens, counters.decodes
    drafting.scripted.spoil = lambda position: (MAX_DRAFTS, MAX_DRAFTS)
    assert drafting.drafted(drafting.scripted) == drafting.expected
    accepted, decodes = counters.accepted_tokens - before, counters.decodes - decodes
    assert accepted > 0.4 * len(REQUESTS) * NUM_TOKENS
    assert 0 < decodes < 0.6 * len(REQUESTS) * NUM_TOKENS
    assert counters.preemptions > 0, "the cache was to run out"


def test_steps_with_drafts_replay_decode_graphs(overlapped):
    """By a stand-in for a pool of graphs that runs anew what would be replayed."""
    runner, scripted, ran = overlapped.runner, overlapped.scripted, []
    graphs = DecodeGraphs(runner.decode_step(COMMON["max_seq_len"]), (2, 6, 12), True, runner._rows)
    step = runner.decode_step(COMMON["max_seq_len"], is_plain=True)
    plain = DecodeGraphs(step, (4, 8), True, runner._rows, is_plain=True)
    for kind in (graphs, plain):
        kind.capture(Repeats())
        kind.replay = lambda link, rows, *asked, kind=kind, replay=kind.replay: (
            ran.append((kind, asked[0] is not None)) or replay(link, rows, *asked)
        )
    scripted.spoil = lambda position: (position % (MAX_DRAFTS + 1), position % 3)
    runner.use_graphs(graphs, None, plain)
    try:
        assert overlapped.drafted(scripted) == overlapped.expected
    finally:
        runner.use_graphs(None, None)
    assert (
        {(plain, False), (graphs, True)}
        <= set(ran)
        <= {(plain, False), (graphs, True), (graphs, False)}
    )


def test_drafts_of_ngrams_give_the_same_tokens(synchronous):
    before = synchronous.engine.counters.drafted_tokens
    assert synchronous.drafted(synchronous.by_ngrams) == synchronous.expected
    assert synchronous.engine.counters.drafted_tokens > before


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_pattern_of_right_and_wrong_drafts_spoils_cache_or_state(overlapped, seed):
    rng = np.random.default_rng(seed)
    script = rng.integers(0, MAX_DRAFTS + 1, (COMMON["max_seq_len"] + 1, 2))
    overlapped.scripted.spoil = lambda position: script[position]
    assert overlapped.drafted(overlapped.scripted) == overlapped.expected


def test_an_abort_in_the_middle_leaves_the_others_alone(overlapped):
    drafting = overlapped
    drafting.scripted.spoil = lambda position: (position % (MAX_DRAFTS + 1), position % 3)
    drafting.runner.drafting.drafter = drafting.scripted
    engine, texts = drafting.engine, drafting.scripted.texts
    ids = [engine.submit(prompt, NUM_TOKENS, **sampling) for prompt, sampling in REQUESTS[:6]]
    drafting.scripted.of_request |= dict(zip(ids, texts, strict=False))
    for _ in range(7):
        engine.turn()
    engine.abort(ids[0], ids[4])
    engine.run()
    for rid, output in zip(ids, drafting.outputs, strict=False):
        tokens = engine.tokens(rid)
        assert tokens == (output[: len(tokens)] if rid in (ids[0], ids[4]) else output)


@pytest.mark.parametrize("depth", [1, 2])
def test_output_that_repeats_itself_takes_few_steps(tmp_path, depth):
    make_checkpoint(tmp_path, "llama", max_position_embeddings=256)
    engine = LocalEngine(
        tmp_path, speculative_config={"decoding_type": "ngram", **FIXED}, **COMMON,
        disable_overlap_scheduler=depth == 1,
    )  # fmt: skip
    (tokens,) = engine.generate([[3, 4, 5]], 60, logit_bias={6: 100.0})
    assert tokens == [6] * 60
    counters = engine.counters
    assert counters.generated_tokens / counters.steps > 1.5
    assert counters.accepted_tokens > 0.8 * counters.drafted_tokens
    (last,) = [delta for delta in engine.deltas.popitem()[1] if delta.finish]
    assert 60 / last.num_steps > 1.5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_id_within_an_accepted_run_is_the_last_token(tmp_path, depth):
    make_checkpoint(tmp_path, "llama", max_position_embeddings=256)
    drafting = Drafting(tmp_path, depth)
    drafting.runner.drafting.drafter = drafting.scripted
    engine, requests = drafting.engine, []
    for n, ((prompt, sampling), output) in enumerate(zip(REQUESTS, drafting.outputs, strict=True)):
        asked = SamplingParams(**({"temperature": 0.0} | sampling))
        request = Request(
            id=request_id(2, n), prompt_ids=tuple(prompt), sampling=asked, max_tokens=NUM_TOKENS,
            stop_ids=(output[6],),
        )  # fmt: skip
        drafting.scripted.of_request[request.id] = drafting.scripted.texts[n]
        requests.append(request)
    engine.inbox.append(Submit(requests=tuple(requests)))
    engine.run()
    for request, output in zip(requests, drafting.outputs, strict=True):
        assert engine.tokens(request.id) == output[: output.index(output[6]) + 1]
        assert engine.deltas[request.id][-1].finish is FinishReason.STOP
    assert engine.counters.accepted_tokens > 2 * len(REQUESTS)


def test_with_more_sequences_than_max_concurrency_nothing_is_drafted(tmp_path):
    make_checkpoint(tmp_path, "llama", max_position_embeddings=256)
    config = {"decoding_type": "NGram", "max_concurrency": 2, **FIXED}
    engine = LocalEngine(tmp_path, speculative_config=config, **COMMON)
    engine.generate([[3, 4, 5]] * 3, 12, logit_bias={6: 100.0})
    assert engine.counters.accepted_tokens == 0
    engine.generate([[3, 4, 5]] * 2, 12, logit_bias={6: 100.0})
    assert engine.counters.accepted_tokens > 10
