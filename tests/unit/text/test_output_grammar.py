"""Where the grammar of an answer begins, and what else a request may ask of its output."""

import json
import random

import jsonschema
import llguidance
import pytest

from penstock.errors import RequestError
from penstock.hub.folder import local_folder
from penstock.text.chat_format import ChatFormat, choose_chat_format
from penstock.text.grammars.library import make_vocabulary
from penstock.text.grammars.output_grammar import AnswerStart, is_free, output_grammar
from penstock.text.harmony import end_ids
from penstock.text.tokenizer import Tokenizer
from penstock.types.guided_decoding import GuidedDecodingParams
from penstock.types.request import ToolRule

ANSWER = GuidedDecodingParams(json={"type": "integer"})
TOOL = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(local_folder("tiny"))


@pytest.fixture(scope="module")
def allows(tiny):
    ends = sorted({*tiny.eos_ids, *end_ids(tiny)})
    vocabulary = make_vocabulary(tiny, tiny.vocab_size, ends)

    def check(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tiny.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("format_of", "prompt_end", "good", "bad"),
    [
        (ChatFormat(), "assistant\n", ["12"], ["<think>1</think>12", "x"]),
        (
            ChatFormat("think"),
            "assistant\n",
            ["12", "<think>a {\n</think>\n\n12"],
            ["a</think>12", "<think>a", "<think></think>x"],
        ),
        (
            ChatFormat("think"),
            "assistant\n<think>\n",
            ["why</think>12", "</think>\n12", "a<b</think>12"],
            ["12", "why</think>x", "why"],
        ),
        (ChatFormat("think"), "<think>\n\n</think>\n\n", ["12"], ["<think></think>12"]),
        (ChatFormat("deepseek-r1"), "assistant", ["hm</think>12"], ["12"]),
        (ChatFormat("kimi_k2"), "assistant", ["12", "<think>a</think>12"], ["a"]),
    ],
)
def test_the_answer_begins_after_the_reasoning(tiny, allows, format_of, prompt_end, good, bad):
    grammar = output_grammar(tiny, format_of.answer_start(prompt_end), ANSWER)
    assert [allows(grammar, text) for text in good] == [True] * len(good)
    assert [allows(grammar, text) for text in bad] == [False] * len(bad)


def test_a_continued_message_is_where_its_words_are(tiny, allows):
    for continued, text in (("<think>as", "k</think>12"), ("<think>a</think>", "12"), ("1", "12")):
        start = ChatFormat("think").answer_start("assistant\n", continued)
        assert allows(output_grammar(tiny, start, ANSWER), text)
    assert not allows(output_grammar(tiny, start, ANSWER), "<think></think>12")


def test_harmony_constrains_the_final_channel_and_calls(load_tokenizer, load_vocabulary):
    tokenizer, vocabulary = load_tokenizer("gpt-oss"), load_vocabulary("gpt-oss")
    template = "<|channel|><|message|>"
    start = choose_chat_format(tokenizer, [template], "auto", "auto").answer_start("assistant")

    def check(grammar: str, text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    thought = "<|channel|>analysis<|message|>So {12}.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    grammar = output_grammar(tokenizer, start, ANSWER)
    assert check(grammar, f"{final}12") and check(grammar, f"{thought}{thought}{final}12")
    assert check(grammar, f"{thought}<|channel|>final <|constrain|>json<|message|>12")
    assert not check(grammar, f"{thought}{final}x") and not check(grammar, "12")
    assert not check(grammar, f'{call}{{"a": 1}}')
    grammar = output_grammar(tokenizer, start, None, [TOOL], ToolRule(names=("f",)))
    assert check(grammar, f'{thought}{call}{{"a": 1}}')
    assert not check(grammar, f"{thought}{final}12")
    assert not check(grammar, f'{thought}{call}{{"a": "x"}}')
    grammar = output_grammar(tokenizer, start, ANSWER, [TOOL])
    assert check(grammar, f'{call}{{"a": 1}}') and check(grammar, f"{final}12")


def test_structural_tags_constrain_what_a_trigger_opens(tiny, allows):
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    guided = GuidedDecodingParams(structural_tag=tag)
    grammar = output_grammar(tiny, AnswerStart(), guided)
    for text in ("Hello", "See <f=a>12</f> and <f=b>true</f>.", "<g=a>x"):
        assert allows(grammar, text), text
    for text in ("<f=a>true</f>", "See <f=c>1</f>", "<f=a>12"):
        assert not allows(grammar, text), text


def test_an_answer_or_a_call(tiny, allows):
    start = AnswerStart(tools="hermes")
    grammar = output_grammar(tiny, start, ANSWER, [TOOL])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert allows(grammar, "12") and allows(grammar, call) and allows(grammar, f"{call}\n{call}")
    assert not allows(grammar, "I say 12") and not allows(grammar, call.replace("1", '"x"'))
    alone = output_grammar(tiny, start, None, [TOOL], ToolRule(names=("f",)), several_calls=False)
    assert allows(alone, call) and not allows(alone, f"{call}\n{call}")


def test_a_model_without_tool_calls_is_refused(tiny):
    with pytest.raises(RequestError, match="tool_parser"):
        output_grammar(tiny, AnswerStart(), None, [TOOL], ToolRule(names=("f",)))


PUT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 2, "maxLength": 9},
        "n": {"type": "integer", "maximum": 99},
        "mode": {"$ref": "#/$defs/Mode"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Flag"}]},
        "zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"},
    },
    "required": ["path", "n"],
    "$defs": {
        "Mode": {"enum": ["a", "b c", "7"]},
        "Flag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}
PUT_TOOL = {"function": {"name": "put", "parameters": PUT}}


def coder(**values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=put>\n{inner}</function>\n</tool_call>"


def glm(**values: str) -> str:
    inner = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>put\n{inner}</tool_call>"


def python(**values: str) -> str:
    """Texts are quoted, what reads as JSON is not."""
    pairs = (
        f"{k}={v if v[:1] in '[{n' or v.isdigit() else json.dumps(v)}" for k, v in values.items()
    )
    return f"[put({', '.join(pairs)})]"


FULL = {
    **{"path": "a\nb<", "n": "3", "mode": "b c", "tags": '["x", "<y> 1/2"]', "note": "null"},
    **{"either": '{"on": true}', "zone": "UTC+2"},
}
WRITERS = {"qwen3_coder": coder, "glm45": glm, "pythonic": python}


@pytest.mark.parametrize("tools", WRITERS)
def test_arguments_that_are_no_object_of_json_follow_the_schema_too(tiny, allows, tools):
    """What the grammar lets through, the parser reads as a call that the schema allows, however the
    text was mutilated before."""
    start, rule, write = AnswerStart(tools=tools), ToolRule(names=("put",)), WRITERS[tools]
    grammar = output_grammar(tiny, start, None, [PUT_TOOL], rule)

    def read(text: str) -> list[dict]:
        parser = ChatFormat(None, tools).parser("", None, [PUT_TOOL])
        found: dict[int, str] = {}
        for parsed in (parser.push(text), parser.flush()):
            for piece in parsed.tool_calls:
                found[piece.index] = found.get(piece.index, "") + piece.arguments
        return [json.loads(one) for one in found.values()]

    def good(**values: str) -> list[dict]:
        text = write(**values)
        assert allows(grammar, text), text
        return read(text)

    assert good(**FULL) == [
        {"path": "a\nb<", "n": 3, "mode": "b c", "tags": ["x", "<y> 1/2"], "note": None}
        | {"either": {"on": True}, "zone": "UTC+2"}
    ]
    if tools != "pythonic":  # where it has quotation marks
        assert good(path="ab", n="3", mode="7") == [{"path": "ab", "n": 3, "mode": "7"}]
    assert good(path="ab", n="12", either="on") == [{"path": "ab", "n": 12, "either": "on"}]
    for bad in (
        {"path": "a", "n": "3"},  # too short
        {"path": "ab"},  # n is missing
        {"path": "ab", "n": "x"},
        {"path": "ab", "n": "3", "mode": "c"},
        {"path": "ab", "n": "3", "zone": "CET"},
        {"path": "ab", "n": "3", "other": "1"},
        {"path": "ab", "n": "3", "either": '{"on": 1}'},
        *([] if tools == "pythonic" else [{"path": "ab", "n": "3", "tags": '["</x>"]'}]),
    ):
        assert not allows(grammar, write(**bad)), bad
    two = ", ".join if tools == "pythonic" else "\n".join
    both = two([write(path="ab", n="1"), write(path="cd", n="2")]).replace("], [", ", ")
    alone = output_grammar(tiny, start, None, [PUT_TOOL], rule, several_calls=False)
    assert allows(grammar, both) and not allows(alone, both) and len(read(both)) == 2

    rng, text, num_allowed = random.Random(0), write(**FULL), 0
    pieces = [*"\n<>/{}[]\"',:1ae= ", "</tool_call>", "</parameter>", "</arg_value>", "null"]
    for _ in range(400):
        at, end = sorted(rng.choices(range(len(text)), k=2))
        mutant = text[:at] + rng.choice(pieces) + text[at if rng.random() < 0.7 else end :]
        if allows(grammar, mutant):
            num_allowed += 1
            calls = read(mutant)
            assert calls, mutant
            for arguments in calls:
                jsonschema.validate(arguments, PUT)
    assert num_allowed > 20

    anything = {"function": {"name": "put"}}
    free = output_grammar(tiny, start, None, [anything], rule)
    assert allows(free, write(x="1", y="what")) and allows(free, write())
    for parameters, place in (
        ({"properties": {"a": {"type": "integer"}}, "minProperties": 1}, "/minProperties"),
        ({"properties": {}, "required": ["b"]}, "/required"),
    ):
        unfit = {"function": {"name": "put", "parameters": parameters}}
        with pytest.raises(RequestError, match=place):
            output_grammar(tiny, start, None, [unfit], rule)
    if tools != "pythonic":
        unfit = {"properties": {"a": {"type": "string", "format": "date"}}}
        with pytest.raises(RequestError, match="/properties/a/format"):
            tool = {"function": {"name": "put", "parameters": unfit}}
            output_grammar(tiny, start, None, [tool], rule)
        both = {"anyOf": [{"type": "string"}, {"type": "array"}], "maxLength": 3}
        with pytest.raises(RequestError, match="/properties/a/maxLength"):
            tool = {"function": {"name": "put", "parameters": {"properties": {"a": both}}}}
            output_grammar(tiny, start, None, [tool], rule)
        few = {"properties": {"a": {"enum": ["x", [1]]}}, "required": ["a"]}
        tool = {"function": {"name": "put", "parameters": few}}
        fixed = output_grammar(tiny, start, None, [tool], rule)
        assert allows(fixed, write(a="x")) and allows(fixed, write(a="[1]"))
        assert not allows(fixed, write(a="[2]")) and not allows(fixed, write(a="y"))


def test_a_fault_in_a_tool_is_told_with_its_place(tiny):
    bad = {"function": {"name": "g", "parameters": {"properties": {"x": {"uniqueItems": True}}}}}
    with pytest.raises(RequestError) as refusal:
        output_grammar(tiny, AnswerStart(tools="hermes"), None, [TOOL, bad], ToolRule(names=("g",)))
    assert refusal.value.param == "tools[1].function.parameters.properties.x"


def test_tools_alone_ask_nothing():
    strict = {"function": {**TOOL["function"], "strict": True}}
    assert is_free(None, [TOOL], None) and not is_free(None, [TOOL, strict], None)
    assert not is_free(ANSWER, [], None) and not is_free(None, [TOOL], ToolRule(names=("f",)))


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "a" * 300_000},
        {"choice": []},
        {"choice": [""]},
        {"grammar": "root ::= x"},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"structural_tag": "{"},
    ],
    ids=lambda asked: json.dumps(asked)[:30],
)
def test_what_cannot_be_followed_is_refused(tiny, asked):
    with pytest.raises(RequestError):
        output_grammar(tiny, AnswerStart(), GuidedDecodingParams(**asked))
