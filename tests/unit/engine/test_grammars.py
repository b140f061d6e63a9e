"""The matchers of an engine: compiled aside, shared, bounded, and where their time is up."""

import json
import random
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLParserLimits

from penstock.config.schema import EngineConfig
from penstock.core.followers import LateEntry
from penstock.engine import grammars, vocabulary
from penstock.engine.grammars import Grammars, _Lexer
from penstock.engine.vocabulary import make_executor
from penstock.errors import RequestError
from penstock.hub.folder import local_folder
from penstock.models.spec import parse_model_spec
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import Grammar, Request, ThinkingBudget
from penstock.types.sampling import SamplingParams

TINY = EngineConfig(model="tiny")
SPEC = parse_model_spec(local_folder("tiny"))


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


def entry(request: Request, position: int = 0, *drafts: int, is_void: bool = False) -> LateEntry:
    return LateEntry(request, position, [*drafts], is_void)


def wait(held: Grammars, *requests: Request) -> None:
    while not all([held.ready(one) for one in requests]):
        time.sleep(0)  # until other threads have compiled them


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_masks_name_the_logit_rows_of_requests_that_have_matchers():
    held = Grammars(TINY, SPEC)
    first, second = request(1, 'start: "a"'), request(2, 'start: "b"')
    wait(held, first, second)
    late = held.late_inputs([entry(first, 1), entry(request(9, 'start: "c"'), 2)])
    assert late.positions.tolist() == [1]
    assert late.bitmasks.shape == (1, -(-SPEC.vocab_size // 32))
    late = held.late_inputs([entry(second, 2), entry(first, 3)])
    assert late.positions.tolist() == [2, 3]
    token_b, token_a = (allowed(words) for words in late.bitmasks)
    assert len(token_a) == len(token_b) == 1 and token_a != token_b
    assert held.on_commit(first, [*token_a]) is None
    late = held.late_inputs([entry(first), entry(second, 1)])
    assert allowed(late.bitmasks[0]) == set(SPEC.eos_token_ids)
    assert allowed(late.bitmasks[1]) == token_b
    assert "the grammar cannot go on" in held.on_commit(second, [*token_a])
    held.on_close(first)
    assert held.late_inputs([entry(first)]).positions.tolist() == []
    held.on_close(second)
    assert held.num_matchers == 0


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_object_may_have_as_many_optional_properties_as_the_documentation_says(in_parts):
    named = {f"field_{i}": {"type": "string"} for i in range(1024)}
    schema = {"type": "object", "properties": named, "additionalProperties": False}
    if in_parts:
        first, second = dict(list(named.items())[:512]), dict(list(named.items())[512:])
        schema = {"anyOf": [{**schema, "properties": first}, {**schema, "properties": second}]}
    held = Grammars(TINY, SPEC)
    one = request(1, json.dumps({"grammars": [{"json_schema": schema}]}))
    wait(held, one)
    chance = random.Random(0)
    for _ in range(30):
        words = held.late_inputs([entry(one)]).bitmasks[0]
        ids = sorted(allowed(words) - set(SPEC.eos_token_ids))
        if not ids:
            break
        assert held.on_commit(one, [chance.choice(ids)]) is None


@pytest.mark.parametrize("num_threads", [None, 2])
def test_a_request_that_uses_up_the_lexer_breaks_no_other(monkeypatch, num_threads):
    """Copies of a matcher share the states of its lexer, whose number is bounded."""
    few = LLParserLimits(max_lexer_states=300, initial_lexer_fuel=2_000_000)
    monkeypatch.setattr(vocabulary, "limits_of", lambda grammar: few)
    held = Grammars(TINY, SPEC)
    held._executor = num_threads and make_executor(num_threads)
    text = "start: /[ab]*a[ab]{12}c/ | /d[ab]*/"  # the first part has 2 ** 12 states
    greedy, modest = request(1, text), request(2, text)
    wait(held, greedy, modest)
    tokens = sorted(allowed(held.late_inputs([entry(greedy)]).bitmasks[0]))
    tokenizer = Tokenizer.from_folder(local_folder("tiny"))
    a, b, d = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "abd")
    assert {a, b, d} <= {*tokens}
    assert held.on_commit(modest, [d]) is None
    rng, broken = random.Random(0), None
    for _ in range(400):
        if broken is None:
            broken = held.on_commit(greedy, [rng.choice([a, b])])
        entries = [entry(modest)] if broken else [entry(greedy, 1), entry(modest)]
        assert a in allowed(held.late_inputs(entries).bitmasks[-1])
        assert held.on_commit(modest, [rng.choice([a, b])]) is None
    assert "too many states" in broken
    later = request(3, text)
    wait(held, later)
    assert sorted(allowed(held.late_inputs([entry(later)]).bitmasks[0])) == tokens


def test_many_rows_of_one_grammar_have_several_lexers(monkeypatch):
    """Masks of rows with one lexer are made one after the other: a lock of the library."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    held, text = Grammars(TINY, SPEC), 'start: "a" /[bc]{3}/'
    few, more = ([request(number, text) for number in some] for some in (range(8), range(8, 30)))
    wait(held, *few)
    assert len(held._compiled[text]) == 1
    wait(held, *more)
    assert [one.num_users for one in held._compiled[text]] == [15, 15]
    assert held._executor is not None
    masks = held.late_inputs([entry(one, one.id) for one in (*few, *more)])
    assert masks.positions.tolist() == [*range(30)]
    assert len({mask.tobytes() for mask in masks.bitmasks}) == 1
    for one in (*few, *more):
        held.on_close(one)
    assert [one.num_users for one in held._compiled[text]] == [0, 0]


def test_a_grammar_that_gets_another_lexer_is_the_last_to_be_forgotten(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(grammars, "_MAX_COMPILED_CHARS", 20)
    held, old, new = Grammars(TINY, SPEC), 'start: "a"', 'start: "b"'
    wait(held, *(request(number, old) for number in range(8)), request(8, new))
    wait(held, request(9, old), request(10, old))
    assert [*held._compiled] == [old] and held._num_chars == 2 * len(old)


def test_several_tokens_may_be_committed_at_once():
    held, one = Grammars(TINY, SPEC), request(1, "start: /[ab]{4}/")
    wait(held, one)
    tokens = sorted(allowed(held.late_inputs([entry(one)]).bitmasks[0]))
    assert held.on_commit(one, [tokens[0]]) is None
    late = held.late_inputs([entry(one)])
    assert held.on_commit(one, [min(allowed(late.bitmasks[0])), *SPEC.eos_token_ids]) is None


@pytest.mark.parametrize("num_threads", [None, 2])
def test_the_mask_behind_drafts_is_the_one_that_comes_when_they_are_committed(num_threads):
    """One entry, and several, whose masks threads make."""
    held = Grammars(TINY, SPEC)
    held._executor = num_threads and make_executor(num_threads)
    grammar = Grammar(text="start: /[ab]{4}[0-9]{0,3}/", min_tokens=5)
    rng = random.Random(3)
    requests = [replace(request(number, ""), grammar=grammar) for number in range(4)]
    wait(held, *requests)
    texts = {one.id: [] for one in requests}

    def masks(entries) -> dict[int, set[int]]:
        late = held.late_inputs(entries)
        return dict(zip(late.positions.tolist(), map(allowed, late.bitmasks), strict=True))

    for one in requests:  # what comes, by the mask of one token at a time
        while not texts[one.id] or texts[one.id][-1] not in SPEC.eos_token_ids:
            [choices] = masks([entry(one)]).values()
            texts[one.id].append(rng.choice(sorted(choices)))
            assert held.on_commit(one, texts[one.id][-1:]) is None
        held.on_close(one)
    for size in (1, 2, 3):
        again = [replace(one, id=10 * size + one.id) for one in requests]
        wait(held, *again)
        firsts = range(2, 100, 5)
        drafts = [texts[one.id % 10][:size] for one in again]
        drafts[1] = [*drafts[1][:-1], 7]  # forbidden: nothing counts behind it
        drafts[2] = drafts[2] * (size < 3)  # some have none
        entries = [entry(one, at) for one, at in zip(again, firsts, strict=False)]
        drafted = zip(again, firsts, drafts, strict=False)
        ahead = masks([entry(one, at, *ids) for one, at, ids in drafted])
        num_rows = [1 + size, size, 1 + size * (size < 3), 1 + size]
        places = [range(at, at + num) for at, num in zip(firsts, num_rows, strict=False)]
        assert [*ahead] == [at for own in places for at in own]
        for offset in range(1 + size):
            for at, mask in masks(entries).items():
                assert ahead.get(at + offset, mask) == mask
            for one, ids in zip(again, drafts, strict=True):
                if ids[offset:] and ids[offset] != 7:
                    assert held.on_commit(one, [ids[offset]]) is None


def test_behind_the_end_of_an_output_nothing_counts():
    held, one = Grammars(TINY, SPEC), request(1, 'start: "a" "7"?')
    wait(held, one)
    [a] = allowed(held.late_inputs([entry(one)]).bitmasks[0])
    late = held.late_inputs([entry(one, 0, a, *SPEC.eos_token_ids, a)])
    assert late.positions.tolist() == [0, 1] and set(SPEC.eos_token_ids) < allowed(late.bitmasks[1])


def test_no_draft_is_kept_in_the_place_of_tokens_that_are_known():
    held, one = Grammars(TINY, SPEC), request(1, 'start: "ab"')
    wait(held, one)
    assert not len(held.late_inputs([entry(one, 3, is_void=True)]).positions)
    late = held.late_inputs([entry(one, 3, 8, 9, is_void=True)])
    assert late.positions.tolist() == [3]
    assert {*range(SPEC.vocab_size)} - allowed(late.bitmasks[0]) == {8}


def test_a_budget_is_kept_behind_drafts():
    opening, closing, word = (40,), (41,), 50
    budget = ThinkingBudget(
        num_tokens=2, is_open=True, opening=opening, closing=closing, ending=(60, 41)
    )
    held = Grammars(TINY, SPEC)
    one = replace(request(1, ""), grammar=None, thinking=budget)
    wait(held, one)
    late = held.late_inputs([entry(one, 0, word, word, 60, 41)])
    assert late.positions.tolist() == [2, 3]
    assert [allowed(words) for words in late.bitmasks] == [{60}, {41}]
    late = held.late_inputs([entry(one, 0, word, word, 41)])  # not yet
    assert late.positions.tolist() == [2] and allowed(late.bitmasks[0]) == {60}
    assert held.on_commit(one, [word, word]) is None
    assert held.late_inputs([entry(one, 5)]).positions.tolist() == [5]


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(grammars, "_MAX_COMPILED", 2)
    held = Grammars(TINY, SPEC)
    wait(held, *(request(number, f'start: "{number % 3}"') for number in range(9)))
    assert len(held._compiled) == 2 and held.num_matchers == 9
    assert held._num_chars == sum(map(len, held._compiled))


def test_a_grammar_that_takes_too_long_ends_its_request():
    now = [0.0]
    held, one = Grammars(TINY, SPEC, clock=lambda: now[0]), request(1, 'start: "a"')
    held._compiled[one.grammar.text] = [_Lexer(0, Future())]  # nobody works on it
    assert not held.ready(one)
    now[0] = 31.0
    with pytest.raises(RequestError, match="within 30 s"):
        held.ready(one)
    held.on_close(one)
    assert held._waiting == {}
