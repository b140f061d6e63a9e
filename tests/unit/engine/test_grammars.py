"""The matchers of an engine: compiled aside, shared, bounded, and where their time is up."""

import time
from concurrent.futures import Future

import numpy as np
import pytest

from penstock.config.schema import EngineConfig
from penstock.engine import grammars
from penstock.engine.grammars import Grammars
from penstock.errors import RequestError
from penstock.hub.folder import local_folder
from penstock.models.spec import parse_model_spec
from penstock.types.request import Grammar, Request
from penstock.types.sampling import SamplingParams
from penstock.types.step import BlockGrowth, RowJoin, StepPlan

TINY = EngineConfig(model="tiny")
SPEC = parse_model_spec(local_folder("tiny"))
NONE = np.zeros(0, np.int32)


def request(number: int, text: str, **fields) -> Request:
    return Request(
        id=number,
        prompt_ids=(5, 6),
        sampling=SamplingParams(),
        max_tokens=9,
        late_inputs=True,
        grammar=Grammar(text=text),
        stop_ids=SPEC.eos_token_ids,
        **fields,
    )


def plan(joins: list[tuple[int, int]], rows: list[int], num_logit_rows: list[int]) -> StepPlan:
    """`joins`: (request id, row)."""
    empty = BlockGrowth(dp_ranks=NONE, groups=NONE, rows=NONE, indices=NONE, block_ids=NONE)
    zeros = np.zeros(len(rows), np.int32)
    return StepPlan(
        step_id=0,
        joins=tuple(
            RowJoin(
                request_id=number, dp_rank=0, row=row, token_ids=np.array([5], np.int32),
                num_computed=0, num_prompt=1, sampling=SamplingParams(), stop_ids=(),
            )
            for number, row in joins
        ),
        growth=empty,
        cache_ops=(),
        dp_ranks=zeros,
        rows=np.array(rows, np.int32),
        starts=zeros,
        num_tokens=zeros,
        num_logit_rows=np.array(num_logit_rows, np.int32),
        max_kv_lens=zeros,
        num_decodes=0,
        needs_late_inputs=True,
    )  # fmt: skip


def wait(held: Grammars, *requests: Request) -> None:
    while not all([held.ready(one) for one in requests]):
        time.sleep(0)  # until other threads have compiled them


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_masks_name_the_logit_rows_of_requests_that_have_matchers():
    held = Grammars(TINY, SPEC)
    first, second = request(1, 'start: "a"'), request(2, 'start: "b"')
    wait(held, first, second)
    # rows 3 and 1 are theirs, row 0 is another's; the chunk of row 1 does not reach its end
    late = held.late_inputs(plan([(1, 3), (2, 1), (9, 0)], [0, 3, 1], [1, 1, 0]))
    assert late.positions.tolist() == [1]
    assert late.bitmasks.shape == (1, -(-SPEC.vocab_size // 32))
    late = held.late_inputs(plan([], [0, 3, 1], [2, 1, 1]))
    assert late.positions.tolist() == [2, 3]
    token_a, token_b = (allowed(words) for words in late.bitmasks)
    assert len(token_a) == len(token_b) == 1 and token_a != token_b
    assert held.on_commit(first, [*token_a]) is None
    late = held.late_inputs(plan([(2, 4)], [3, 4], [1, 1]))  # the second has moved
    assert allowed(late.bitmasks[0]) == set(SPEC.eos_token_ids)
    assert allowed(late.bitmasks[1]) == token_b
    assert "left its grammar" in held.on_commit(second, [*token_a])
    held.on_close(first)
    assert held.late_inputs(plan([], [3], [1])).positions.tolist() == []
    held.on_close(second)
    assert held.num_matchers == 0


def test_several_tokens_may_be_committed_at_once():
    held, one = Grammars(TINY, SPEC), request(1, "start: /[ab]{4}/")
    wait(held, one)
    late = held.late_inputs(plan([(1, 0)], [0], [1]))
    tokens = sorted(allowed(late.bitmasks[0]))
    assert held.on_commit(one, [tokens[0]]) is None
    late = held.late_inputs(plan([], [0], [1]))
    assert held.on_commit(one, [min(allowed(late.bitmasks[0])), *SPEC.eos_token_ids]) is None


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(grammars, "_MAX_COMPILED", 2)
    held = Grammars(TINY, SPEC)
    wait(held, *(request(number, f'start: "{number % 3}"') for number in range(9)))
    assert len(held._compiled) == 2 and held.num_matchers == 9
    assert held._num_chars == sum(map(len, held._compiled))


def test_a_grammar_that_takes_too_long_ends_its_request():
    now = [0.0]
    held, one = Grammars(TINY, SPEC, clock=lambda: now[0]), request(1, 'start: "a"')
    held._compiled[one.grammar.text] = Future()  # nobody works on it
    assert not held.ready(one)
    now[0] = 31.0
    with pytest.raises(RequestError, match="within 30 s"):
        held.ready(one)
    held.on_close(one)
    assert held._waiting == {}
