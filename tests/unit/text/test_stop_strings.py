"""A stop string is found whatever pieces the text arrives in."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stop_strings import StopStrings

TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces, stops, include):
    search = StopStrings(stops, include)
    shown = "".join(search.push(piece) for piece in pieces)
    if search.found is None:
        shown += search.flush()
    return shown, search.found


def one_shot(text, stops, include):
    """The definition: the first prefix that ends in a stop string ends the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_any_split_gives_the_one_shot_result(text, stops, include, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert run(pieces, stops, include) == one_shot(text, stops, include)


@given(TEXT, STOPS)
def test_text_is_held_back_only_while_it_could_become_a_stop_string(text, stops):
    search = StopStrings(stops)
    shown = ""
    for end, letter in enumerate(text, start=1):
        shown += search.push(letter)
        if search.found is not None:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_a_border_is_not_shown():
    search = StopStrings(["</end>"])
    assert [search.push(piece) for piece in ("Hi <", "/e", "nd> more", "x")] == ["Hi ", "", "", ""]
    assert search.found == "</end>"


def test_text_held_for_nothing_is_given_back_at_the_end():
    search = StopStrings(["STOP"])
    assert search.push("go ST") == "go "
    assert search.flush() == "ST"
    assert search.flush() == ""


def test_included_stop_string_ends_the_text():
    search = StopStrings(["b"], include_in_output=True)
    assert search.push("abc") == "ab"


def test_without_stop_strings_everything_passes():
    search = StopStrings([])
    assert search.push("anything") == "anything"
    assert search.flush() == ""
