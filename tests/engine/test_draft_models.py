"""Drafts of MTP and Eagle3 heads and of small models: what transformers' layers and torch say,
behind every kind of step; and the same tokens with and without."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_models import (
    HEADS,
    Eagle3Reference,
    ModelReference,
    MTPReference,
    make_eagle3_checkpoint,
    make_mtp_checkpoint,
)
from graph_steps import Repeats, mixed_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from tiny_models import make_checkpoint

from penstock.errors import ConfigError
from penstock.runtime.draft_graphs import TokenGraphs
from penstock.runtime.graphs import DecodeGraphs
from penstock.runtime.model_drafter import ModelDrafter
from penstock.types.step import (
    FROM_DEVICE,
    BlockGrowth,
    LateInputs,
    PeerLoads,
    RanAs,
    StepLoad,
    StepPlan,
)

MAX_DRAFTS = 3
PROMPTS = [
    [(7 * i + 5 * n) % 50 + 3 for i in range(length)] for n, length in enumerate((25, 19, 30))
]
SAMPLINGS = [{}, {"temperature": 0.9, "seed": 1}, {"repetition_penalty": 1.5}]
NUM_TOKENS = 16
FIXED = {"max_draft_len": MAX_DRAFTS, "adaptive_draft_len": False}
# 8 blocks of 8 tokens: two sequences of 41 do not fit together, prompts come in chunks.
TIGHT = {"max_tokens": 8 * 8, "tokens_per_block": 8, "host_cache_size": 1 << 22}
REUSED = {"max_tokens": 256, "tokens_per_block": 8, "mamba_state_cache_interval": 8}
COMMON = dict(
    dtype="float32", device="cpu", max_seq_len=96, seed=1, max_batch_size=5, max_num_tokens=24,
    scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"}, attn_backend="reference",
)  # fmt: skip


class Watched:
    """What is drafted, with some put in their place: `script` says of a position how many tokens
    are right, -1: as it was drafted."""

    reads_steps, max_drafts = True, MAX_DRAFTS

    def __init__(self, drafter) -> None:
        self.drafter = drafter
        self.of_request: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.first: list[tuple[int, int, int]] = []  # request, tokens before it, the first draft
        self.script = lambda position: -1

    def join(self, joins) -> None:
        self.rows |= {join.row: join.request_id for join in joins}
        self.drafter.join(joins)

    def draft(self, step):
        drafts_NK = self.drafter.draft(step)
        ends_N = (step.indices_N + step.num_accepted_N).tolist()
        for i, (row, end) in enumerate(zip(step.rows_N.tolist(), ends_N, strict=True)):
            request = self.rows[row]
            self.first.append((request, end, int(drafts_NK[i, 0])))
            if (num_right := self.script(end)) >= 0:
                right = self.of_request[request][end : end + MAX_DRAFTS]
                spoiled = [t + (j >= num_right) for j, t in enumerate(right)]
                drafts_NK[i] = torch.tensor([*spoiled, *[-1] * (MAX_DRAFTS - len(right))])
        return drafts_NK


class Spy:
    reads_steps, max_drafts = True, MAX_DRAFTS

    def __init__(self, drafter, seen: list) -> None:
        self.draft = lambda step: (seen.append(step), drafter.draft(step))[1]
        self.join = drafter.join


class Counted:
    def __init__(self, graphs, note) -> None:
        self.graphs, self.fits, self.note = graphs, graphs.fits, note

    def __call__(self, *inputs):
        self.note()
        return self.graphs(*inputs)

    def again(self, count):
        self.note()
        return self.graphs.again(count)


class Drafting:
    def __init__(self, folder: Path, reference, **asked) -> None:
        self.reference, self.asked = reference, FIXED | asked
        cache = TIGHT | {"enable_block_reuse": False}  # a reused block's last key may be another's
        settings = COMMON | {"kv_cache_config": cache, "disable_overlap_scheduler": False}
        plain = LocalEngine(folder, **settings)
        self.expected = [tokens for _, tokens in self.run(plain)]
        self.engine = LocalEngine(folder, speculative_config=self.asked, **settings)
        self.runner = self.engine.runner
        self.watched = self.runner.drafting.drafter = Watched(self.runner.drafting.drafter)

    def run(self, engine) -> list[tuple[int, list[int]]]:
        ids = [engine.submit(p, NUM_TOKENS, **s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
        if engine is not getattr(self, "engine", None):
            engine.run()
            return [(rid, engine.tokens(rid)) for rid in ids]
        texts = [p + e for p, e in zip(PROMPTS, self.expected, strict=True)]
        self.watched.of_request = dict(zip(ids, texts, strict=True))
        self.watched.first.clear()
        engine.run()
        return [(rid, engine.tokens(rid)) for rid in ids]

    def check(self) -> None:
        """Tokens are those without drafts, and first drafts those of the reference."""
        found = self.run(self.engine)
        assert [tokens for _, tokens in found] == self.expected
        texts = self.watched.of_request.items()
        logits = {request: self.reference.first_drafts(text) for request, text in texts}
        num_seen = 0
        for request, end, draft in self.watched.first:
            if end in logits[request] and draft >= 0:
                row = logits[request][end]
                assert row.max() - row[draft] < 1e-3, (request, end)
                num_seen += 1
        assert num_seen > NUM_TOKENS


@pytest.fixture(scope="module", params=[*HEADS, "eagle3", "draft_target"])
def drafting(request, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    if kind in HEADS:
        make_mtp_checkpoint(folder, kind, max_position_embeddings=256)
        return Drafting(folder, MTPReference(folder, kind), decoding_type="MTP")
    if kind == "eagle3":
        make_checkpoint(folder, "llama", num_hidden_layers=5, max_position_embeddings=256)
        head = make_eagle3_checkpoint(folder / "head", 543)
        reference, asked = (
            Eagle3Reference(head, folder, (0, 2, 3)),
            {"speculative_model": str(head)},
        )
        asked |= {"decoding_type": "eagle_3", "eagle3_layers_to_capture": [0, 2, 3]}
        return Drafting(folder, reference, **asked)
    # Heads of another size than the model's, which is of windows and full attention.
    make_checkpoint(folder, "gpt_oss", sliding_window=24, max_position_embeddings=256)
    draft = make_checkpoint(folder / "draft", "llama", seed=3, max_position_embeddings=256)
    asked = {"decoding_type": "DraftTarget", "speculative_model_dir": str(draft)}
    return Drafting(folder, ModelReference(draft), **asked)


def test_drafts_are_what_transformers_layers_say(drafting):
    drafting.watched.script = lambda position: -1
    drafting.check()
    counters = drafting.engine.counters
    assert counters.preemptions > 0 and counters.drafted_tokens > 3 * NUM_TOKENS


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_pattern_of_right_and_wrong_drafts_spoils_their_cache(drafting, seed):
    script = np.random.default_rng(seed).integers(0, MAX_DRAFTS + 1, COMMON["max_seq_len"] + 1)
    before = drafting.engine.counters.accepted_tokens
    drafting.watched.script = lambda position: int(script[position])
    drafting.check()
    assert drafting.engine.counters.accepted_tokens > before


def test_steps_replay_graphs_and_drafts_follow_from_their_hidden_states(drafting):
    """By a stand-in for a pool of graphs that runs anew what would be replayed."""
    runner, ran = drafting.runner, []
    decodes = DecodeGraphs(runner.decode_step(96), (2, 6, 12), True, runner._rows)
    decodes.capture(Repeats())
    prompts = mixed_graphs(runner, 96)
    for graphs in (decodes, prompts):
        replay = graphs.replay
        graphs.replay = lambda *args, replay=replay: ran.append(args) or replay(*args)
    drafter, calls = drafting.watched.drafter, []
    drafter.capture(Repeats(), (2, 6, 12), True, 96)
    names = [name for name, one in vars(drafter).items() if isinstance(one, TokenGraphs)]
    for name in names:
        call = getattr(drafter, name)
        setattr(drafter, name, Counted(call, lambda name=name: calls.append(name)))
    drafting.watched.script = lambda position: position % 4 - 1
    runner.use_graphs(decodes, prompts)
    try:
        drafting.check()
    finally:
        runner._graphs = runner._mixed_graphs = None
        for name in names:
            setattr(drafter, name, None)
    assert len(ran) > 10 and len(names) == 2 and min(map(calls.count, names)) > 5


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_data_parallel_rank_without_sequences_drafts_with_the_others(drafting, graphs):
    """For a padding token, as often as they do: its layers are theirs, too."""
    runner, drafter, seen = drafting.runner, drafting.watched.drafter, []
    if graphs:
        decodes = DecodeGraphs(runner.decode_step(96), (2,), True, runner._rows)
        decodes.capture(Repeats())
        runner.use_graphs(decodes, mixed_graphs(runner, 96))
    none, ran, behind = np.zeros(0, np.int32), [], runner._rows.batch_at
    empty = dict.fromkeys(("dp_ranks", "groups", "rows", "indices", "block_ids"), none)
    idle = StepPlan(
        step_id=-1, joins=(), cache_ops=(), growth=BlockGrowth(**empty),
        dp_ranks=none, rows=none, starts=none, num_tokens=none, num_logit_rows=none,
        max_kv_lens=none, num_decodes=0, needs_late_inputs=False, max_drafts=MAX_DRAFTS,
    )  # fmt: skip
    runner.drafting.drafter = Spy(drafter, seen)
    runner._rows.batch_at = lambda *args, **kwargs: (
        ran.append(found := behind(*args, **kwargs)) or found
    )
    loads = [StepLoad(num_decodes=2, num_chunks=n, num_prompt_tokens=5 * n, longest_prefix=0,
                      is_eager=False) for n in (0, 1)]  # fmt: skip
    try:
        for num_sampling in (2, 0):
            for load in loads:
                peers = PeerLoads(num_tokens=(1, 7), num_sampling=(0, num_sampling), most=load)
                runner.forward(replace(idle, peers=peers))
                ran.clear()
                got = runner.sample(idle.step_id, LateInputs()).wait()
                assert got.ran_as is (RanAs.GRAPH if graphs else RanAs.EAGER)
                step = seen.pop()
                assert step.fed.batch.num_tokens == 1 and step.fed.batch.rank_tokens == (1, 7)
                further = MAX_DRAFTS - (not isinstance(drafter, ModelDrafter))
                assert len(ran) == (further if num_sampling else 0)
                assert all(batch.rank_tokens == (1, 2) for batch in ran)
    finally:
        runner.drafting.drafter, runner._rows.batch_at = drafting.watched, behind
        runner._graphs = runner._mixed_graphs = None


def test_drafts_beside_prompts_replay_graphs(drafting):
    """The same stand-in, and a cache with room for all."""
    folder = drafting.engine.engine.config.model_path
    engine = LocalEngine(
        folder, speculative_config=drafting.asked, **COMMON, kv_cache_config={"max_tokens": 512},
        disable_overlap_scheduler=False,
    )  # fmt: skip
    runner, found = engine.runner, []
    watched = runner.drafting.drafter = Watched(runner.drafting.drafter)
    watched.script = lambda position: position % 4
    decodes = DecodeGraphs(runner.decode_step(96), (12,), True, runner._rows)
    decodes.capture(Repeats())
    mixed = mixed_graphs(runner, 96)
    replay = mixed.replay
    mixed.replay = lambda link, plan, load: (
        found.append(int(plan.starts.min())) or replay(link, plan, load)
    )
    runner.use_graphs(decodes, mixed)
    asked = list(zip(PROMPTS, SAMPLINGS, drafting.expected, strict=True))
    for prompt, sampling, expected in asked * 2:
        rid = engine.submit(prompt, NUM_TOKENS, **sampling)
        watched.of_request[rid] = prompt + expected
        for _ in range(6):  # those before have begun to decode
            engine.turn()
    engine.run()
    ids = list(watched.of_request)
    assert [engine.tokens(rid) for rid in ids] == [expected for *_, expected in asked * 2]
    assert min(found) < FROM_DEVICE, "no step had drafts and prompts"


def test_nothing_is_drafted_beyond_the_longest_sequence(drafting):
    """Positions have no rotation there, though the last block has room."""
    folder, limits = drafting.engine.engine.config.model_path, COMMON | {"max_seq_len": 50}
    engines = [
        LocalEngine(folder, speculative_config=asked, **limits, kv_cache_config=REUSED)
        for asked in (None, drafting.asked | {"max_draft_len": 6})
    ]
    runner, seen = engines[1].runner, []
    positions = runner._rows.batch_at
    runner._rows.batch_at = lambda *args, **kwargs: (
        seen.append(batch := positions(*args, **kwargs)) or batch
    )
    plain, drafted = (engine.generate(PROMPTS[:1], 25) for engine in engines)
    assert plain == drafted and len(plain[0]) == 25
    most = max(int(batch.positions_T.max()) for batch in seen)
    assert 48 <= most < 51  # one step in flight may write one beyond the end


def test_a_reused_prefix_changes_no_token(drafting):
    drafting.watched.script = lambda position: -1
    folder = drafting.engine.engine.config.model_path
    plain, heads = (
        LocalEngine(folder, speculative_config=asked, **COMMON, kv_cache_config=REUSED)
        for asked in (None, drafting.asked)
    )
    begun = [*PROMPTS[2][:24], 9, 9]
    for prompt in (PROMPTS[2], begun, begun):
        assert heads.generate([prompt], NUM_TOKENS) == plain.generate([prompt], NUM_TOKENS)
    assert heads.counters.prefix_hit_tokens > 0


def test_a_model_that_drafts_for_itself_is_right_nearly_always(tmp_path):
    make_checkpoint(tmp_path, "llama", max_position_embeddings=256)
    asked = {"decoding_type": "Draft_Target", "speculative_model": str(tmp_path)}
    engine = LocalEngine(tmp_path, speculative_config=FIXED | asked, **COMMON)
    assert len(engine.generate([PROMPTS[0]], 40)[0]) == 40
    counters = engine.counters
    assert counters.accepted_tokens > 0.9 * counters.drafted_tokens > 20


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"decoding_type": "MTP"}, "has no MTP head"),
        ({"decoding_type": "Draft_Target", "speculative_model": "SMALL"}, "vocabulary of 40"),
        ({"decoding_type": "Draft_Target", "speculative_model": "WINDOWS"}, "layers with windows"),
        ({"decoding_type": "Eagle3", "speculative_model": "tiny"}, "heads of one layer run"),
    ],
)
def test_what_cannot_draft_for_a_model_is_refused_by_name(tmp_path, asked, why):
    small = make_checkpoint(
        tmp_path / "SMALL", "llama", vocab_size=40, eos_token_id=1, pad_token_id=0
    )
    windows = make_checkpoint(tmp_path / "WINDOWS", "gpt_oss")
    model = make_checkpoint(tmp_path / "model", "llama")
    names = {"SMALL": str(small), "WINDOWS": str(windows)}
    asked = {key: names.get(value, value) for key, value in asked.items()}
    with pytest.raises(ConfigError, match=why):
        LocalEngine(model, speculative_config=asked, device="cpu", dtype="float32")


def test_the_engine_measures_what_drafts_cost_and_says_the_same(drafting):
    folder, asked = drafting.engine.engine.config.model_path, drafting.asked
    adaptive = LocalEngine(
        folder,
        speculative_config=asked | {"adaptive_draft_len": True},
        **COMMON,
        kv_cache_config=REUSED,
    )
    costs = adaptive.runner.costs
    assert costs.max_drafts == MAX_DRAFTS and costs.decodes[0] == 1
    assert min(costs.plain + costs.drafting + costs.full) > 0
    greedy = adaptive.generate(PROMPTS[:1], NUM_TOKENS)
    assert greedy == drafting.expected[:1]
