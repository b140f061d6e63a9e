"""Text that streams equals text decoded at once, however the ids are cut."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import REAL, TINY

from penstock.text.detokenizer import Detokenizer

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = st.lists(
    st.one_of(
        st.text(max_size=12), st.sampled_from(["<s>", "</s>", "<tool>", " the", "🙂", "東京"])
    ),
    max_size=6,
).map("".join)


def stream(tokenizer, ids, cuts, skip_special_tokens):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]
    return "".join(parts) + detokenizer.flush()


@pytest.mark.parametrize("name", [*REAL, *TINY])
@QUICK
@given(text=WORDS, cuts=st.lists(st.integers(0, 1000), max_size=8), skip=st.booleans())
def test_every_split_of_encoded_text_equals_decode(name, load_tokenizer, text, cuts, skip):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", [*REAL, "byte_level"])
@QUICK
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=8), skip=st.booleans())
def test_every_split_of_any_byte_level_ids_equals_decode(name, load_tokenizer, data, cuts, skip):
    tokenizer = load_tokenizer(name)
    low = st.integers(0, 300)  # single bytes: mostly not UTF-8
    anywhere = st.integers(0, tokenizer.vocab_size + 50)  # also ids the vocabulary does not have
    ids = data.draw(st.lists(low | anywhere, max_size=20))
    assert stream(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip)


@QUICK
@given(
    ids=st.lists(st.integers(0, 2**9), max_size=20), cuts=st.lists(st.integers(0, 99), max_size=5)
)
def test_every_split_of_any_sentencepiece_ids_gives_the_same_text(load_tokenizer, ids, cuts):
    tokenizer = load_tokenizer("sentencepiece_style")
    assert stream(tokenizer, ids, cuts, True) == stream(tokenizer, ids, [], True)


def test_half_a_character_waits_for_its_other_half(load_tokenizer):
    tokenizer = load_tokenizer("byte_level")
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("é🙂", add_special_tokens=False)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "é", "", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_a_character_cut_off_by_the_end_is_one_replacement(load_tokenizer):
    tokenizer = load_tokenizer("byte_level")
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("🙂", add_special_tokens=False)[:3]
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == tokenizer.decode(ids) == "\ufffd"


def test_only_the_first_blank_of_the_text_is_cut(load_tokenizer):
    tokenizer = load_tokenizer("sentencepiece_style")
    detokenizer = Detokenizer(tokenizer)
    the, bos = tokenizer.encode("the", add_special_tokens=False)[0], tokenizer.bos_id
    assert [detokenizer.push([i]) for i in (bos, the, the)] == ["", "the", " the"]
