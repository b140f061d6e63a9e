"""Every tool format: its calls are read, however they are cut; what is broken stays text."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.chat_format import ChatFormat
from penstock.text.tools.calls import joined
from penstock.text.tools.formats import FORMATS

PROPERTIES = {
    **{"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    **{"share": {"type": "number"}, "tags": {"type": "array"}, "more": {"type": "object"}},
    **{"note": {"type": ["string", "null"]}, "any": {}},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "unit": {"enum": ["1", "2"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "get_time"}},
]
DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
DS_END = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


def parse(name: str, pieces: list[str], reasoning: str | None = None):
    parser = ChatFormat(reasoning, name).parser("", tools=TOOLS)
    parsed = [*map(parser.push, pieces), parser.flush()]
    calls = joined(itertools.chain.from_iterable(one.tool_calls for one in parsed))
    text, thought = (
        "".join(getattr(one, kind) for one in parsed) for kind in ("text", "reasoning")
    )
    return text, [(call.name, call.arguments) for call in calls], thought


def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    return parse(name, [text])[:2]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


# What each format is made of, whole and broken; with words that belong nowhere.
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"city": "x"}}'],
    "qwen3_coder": [
        *("<tool_call>\n", "<function=f>\n", "<function=", "f>", "</parameter>\n", "<parameter="),
        *("<parameter=city>\n", "<parameter=days>", "<parameter=none>", "</function>\n"),
        *("</tool_call>", "<function=get_time></function>", "</par", "12", "\n", "\n\n", '"'),
    ],
    "llama3_json": [
        *("<|python_tag|>", '{"name": "f", "parameters": {"a": [1]}}', "; ", '{"name": "no"}'),
        *('{"type": "function", "name": ', '"f"', ', "parameters": ', "{}", "}"),
    ],
    "pythonic": [
        *("<|python_start|>", "<|python_end|>", "[f(city='x', days=1)", ", get_time()", "]"),
        *("[f(", "city=", "'it\\'s'", '"q"', ")", "(", "{'k': None}", "[1, -2.5e3]", ", ", "f("),
        *("True", "no(", "get_time", "'", "\\"),
    ],
    "deepseek_v3": [
        *(*DS, *DS_END, "function", "f", "\n```json\n", "```", '{"city": "x"}', "{}", "`"),
        f"{DS[1]}f{DS[2]}{{",
        f"{DS[0]}{DS[1]}function{DS[2]}f\n```json\n",
    ],
    "mistral": [
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcdef123", "f", '{"city": "x"}', "{", "["),
        *('[{"name": "f", "arguments": {}}', ", ", '{"name": "get_time"}', "]", "[TOOL_CALLS]f{"),
    ],
    "glm45": [
        *("<tool_call>f\n", "<tool_call>", "f", "<arg_key>city</arg_key>\n", "<arg_value>"),
        *("x</arg_value>\n", "</arg_value>", "<arg_key>days</arg_key><arg_value>3</arg_value>"),
        *("</tool_call>", "<arg_key>", "</arg_key>", "</arg", '"'),
    ],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("functions.f:0", "<|tool_call_argument_begin|>", '{"city": "x"}', "<|tool_call_end|>"),
        *("<|tool_call_begin|>functions.f:1 <|tool_call_argument_begin|>", "{", "functions."),
    ],
}
COMMON = [" ", "\n", "word", "é🙂", "<", "[", "{", "}", '"', "\\", "</think>", "<think>"]


def texts(name: str) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(PIECES[name] * 3 + COMMON)
    return st.lists(pieces, max_size=25).map("".join)


def test_every_format_has_pieces_and_answers():
    assert set(PIECES) == set(FORMATS) == set(GOOD)


@pytest.mark.parametrize("reasoning", [None, "think", "kimi_k2"])
@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_text_gives_the_same(name, reasoning, data):
    text = data.draw(texts(name))
    whole = parse(name, [text], reasoning)
    places = data.draw(st.lists(st.integers(0, 500), max_size=12))
    assert parse(name, cut(text, places), reasoning) == whole
    assert parse(name, list(text), reasoning) == whole


@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_word_is_lost(name, data):
    """Without a call the content is the text; with calls, words are in one or the other."""
    words = [f"Q{i}Z" for i in range(3)]
    pieces = st.lists(st.sampled_from(PIECES[name] * 3 + COMMON), max_size=25)
    drawn = data.draw(pieces)
    for word in words:
        drawn.insert(data.draw(st.integers(0, len(drawn))), word)
    text = "".join(drawn)
    content, calls = read(name, text)
    if not calls:
        assert content == text
    # What a JSON object says beside the name and the arguments of its call is not passed on, nor
    # is the word before the separator of DeepSeek V3, or Mistral's id of a call.
    elif name in ("qwen3_coder", "pythonic", "glm45", "kimi_k2"):
        assert all(word in content + json.dumps(calls) for word in words)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen3_coder", "</parameter></function></tool_call>"),
        ("glm45", "</arg_value></tool_call>"),
        ("pythonic", ""),
    ],
)
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_arguments_that_are_translated_are_json(name, end, data):
    _, calls = read(name, data.draw(texts(name)) + end)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


CITY = '{"city": "Köln \\"</x>\\"", "days": 2}'
GOOD = {
    "hermes": [
        (f'Hm.\n<tool_call>{{"name": "f", "arguments": {CITY}}}</tool_call>', [("f", CITY)])
    ],
    "qwen3_coder": [
        (
            'Hm.\n<tool_call>\n<function=f>\n<parameter=city>\nKöln "</x>"\n</parameter>\n'
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            [("f", CITY)],
        ),
        (
            "Hm.\n<function=f>\n<parameter=city>\n\na\n\n</parameter>\n</function>\n"
            "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
            [("f", '{"city": "\\na\\n"}'), ("get_time", "{}")],
        ),
        # closing tags that the model forgot
        (
            "Hm.<tool_call><function=f><parameter=days>7</tool_call>",
            [("f", '{"days": 7}')],
        ),
    ],
    "llama3_json": [
        (f'Hm. <|python_tag|>{{"name": "f", "parameters": {CITY}}}', [("f", CITY)]),
        (
            'Hm.<|python_tag|>{"type": "function", "name": "g"}; {"name": "f", "parameters": {}}',
            [("g", "{}"), ("f", "{}")],
        ),
    ],
    "pythonic": [
        (
            "Hm.<|python_start|>[f(city='Köln \"</x>\"', days=2), get_time()]<|python_end|>",
            [("f", CITY), ("get_time", "{}")],
        )
    ],
    "deepseek_v3": [
        (
            f"Hm.\n\n{DS[0]}{DS[1]}function{DS[2]}f\n```json\n{CITY}\n```{DS_END[0]}\n{DS[1]}function"
            f"{DS[2]}get_time\n```json\n{{}}\n```{DS_END[0]}{DS_END[1]}",
            [("f", CITY), ("get_time", "{}")],
        ),
        (
            f"Hm.{DS[0]}{DS[1]}f{DS[2]}{CITY}{DS_END[0]}{DS[1]}get_time{DS[2]}{DS_END[0]}{DS_END[1]}",
            [("f", CITY), ("get_time", "{}")],
        ),
    ],
    "mistral": [
        (
            f'Hm.[TOOL_CALLS] [{{"name": "f", "arguments": {CITY}}}, {{"name": "get_time", '
            '"arguments": {}}]',
            [("f", CITY), ("get_time", "{}")],
        ),
        (
            f"Hm.[TOOL_CALLS]f[ARGS]{CITY}[TOOL_CALLS]get_time[CALL_ID]abcdef123[ARGS]{{}}",
            [("f", CITY), ("get_time", "{}")],
        ),
        (f"Hm.[TOOL_CALLS]f{CITY}", [("f", CITY)]),
    ],
    "glm45": [
        (
            'Hm.\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Köln "</x>"</arg_value>\n'
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
            "<tool_call>get_time</tool_call>",
            [("f", CITY), ("get_time", "{}")],
        ),
        (
            "Hm.<tool_call>f<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
            [("f", '{"days": 2}')],
        ),
    ],
    "kimi_k2": [
        (
            "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            f"<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_call_begin|>"
            "functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            [("f", CITY), ("get_time", "{}")],
        )
    ],
}


@pytest.mark.parametrize(("name", "text", "calls"), [(n, *one) for n in GOOD for one in GOOD[n]])
def test_calls_are_read_and_every_cut_in_two_gives_the_same(name, text, calls):
    assert read(name, text) == ("Hm.", calls)
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]])[:2] == ("Hm.", calls), at


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # the whole message, without a tag
        ("llama3_json", '\n{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
        ("llama3_json", '{"name": "f"}{"name": "f"}', ("", [("f", "{}")] * 2)),
        ("pythonic", "[f(days=1)] ", ("", [("f", '{"days": 1}')])),
        # an answer in JSON, a list, a tool that there is not
        ("llama3_json", '{"name": "Bob"}', ('{"name": "Bob"}', [])),
        ("llama3_json", 'So: {"name": "f"}', ('So: {"name": "f"}', [])),
        ("pythonic", "[1] is a source", ("[1] is a source", [])),
        ("pythonic", "[print(a=1)]", ("[print(a=1)]", [])),
        # code is not run and not taken for a literal
        ("pythonic", "[f(city=open('x').read())]", ("[f(city=open('x').read())]", [])),
        ("pythonic", "[f('x')]", ("[f('x')]", [])),
        ("pythonic", "[f(days=1+1)]", ("[f(days=1+1)]", [])),
        ("pythonic", "[f(days=007)]", ("[f(days=007)]", [])),
        (
            "pythonic",
            "[f(tags=['a\\n', (1, -2.5)], more={'k': True, \"é\\u00e9\": None}, city='\\d')]",
            (
                "",
                [
                    (
                        "f",
                        '{"tags": ["a\\n", [1, -2.5]], "more": {"k": true, "éé": null}, '
                        '"city": "\\\\d"}',
                    )
                ],
            ),
        ),
        (
            "pythonic",
            "[f(city='it\\'s ) \\\\', note=\"\\\")]\\ud83d\\ude42\")]",
            ("", [("f", '{"city": "it\'s ) \\\\", "note": "\\")]🙂"}')]),
        ),
        # the first is a call, the second is not
        ("pythonic", "[f(), g(]", (", g(]", [("f", "{}")])),
        ("qwen3_coder", "<function=f> is a tag", ("<function=f> is a tag", [])),
        ("qwen3_coder", "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
        (
            "qwen3_coder",
            "<function=f><parameter=days>1</parameter>oops</function>.",
            ("oops.", [("f", '{"days": 1}')]),
        ),
        # cut by length: the JSON stays open
        (
            "qwen3_coder",
            "<function=f><parameter=city>\nrm -rf /tm",
            ("", [("f", '{"city": "rm -rf /tm')]),
        ),
        ("qwen3_coder", "<function=f><parameter=days>1", ("", [("f", '{"days": 1')])),
        ("deepseek_v3", f"{DS[0]}{DS[1]}func", (f"{DS[0]}{DS[1]}func", [])),
        ("deepseek_v3", f"{DS[0]} is a tag", (f"{DS[0]} is a tag", [])),
        (
            "deepseek_v3",
            f"{DS[1]}x{DS_END[0]}{DS[1]}f{DS[2]}{{}}{DS_END[0]}",
            (f"{DS[1]}x{DS_END[0]}", [("f", "{}")]),
        ),
        ("mistral", "[TOOL_CALLS] is a tag", ("[TOOL_CALLS] is a tag", [])),
        ("mistral", '[TOOL_CALLS][{"name": 1}]', ('[TOOL_CALLS][{"name": 1}]', [])),
        ("glm45", "<tool_call>f is it</tool_call>", ("<tool_call>f is it</tool_call>", [])),
        ("kimi_k2", "<|tool_call_begin|>f", ("<|tool_call_begin|>f", [])),
    ],
)
def test_what_is_made_of(name, text, expected):
    assert read(name, text) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(("city", "12", "12"), ("city", "true", "true"), ("city", " a ", " a ")),
        *(("days", " 12 ", 12), ("days", "many", "many"), ("share", "-1.5e3", -1500.0)),
        *(("exact", "True", True), ("exact", "false", False), ("exact", "1", "1")),
        *(("tags", '["a", 1]', ["a", 1]), ("tags", "[a", "[a"), ("more", '{"k": {}}', {"k": {}})),
        *(("more", '{"k": NaN}', '{"k": NaN}'), ("note", "null", None), ("note", "7", "7")),
        *(("either", "None", None), ("either", "3", 3), ("unit", "1", "1")),
        *(("any", "3", 3), ("any", "x", "x"), ("unknown", "[1]", [1]), ("more", "[" * 9999, 9999)),
    ],
)
def test_values_become_what_the_schema_says(key, value, expected):
    glm = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    qwen = f"<function=f><parameter={key}>\n{value}\n</parameter></function>"
    for name, text in (("glm45", glm), ("qwen3_coder", qwen)):
        [(_, arguments)] = read(name, text)[1]
        assert json.loads(arguments) == {key: "[" * 9999 if expected == 9999 else expected}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ', "}"),
        ("deepseek_v3", f"{DS[0]}{DS[1]}f{DS[2]}", "".join(DS_END)),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
)
def test_brackets_and_quotes_in_strings_end_nothing(name, before, after):
    arguments = '{"a": "}\\\\", "b": ["\\"]}<", {"c": "[TOOL_CALLS]<tool_call>"}]}'
    json.loads(arguments)
    text = f"{before}{arguments}{after}."
    assert read(name, text) == (".", [("f", arguments)])
    assert parse(name, list(text))[:2] == (".", [("f", arguments)])


def test_long_strings_are_streamed():
    parser = FORMATS["qwen3_coder"].parser(TOOLS)
    parser.push("<tool_call><function=f><parameter=city>\nline 1\n")
    [opening] = parser.calls.take()
    assert (opening.name, opening.arguments) == ("f", '{"city": "line 1')
    parser.push("line 2\n")
    [piece] = parser.calls.take()
    assert (piece.name, piece.arguments) == ("", "\\nline 2")


def test_ids_are_those_that_the_templates_take_back():
    kimi, mistral = FORMATS["kimi_k2"].parser(TOOLS), FORMATS["mistral"].parser(TOOLS)
    kimi.push("<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>")
    assert [(call.id, call.name) for call in kimi.calls.take()] == [("functions.f:3", "f")]
    mistral.push("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}")
    made, given_by_model = (call.id for call in mistral.calls.take())
    assert len(made) == 9 and made.isalnum() and given_by_model == "abcdef123"


def test_kimi_may_forget_to_close_its_reasoning():
    text = "<think>hm <|tool_calls_section_begin|>" + GOOD["kimi_k2"][0][0].split("begin|>", 1)[1]
    assert parse("kimi_k2", [text], "kimi_k2") == ("", GOOD["kimi_k2"][0][1], "hm")
    assert parse("kimi_k2", list(text), "kimi_k2") == ("", GOOD["kimi_k2"][0][1], "hm")


BIG = 100_000


def hostile(name: str):
    """Every piece of the format over and over, and what opens a call before endless words."""
    for piece in [*PIECES[name], *(a + b for a, b in itertools.pairwise(PIECES[name]))]:
        yield piece * (BIG // len(piece))
    for text, _ in GOOD[name]:
        yield text * (BIG // len(text))
        for at in range(3, len(text), 9):
            yield text[:at] + "x" * BIG
    yield " " * BIG


@pytest.mark.parametrize("name", PIECES)
def test_time_is_linear_in_the_text(name):
    """A quadratic parser would need minutes for some of these; the bound is loose."""
    for number, text in enumerate(hostile(name)):
        started = time.process_time()
        whole = parse(name, [text])
        if number % 8 == 0:  # the slow way for some of them
            pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
            assert parse(name, pieces) == whole
        assert time.process_time() - started < 10, text[:200]
