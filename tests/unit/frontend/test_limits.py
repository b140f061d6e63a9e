"""What a request may ask of an engine, and what becomes of it."""

import itertools

import pytest
from fake_engine import make_info

from penstock.errors import RequestError
from penstock.frontend.limits import MAX_STOP_STRING_CHARS, make_requests
from penstock.types.pooling import Pooling, Task
from penstock.types.request import GenerateInput
from penstock.types.sampling import SamplingParams

INFO = make_info(max_seq_len=10, max_num_tokens=8, vocab_size=100, eos_token_ids=(2, 3))


def requests_of(ids=(5, 6, 7), info=INFO, eos_ids=(2, 9), **changes):
    input_fields = {
        name: changes.pop(name)
        for name in ("truncate_prompt_tokens", "cache_salt", "priority", "pooling")
        if name in changes
    }
    ask = GenerateInput(token_ids=ids, sampling=SamplingParams(**changes), **input_fields)
    return make_requests(ask, ids, info, eos_ids, itertools.count(100).__next__)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"ids": ()}, "invalid_value", "empty"),
        ({"ids": (5, 100)}, "invalid_value", "token id 100.*0..99"),
        ({"ids": (-1,)}, "invalid_value", "token id -1"),
        (
            {"ids": (1,) * 10},
            "context_length_exceeded",
            "10 tokens.*at most 9.*max_seq_len 10.*raise",
        ),
        ({"logit_bias": {100: 1.0}}, "invalid_value", "logit_bias holds token id 100"),
        ({"stop_token_ids": (100,)}, "invalid_value", "stop_token_ids holds"),
        ({"stop": ("x" * (MAX_STOP_STRING_CHARS + 1),)}, "invalid_value", "stop string has 1025"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "at least 1"),
    ],
)
def test_wrong_requests_are_refused_with_value_and_limit(changes, code, words):
    with pytest.raises(RequestError, match=words) as caught:
        requests_of(**changes)
    assert caught.value.code == code


def test_text_and_vectors_are_asked_of_models_that_are_served_for_them():
    embeds = make_info(task=Task.EMBED)
    [request] = requests_of(info=embeds, pooling=Pooling(), max_tokens=1)
    assert request.pooling == Pooling()
    with pytest.raises(RequestError, match="served to embed"):
        requests_of(info=embeds)
    with pytest.raises(RequestError, match="served to generate"):
        requests_of(pooling=Pooling(), max_tokens=1)


def test_long_prompt_needs_chunked_prefill():
    whole = make_info(max_seq_len=10, max_num_tokens=4, vocab_size=100, chunked_prefill=False)
    chunked = make_info(max_seq_len=10, max_num_tokens=4, vocab_size=100, chunked_prefill=True)
    assert requests_of((1,) * 4, info=whole)
    assert requests_of((1,) * 5, info=chunked)
    with pytest.raises(RequestError, match=r"max_num_tokens 4.*enable_chunked_prefill"):
        requests_of((1,) * 5, info=whole)


def test_more_samples_than_the_queue_holds_are_refused():
    with pytest.raises(RequestError, match="3 samples asked, at most 2"):
        requests_of(info=make_info(max_queued=2), n=3)


@pytest.mark.parametrize(("asked", "expected"), [(None, 7), (3, 3), (7, 7), (8, 7)])
def test_max_tokens_is_clamped_to_the_room_left(asked, expected):
    [request] = requests_of(max_tokens=asked)
    assert request.max_tokens == expected


def test_truncation_keeps_the_last_tokens_and_makes_a_long_prompt_fit():
    [request] = requests_of(tuple(range(50)), truncate_prompt_tokens=4)
    assert request.prompt_ids.tolist() == [46, 47, 48, 49]
    assert request.max_tokens == 6


def test_stop_ids_are_eos_of_model_and_tokenizer_and_the_asked_ones():
    assert requests_of(stop_token_ids=(7, 3))[0].stop_ids == (2, 3, 9, 7)
    assert requests_of(stop_token_ids=(7,), ignore_eos=True)[0].stop_ids == (7,)


def test_samples_share_a_leader_and_have_their_own_seeds():
    first, *others = requests_of(n=3, seed=5, prompt_logprobs=1, stop=("x",), cache_salt="me")
    assert first.leader is None
    assert [one.leader for one in others] == [first.id, first.id]
    assert len({first.id, *(one.id for one in others)}) == 3
    assert [one.sampling.seed for one in (first, *others)] == [5, 6, 7]
    assert [one.sampling.prompt_logprobs for one in (first, *others)] == [1, None, None]
    assert {(one.sampling.n, one.sampling.stop, one.cache_keys) for one in (first, *others)} == {
        (1, (), ("me",))
    }


def test_the_largest_seed_has_a_successor():
    assert requests_of(n=2, seed=2**63 - 1)[1].sampling.seed == -(2**63)


def test_ranking_samples_needs_their_logprobs():
    assert requests_of(n=1, best_of=2)[0].sampling.logprobs == 0
    assert requests_of(n=2)[0].sampling.logprobs is None
