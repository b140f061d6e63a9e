"""What is kept beside the core per request: told every committed token once, and the end once."""

from collections import Counter, defaultdict

import pytest
from core_engine import PROMPT, Engine
from fake_executor import oracle

from penstock.errors import RequestError
from penstock.ipc.messages import Abort
from penstock.types.request import FinishReason


class Noting:
    def __init__(self, fails_at: int | None = None) -> None:
        self.tokens = defaultdict(list)
        self.closed = Counter()
        self.sizes = set()
        self._fails_at = fails_at

    def on_commit(self, request, token_ids):
        assert not self.closed[request.id]
        self.tokens[request.id] += token_ids
        self.sizes.add(len(token_ids))
        too_many = self._fails_at is not None and len(self.tokens[request.id]) >= self._fails_at
        return "it has had enough" if too_many else None

    def known_tokens(self, request):
        return ()

    def on_close(self, request):
        self.closed[request.id] += 1


@pytest.mark.parametrize("drafts", [None, lambda text: (2, len(text) % 3)], ids=["", "drafted"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_commits_add_up_to_the_output_through_preemptions(depth, drafts):
    engine = Engine(depth=depth, num_blocks=13, drafts=drafts)
    noting = Noting()
    engine.scheduler.add_follower(noting)
    prompts = [tuple(range(i, i + 7)) for i in range(5)]
    ids = [engine.submit(prompt, max_tokens=14, late_inputs=True) for prompt in prompts]
    other = engine.submit(PROMPT, max_tokens=5)
    engine.run_dry()
    assert engine.counters.preemptions > 0
    for rid, prompt in zip(ids, prompts, strict=True):
        assert noting.tokens[rid] == engine.tokens[rid] == oracle(prompt, 14)
    assert noting.closed == dict.fromkeys(ids, 1) and other not in noting.tokens
    assert noting.sizes == ({1, 2, 3} if drafts else {1})


def test_aborted_requests_are_closed_wherever_they_are():
    engine, noting = Engine(depth=2, max_batch_size=1), Noting()
    engine.scheduler.add_follower(noting)
    running, waiting = (engine.submit(PROMPT, max_tokens=9, late_inputs=True) for _ in range(2))
    for _ in range(4):
        engine.turn()
    engine.inbox.append(Abort(request_ids=(running, waiting)))
    engine.run_dry()
    assert noting.closed == {running: 1, waiting: 1}
    engine.assert_empty()


def test_a_follower_may_fail_its_request_alone():
    engine, noting = Engine(depth=2), Noting(fails_at=3)
    engine.scheduler.add_follower(noting)
    rid = engine.submit(PROMPT, max_tokens=9, late_inputs=True)
    other = engine.submit(PROMPT, max_tokens=9)
    engine.run_dry()
    assert engine.ends[rid] == [FinishReason.ERROR] and noting.closed[rid] == 1
    assert engine.tokens[rid] == oracle(PROMPT, 2)
    assert engine.tokens[other] == oracle(PROMPT, 9)
    engine.assert_empty()


def test_a_gate_holds_one_request_back_and_may_end_it():
    class Slow:
        def __init__(self) -> None:
            self.num_asked = 0

        def ready(self, request):
            if not request.late_inputs:
                return True
            self.num_asked += 1
            if self.num_asked > 5:
                raise RequestError("invalid_value", "it never will be")
            return False

    engine, noting = Engine(depth=1), Noting()
    engine.scheduler.add_gate(Slow())
    engine.scheduler.add_follower(noting)
    held = engine.submit(PROMPT, max_tokens=3, late_inputs=True)
    other = engine.submit(PROMPT, max_tokens=3)
    engine.run_dry()
    assert engine.tokens[other] == oracle(PROMPT, 3)
    assert engine.ends[held] == [FinishReason.ERROR] and noting.closed[held] == 1
    engine.assert_empty()
