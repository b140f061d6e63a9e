"""Where the grammar of an answer begins, and what else a request may ask of its output."""

import json

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


@pytest.mark.parametrize("tools", ["pythonic", "qwen3_coder", "glm45", None])
def test_formats_without_json_are_refused_by_name(tiny, tools):
    with pytest.raises(RequestError, match=tools or "tool_parser"):
        output_grammar(tiny, AnswerStart(tools=tools), None, [TOOL], ToolRule(names=("f",)))


def test_a_fault_in_a_tool_is_told_with_its_place(tiny):
    bad = {"function": {"name": "g", "parameters": {"properties": {"x": {"not": {}}}}}}
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
