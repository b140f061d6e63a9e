"""Every parser: the same result however the text is cut, no text lost, no input that breaks it."""

import itertools
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text.harmony import SPECIAL_TOKENS, HarmonyParser, special_token_letters
from penstock.text.output_parser import OutputParser, TextParser
from penstock.text.reasoning.think import ThinkParser
from penstock.text.tools.calls import joined
from penstock.text.tools.formats import FORMATS


class _HarmonyTokens:
    """A tokenizer that has harmony's special tokens and nothing else."""

    def id_of(self, token: str) -> int | None:
        return SPECIAL_TOKENS.index(token) if token in SPECIAL_TOKENS else None


LETTERS = dict(zip(SPECIAL_TOKENS, special_token_letters(_HarmonyTokens()).values(), strict=True))


def as_letters(text: str) -> str:
    for token, letter in LETTERS.items():
        text = text.replace(token, letter)
    return text


PARSERS = {
    "think": lambda: TextParser(ThinkParser(), None),
    "think, opened": lambda: TextParser(ThinkParser(begins_inside=True), None),
    "hermes": lambda: TextParser(None, FORMATS["hermes"].parser([])),
    "think and hermes": lambda: TextParser(ThinkParser(), FORMATS["hermes"].parser([])),
    "harmony": lambda: HarmonyParser(["get"]),
    "harmony, in the final channel": lambda: HarmonyParser(in_final=True),
}


def parse(parser: OutputParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parsed = [*map(parser.push, pieces), parser.flush()]
    calls = joined(itertools.chain.from_iterable(one.tool_calls for one in parsed))
    assert [call.id[:5] for call in calls] == ["call_"] * len(calls)
    reasoning, text = ("".join(getattr(p, kind) for p in parsed) for kind in ("reasoning", "text"))
    return reasoning, text, [(call.name, call.arguments) for call in calls]


def read(name: str, text: str):
    return parse(PARSERS[name](), [as_letters(text) if "harmony" in name else text])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


WORDS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<th",
            "</",
            "<tool",
            "_call>",
            "<",
        ),
        *(">", '{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "g"}', '"name"', '"f"'),
        *('"arguments"', ": ", ", ", "{", "}", "[", "]", '"', "\\", "\\u00e9", "null", "-1.5"),
        *('{"arguments": {"k": "</tool_call>"}, "name": "late"}', '{"name": "s", "arguments": "'),
        *(" ", "\n", "\n\n", "é🙂", "word", "The answer", *LETTERS.values(), "assistant"),
        *("analysis", "final", "commentary", " to=functions.f", " to=get", " to=python", "json"),
    ]
)
TEXTS = st.lists(WORDS, max_size=30).map("".join) | st.text(max_size=40)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 500), max_size=12))
@example('a\n<tool_call>{"name": "f", "arguments": {"a": "\\"}"}}\n</tool_call>\n', [3, 5, 40, 41])
@example("".join(LETTERS.values()), [1, 2, 3])
def test_any_cut_of_any_text_gives_the_same(name, text, places):
    whole = parse(PARSERS[name](), [text])
    assert parse(PARSERS[name](), cut(text, places)) == whole
    assert parse(PARSERS[name](), list(text)) == whole
    if "harmony" in name:
        shown = json.dumps(whole, ensure_ascii=False)
        assert not any(letter in shown for letter in LETTERS.values())


HARMONY = (
    "<|channel|>analysis<|message|>hm <b>|<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Wait.<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json"
    '<|message|>{"a": "é"}<|call|>'
)
GOOD = {
    "think": "<think>\nso <b>\n</think>\n\nThe é answer",
    "think, opened": "so </thin\n</think>\n\nThe answer",
    "hermes": 'I look.\n<tool_call>\n{"name": "f", "arguments": {"q": "</tool_call>\\"{"}}\n'
    '</tool_call>\n<tool_call>{"arguments": [1, {"x": "é"}], "name": "g"}</tool_call>',
    "think and hermes": '<think>\n<tool_call>\n</think>\n\n<tool_call>\n{"name": "f", '
    '"arguments": {"n": 1}}\n</tool_call>',
    "harmony": HARMONY,
}


@pytest.mark.parametrize("name", GOOD)
def test_every_cut_in_two_and_three_of_a_good_answer(name):
    text = as_letters(GOOD[name])
    whole = parse(PARSERS[name](), [text])
    for i in range(len(text) + 1):
        for j in (i, min(i + 1, len(text)), (i + len(text)) // 2):
            assert parse(PARSERS[name](), [text[:i], text[i:j], text[j:]]) == whole, (i, j)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", GOOD["think"], ("so <b>", "The é answer", [])),
        ("think", "No thoughts", ("", "No thoughts", [])),
        ("think", " \n<think>cut off", ("cut off", "", [])),
        ("think", "<think>\n\n</think>\n\nHi", ("", "Hi", [])),
        ("think", "Say <think> and </think>", ("", "Say <think> and </think>", [])),
        ("think", "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>", [])),
        ("think", "<thin", ("", "<thin", [])),
        ("think", " " * 5000 + "<think>", ("", " " * 5000 + "<think>", [])),
        ("think, opened", GOOD["think, opened"], ("so </thin", "The answer", [])),
        ("think, opened", "<think>\nR1 opens it</think>x", ("R1 opens it", "x", [])),
        ("think, opened", "never closed\n", ("never closed", "", [])),
        (
            "hermes",
            GOOD["hermes"],
            ("", "I look.", [("f", '{"q": "</tool_call>\\"{"}'), ("g", '[1, {"x": "é"}]')]),
        ),
        ("think and hermes", GOOD["think and hermes"], ("<tool_call>", "", [("f", '{"n": 1}')])),
        ("hermes", "plain \n", ("", "plain \n", [])),
        ("hermes", "a </tool_call> b <tool_", ("", "a </tool_call> b <tool_", [])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> done', ("", "done", [("f", "{}")])),
        (
            "hermes",
            '<tool_call>{"name": "f"}<tool_call>{"name": "g"}',
            ("", "", [("f", "{}"), ("g", "{}")]),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            ("", "", [("f", '{"a": 1}')]),
        ),
        # broken after the name: what there is of the arguments
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": </tool_call>.',
            ("", ".", [("f", '{"a": ')]),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
        # no name: text
        ("hermes", "<tool_call>f(1)</tool_call>", ("", "<tool_call>f(1)</tool_call>", [])),
        ("hermes", 'x\n<tool_call>{"name": 1}', ("", 'x\n<tool_call>{"name": 1}', [])),
        ("hermes", "<tool_call>{}</tool_call>", ("", "<tool_call>{}</tool_call>", [])),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1',
            ("", '<tool_call>{"arguments": {"a": 1', []),
        ),
        ("hermes", '<tool_call>{"name": "\\ud800"}', ("", "", [("?", "{}")])),
        ("harmony", HARMONY, ("hm <b>|", "Wait.", [("f", '{"a": "é"}')])),
        ("harmony", "<|channel|>final<|message|>Hi", ("", "Hi", [])),
        ("harmony", "<|channel|>final <|constrain|>json<|message|>{}", ("", "{}", [])),
        (
            "harmony",
            "<|channel|>commentary to=functions.f json<|message|>{}",
            ("", "", [("f", "{}")]),
        ),
        ("harmony", "<|channel|>commentary to=get<|message|>1", ("", "", [("get", "1")])),
        ("harmony", "<|channel|>analysis to=python code<|message|>x = 1", ("x = 1", "", [])),
        (
            "harmony",
            " to=functions.f<|channel|>commentary<|message|><|call|>",
            ("", "", [("f", "{}")]),
        ),
        # two messages of one kind are two lines; an unclosed one ends where the next begins
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
            "<|start|>assistant<|channel|>final<|message|>c<|channel|>final<|message|>d",
            ("a\nb", "c\nd", []),
        ),
        # headers that never end, or that are none
        ("harmony", "<|channel|>analysis", ("", "", [])),
        ("harmony", "<|channel|>final<|message|>x<|end|><|start|>assistant", ("", "x", [])),
        ("harmony", "Just text", ("", "Just text", [])),
        ("harmony", "<|channel|>" + "x" * 600 + "<|message|>y", ("", "x" * 600 + "y", [])),
        # it plays the tool
        (
            "harmony",
            "<|start|>functions.f to=assistant<|channel|>commentary<|message|>5",
            ("5", "", []),
        ),
        ("harmony, in the final channel", " more<|return|>", ("", " more", [])),
    ],
)
def test_what_is_made_of(name, text, expected):
    assert read(name, text) == expected


def test_a_call_is_named_before_its_arguments_end():
    parser = FORMATS["hermes"].parser([])
    assert parser.push('<tool_call>\n{"name": "f"') == ""
    [opening] = parser.calls.take()
    assert (opening.index, opening.name, opening.arguments) == (0, "f", "")
    parser.push(', "arguments": {"a"')
    parser.push(": 1")
    [piece] = parser.calls.take()
    assert (piece.index, piece.id, piece.name, piece.arguments) == (0, "", "", '{"a": 1')


BIG = 200_000
HOSTILE = {
    "open tags": "<tool_call>" * (BIG // 11),
    "pairs of tags": "<tool_call></tool_call>" * (BIG // 23),
    "half tags": "<tool_cal" * (BIG // 9),
    "calls": '<tool_call>{"name": "f"}</tool_call>' * (BIG // 36),
    "a deep call": '<tool_call>{"name": "f", "arguments": ' + "[" * BIG,
    "a long string": '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (BIG // 2),
    "a long nameless string": '<tool_call>{"' + "x" * BIG,
    "arguments as a string": '<tool_call>{"name": "f", "arguments": "' + "x" * BIG,
    "blanks": " \n" * (BIG // 2),
    "reasoning of blanks": "<think>" + " \n" * (BIG // 2),
    "reasoning of half tags": "<think>" + "</think" * (BIG // 7),
    "special tokens of harmony": "".join(LETTERS.values()) * (BIG // 7),
    "a header": LETTERS["<|channel|>"] + "x" * BIG,
    "constraints": LETTERS["<|constrain|>"] * BIG,
    "calls of harmony": as_letters("<|channel|>commentary to=functions.f<|message|>{}<|call|>")
    * (BIG // 45),
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", ["think and hermes", "harmony"])
def test_time_is_linear_in_the_text(name, hostile):
    """A quadratic parser would need hours for these; the bound is loose for slow machines."""
    text = HOSTILE[hostile]
    started = time.process_time()
    whole = parse(PARSERS[name](), [text])
    in_pieces = parse(PARSERS[name](), [text[i : i + 3] for i in range(0, len(text), 3)])
    assert time.process_time() - started < 10
    assert in_pieces == whole
