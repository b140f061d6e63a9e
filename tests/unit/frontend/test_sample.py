"""One sample's tokens become text deltas: coalesced, stopped, cut."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.schema import EngineConfig
from penstock.frontend.sample import Sample
from penstock.frontend.start import load_text_side
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import FinishReason
from penstock.types.sampling import SamplingParams


def feed(tokenizer, ids, interval=1, sizes=(), finish=FinishReason.LENGTH, stop_id=None, **params):
    """Text deltas of a sample that gets `ids` in pieces of `sizes` (then of one)."""
    reading = params.pop("reading", ())
    sample = Sample(0, SamplingParams(**params), tokenizer, interval, *reading)
    ids, sizes, sent = list(ids), list(sizes), []
    while not sample.is_done:
        size = sizes.pop(0) if sizes else 1
        piece, ids = tuple(ids[:size]), ids[size:]
        delta = TokenDelta(
            request_id=0,
            token_ids=piece,
            logprobs=tuple(TokenLogprob(one, -1.0, 1) for one in piece),
            finish=None if ids else finish,
            stop_id=None if ids else stop_id,
        )
        text = sample.push(delta)
        if text is not None:
            sent.append(text)
    return sent


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(1, [1] * 10), (4, [1, 3, 4, 2]), (20, [1, 9]), (None, [10])],
)
def test_first_token_every_interval_and_the_finish_are_sent(tokenizer, interval, expected):
    sent = feed(tokenizer, ids_of(tokenizer, "abcdefghij"), interval)
    assert [len(delta.token_ids) for delta in sent] == expected
    assert "".join(delta.text for delta in sent) == "abcdefghij"
    assert [delta.finish is not None for delta in sent] == [False] * (len(sent) - 1) + [True]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(alphabet="abé🙂 ", max_size=20),
    stop=st.text(alphabet="abé ", min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=10),
    interval=st.none() | st.integers(1, 6),
    include=st.booleans(),
)
def test_stop_string_gives_the_same_text_and_tokens_however_tokens_arrive(
    tokenizer, text, stop, sizes, interval, include
):
    ids = ids_of(tokenizer, text)
    sent = feed(tokenizer, ids, interval, sizes, stop=(stop,), include_stop_str_in_output=include)
    head, found, _ = text.partition(stop)
    assert "".join(delta.text for delta in sent) == (head + found if include else head)
    assert sent[-1].stop_reason == (stop if found else None)
    assert sent[-1].finish is (FinishReason.STOP if found else FinishReason.LENGTH)
    kept = [token_id for delta in sent for token_id in delta.token_ids]
    assert kept == (ids_of(tokenizer, head + found) if found else ids)
    assert [entry.token_id for delta in sent for entry in delta.logprobs] == kept
    assert sum(delta.num_tokens for delta in sent) == len(kept)


def test_stop_string_is_ignored_among_the_first_min_tokens(tokenizer):
    sent = feed(tokenizer, ids_of(tokenizer, "a.b.c"), stop=(".",), min_tokens=3)
    assert "".join(delta.text for delta in sent) == "a.b"


def test_stop_id_is_counted_but_not_part_of_the_output(tokenizer):
    ids = ids_of(tokenizer, "ab.")
    stop = {"finish": FinishReason.STOP, "stop_id": ids[-1]}
    [*_, last] = sent = feed(tokenizer, ids, **stop, stop_token_ids=(ids[-1],))
    assert "".join(delta.text for delta in sent) == "ab"
    assert sum(len(delta.token_ids) for delta in sent) == 2
    assert sum(delta.num_tokens for delta in sent) == 3
    assert last.stop_reason == ids[-1]
    assert last.stop_logprob.token_id == ids[-1]
    assert [entry.token_id for delta in sent for entry in delta.logprobs] == ids[:-1]
    assert feed(tokenizer, ids, **stop)[-1].stop_reason is None  # EOS


def test_without_tokenizer_or_detokenize_only_ids_are_sent(tokenizer):
    ids = ids_of(tokenizer, "abc")
    for sent in (feed(None, ids), feed(tokenizer, ids, detokenize=False)):
        assert [delta.text for delta in sent] == ["", "", ""]
        assert [delta.token_ids for delta in sent] == [(one,) for one in ids]


def test_stop_strings_work_without_text_output(tokenizer):
    sent = feed(tokenizer, ids_of(tokenizer, "abcdef"), detokenize=False, stop=("c",))
    assert sent[-1].stop_reason == "c"
    assert sum(len(delta.token_ids) for delta in sent) == 3
    assert {delta.text for delta in sent} == {""}


def test_special_tokens_are_text_only_when_asked(tokenizer):
    ids = [*ids_of(tokenizer, "a"), tokenizer.bos_id]
    assert "".join(d.text for d in feed(tokenizer, ids)) == "a"
    assert "".join(d.text for d in feed(tokenizer, ids, skip_special_tokens=False)) == "a<s>"


def test_error_and_prompt_news_are_passed_on(tokenizer):
    sample = Sample(3, SamplingParams(), tokenizer, 1)
    prompt = TokenDelta(request_id=0, prompt_logprobs=(TokenLogprob(1, -1.0, 1),))
    assert sample.push(prompt) is None
    first = sample.push(TokenDelta(request_id=0, token_ids=(5,), num_cached_tokens=16))
    assert (first.index, first.num_cached_tokens, len(first.prompt_logprobs)) == (3, 16, 1)
    last = sample.push(TokenDelta(request_id=0, finish=FinishReason.ERROR, error="broken"))
    assert (last.finish, last.error, last.num_cached_tokens) == (FinishReason.ERROR, "broken", 0)


HARMONY = (
    "<|channel|>analysis<|message|>final thoughts<|end|>"
    "<|start|>assistant<|channel|>final<|message|>One. Two."
)


@pytest.mark.parametrize("interval", [None, 1, 3])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), ("final thoughts", "One. Two.")),
        # headers are not searched: neither "final" there nor "assistant" is found
        (("assistant",), ("final thoughts", "One. Two.")),
        (("al tho",), ("fin", "")),
        (("ts", "One"), ("final though", "")),
        ((". T",), ("final thoughts", "One")),
        (("s<", "Two.!"), ("final thoughts", "One. Two.")),
    ],
)
def test_stop_strings_count_in_messages_of_harmony_only(interval, stop, expected):
    folder = Path(__file__).parents[2] / "siblings" / "gpt_oss"
    tokenizer, _, chat_format = load_text_side(folder, EngineConfig(model=str(folder)))
    ids = ids_of(tokenizer, HARMONY)
    reading = (chat_format.parser(""), chat_format.tags)
    sent = feed(tokenizer, ids, interval, stop=stop, reading=reading)
    said = "".join(delta.reasoning for delta in sent), "".join(delta.text for delta in sent)
    assert said == expected
    kept = [token_id for delta in sent for token_id in delta.token_ids]
    assert kept == ids[: len(kept)] and sent[-1].finish is not None


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (31, 0), (32, 32), (95, 64)])
def test_cached_tokens_are_told_in_whole_blocks_and_once(cached, told):
    """By single tokens one could ask what another's prompt begins with."""
    sample = Sample(0, SamplingParams(), None, 1, cached_unit=32)
    first = sample.push(TokenDelta(request_id=0, token_ids=(1,), num_cached_tokens=cached))
    last = sample.push(TokenDelta(request_id=0, token_ids=(2,), finish=FinishReason.LENGTH))
    assert first is not None and first.num_cached_tokens == told
    assert last is not None and last.num_cached_tokens == 0


@pytest.mark.parametrize(("num_steps", "expected"), [((1, 3), 2.0), ((1, 2), 3.0), ((0, 0), 1.0)])
def test_tokens_per_step_count_all_output(num_steps, expected):
    sample = Sample(0, SamplingParams(), None, 1)
    first, last = num_steps
    sample.push(TokenDelta(request_id=0, token_ids=(1,), num_steps=first))
    finish = {"finish": FinishReason.STOP, "stop_id": 6, "num_steps": last}
    sent = sample.push(TokenDelta(request_id=0, token_ids=(2, 3, 4, 5, 6), **finish))
    assert sent is not None and sent.tokens_per_step == expected
