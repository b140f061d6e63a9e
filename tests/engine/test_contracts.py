"""The contracts on the real runner: each plan is checked by the fake device as in
`tests/unit/core/test_loop.py`, and what the runner has in its rows is what that one has."""

from dataclasses import dataclass

import numpy as np
import pytest
from fake_executor import STATE, FakeExecutor
from local_engine import LocalEngine
from tiny_models import make_checkpoint

from penstock.core.kv.groups import CacheGroup, StateGroup
from penstock.core.kv.invariants import check
from penstock.types.request import FinishReason

KINDS = {"llama": {}, "gpt_oss": {"sliding_window": 24}, "deepseek_v3": {}, "qwen3_next": {}}
BLOCK = 8
COMMON = dict(dtype="float32", device="cpu", max_seq_len=96, seed=1, max_num_tokens=24)
ROOMY = {"tokens_per_block": BLOCK, "enable_block_reuse": False}
# Two sequences of 60 tokens do not fit together; some wait in host memory.
TIGHT = {"max_tokens": 11 * BLOCK, "tokens_per_block": BLOCK, "host_cache_size": 1 << 22}
SHARED = [3, 4, 5, 6] * 5
PROMPTS = [[*SHARED, 9, 8, 7], [*SHARED[:13], 2, 2], SHARED * 2, [(7 * i) % 50 for i in range(21)]]
# The last two repeat themselves: n-grams are right always, and now and then.
SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.4},
    {"logit_bias": {6: 100.0}},
    {"temperature": 1.0, "seed": 2, "logit_bias": {6: 9.0, 4: 9.0}},
]
MAX_TOKENS = 20


def _window(group: CacheGroup) -> int | None:
    return STATE if isinstance(group, StateGroup) else getattr(group, "_window", None)


class Checked(FakeExecutor):
    """In the place of an engine's executor, which it asks to run what it has checked."""

    def __init__(self, engine: LocalEngine) -> None:
        self.executor = engine.loop._executor
        self.device_rows = self.executor._runner._rows
        groups = engine.engine.scheduler._kvs[0].groups
        super().__init__(1, BLOCK, windows=[_window(group) for group in groups])

    def forward(self, plan):
        super().forward(plan)
        self.executor.forward(plan)

    def sample(self, step_id, late):
        (plan,) = self.forwarded
        self.result = self.executor.sample(step_id, late).wait()
        handle = super().sample(step_id, late)
        self._compare(plan)
        handle.result = self.result
        return handle

    def _draw(self, plan, i, row, drafted, masks):
        return self.result.token_ids[i, : self.result.num_accepted[i]].tolist()

    def _draft(self, plan, i, row):
        return [token for token in self.result.draft_ids[i].tolist() if token >= 0]

    def _compare(self, plan) -> None:
        real = self.device_rows
        for i, number in enumerate(plan.rows.tolist()):
            row = self.rows[0][number]
            assert real.lengths_R[number] == row.length
            for group, table in row.tables.items():
                blocks = [table[index] for index in range(len(table))]
                assert real.block_tables[group][number, : len(blocks)].tolist() == blocks
            if plan.num_logit_rows[i]:
                assert real.last_tokens_R[number] == row.text[-1]
                assert [d for d in real.drafts_RK[number].tolist() if d >= 0] == row.drafts


@dataclass
class Asked:
    output: list[int]  # of the request alone
    was_aborted: bool = False


class Traffic:
    """An engine without room under requests that come, wait, leave and share prefixes."""

    def __init__(self, folder, depth: int) -> None:
        self.engine = LocalEngine(
            folder, **COMMON, max_batch_size=4, kv_cache_config=TIGHT,
            speculative_config={"decoding_type": "NGram", "max_draft_len": 3,
                                "adaptive_draft_len": False},
            scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
            disable_overlap_scheduler=depth == 1,
        )  # fmt: skip
        alone = LocalEngine(folder, **COMMON, max_batch_size=1, kv_cache_config=ROOMY)
        self.outputs = {
            (p, s): alone.generate([prompt], MAX_TOKENS, **sampling)[0]
            for p, prompt in enumerate(PROMPTS)
            for s, sampling in enumerate(SAMPLINGS)
        }
        self.device = self.engine.loop._executor = Checked(self.engine)

    def run(self, seed: int) -> dict[int, Asked]:
        rng, asked = np.random.default_rng(seed), dict[int, Asked]()
        for _ in range(60):
            match rng.choice(["submit", "turn", "abort"], p=[0.35, 0.6, 0.05]):
                case "submit":
                    p, s = int(rng.integers(len(PROMPTS))), int(rng.integers(len(SAMPLINGS)))
                    num_tokens = int(rng.integers(1, MAX_TOKENS + 1))
                    rid = self.engine.submit(PROMPTS[p], num_tokens, **SAMPLINGS[s])
                    asked[rid] = Asked(self.outputs[p, s][:num_tokens])
                case "abort" if asked:
                    rid = int(rng.choice(list(asked)))
                    asked[rid].was_aborted = True
                    self.engine.abort(rid)
                case _:
                    self.turn()
        while self.engine.inbox or self.engine.engine.scheduler.has_work or self.engine.loop._steps:
            self.turn()
        return asked

    def turn(self) -> None:
        self.engine.turn()
        scheduler = self.engine.engine.scheduler
        for kv in scheduler._kvs:
            check(kv, [seq.holder for seq in scheduler.running])


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    extra = {"max_position_embeddings": 256} | KINDS[request.param]
    return make_checkpoint(folder, request.param, **extra) or folder


@pytest.mark.parametrize("depth", [1, 2])
def test_any_traffic_keeps_the_promises_and_gives_the_tokens_of_a_request_alone(folder, depth):
    traffic = Traffic(folder, depth)
    counters = traffic.engine.counters
    for seed in range(2):
        for rid, one in traffic.run(seed).items():
            tokens = traffic.engine.tokens(rid)
            (end,) = [delta.finish for delta in traffic.engine.deltas[rid] if delta.finish]
            if end is FinishReason.ABORT:
                assert one.was_aborted and tokens == one.output[: len(tokens)]
            else:
                assert tokens == one.output
    assert counters.preemptions and counters.swapped_in_blocks
    assert counters.drafted_tokens > counters.accepted_tokens > 0 < counters.prefix_hit_tokens
    scheduler = traffic.engine.engine.scheduler
    assert all(kv.num_held == 0 for kv in scheduler._kvs)
    assert all(group.pool.num_quarantined == 0 for kv in scheduler._kvs for group in kv.groups)
