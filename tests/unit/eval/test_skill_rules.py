"""Reading turns and judging them, against the scorer that the siblings were trained with."""

import json

import chat_format
import corpus
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.eval.task import Response, response_of_message, response_of_text
from penstock.eval.tasks.skills import RULES, SKILLS, read_skills

# Turns put together from pieces that the rules care about, with anything between them.
_PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "Answer:", "####", "12", " ", "\n"),
        *('{"a": 1}', '{"name": "f", "arguments": {"x": [1, "ü"]}}', "null", "[", "7.0"),
    ]
)
_TURNS = st.lists(_PIECES | st.text(max_size=4), max_size=8).map("".join)
_EXPECTED = st.sampled_from(["12", "", '{"a": 1}', '{"name": "f", "arguments": {"x": [1, "ü"]}}'])


def test_the_rules_are_those_the_siblings_are_trained_for():
    assert set(RULES) == set(corpus.MATCH_RULES)


@given(_TURNS)
@example("<think>\n1+1\n</think>\n\nAnswer: 2")
@example("a</think>b</think>c")
@example('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
def test_a_turn_is_read_as_the_trainer_reads_it(text):
    mine, theirs = response_of_text(text), chat_format.parse_answer("chatml", text)
    assert (mine.content, mine.reasoning, mine.calls) == (
        *(theirs.content, theirs.reasoning, theirs.calls),
    )


@given(_TURNS, st.sampled_from(sorted(RULES)), _EXPECTED)
def test_a_turn_is_judged_as_the_trainer_judges_it(text, rule, expected):
    if rule in ("json", "tool_call") and not expected.startswith("{"):
        expected = '{"a": 1}'
    theirs = corpus.score(rule, expected, chat_format.parse_answer("chatml", text))
    assert RULES[rule](expected, response_of_text(text)) is theirs


@pytest.mark.parametrize(
    ("rule", "expected", "right", "wrong"),
    [
        ("exact", "Rome", " Rome\n", "Rome."),
        ("exact", "Rome", "<think>hm</think>Rome", "It is Rome"),
        ("answer", "12", "Answer: 11, no. Answer: 12", "Answer: 12."),
        ("answer", "12", "Answer:12", "12"),
        ("hashes", "12", "6+6=12\n#### 12", "#### 12 apples"),
        ("json", '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', '{"a": 1, "b": [2], "c": 3}'),
        ("json", '{"a": 1}', '{"a": 1}', '{"a": 1'),
        ("thought_answer", "3", "<think>1+2</think>Answer: 3", "<think>\n</think>Answer: 3"),
        ("unthought_answer", "3", "<think>\n\n</think>\n\nAnswer: 3", "<think>x</think>Answer: 3"),
    ],
)
def test_what_each_rule_means(rule, expected, right, wrong):
    assert RULES[rule](expected, response_of_text(right))
    assert not RULES[rule](expected, response_of_text(wrong))


def test_a_tool_call_is_right_alone_and_whole():
    expected = '{"name": "f", "arguments": {"n": 1}}'
    call = f"<tool_call>\n{expected}\n</tool_call>"
    is_right = RULES["tool_call"]
    assert is_right(expected, response_of_text(f"Let me see. {call}"))
    assert not is_right(expected, response_of_text(call + call))
    assert not is_right(expected, response_of_text(call.removesuffix("</tool_call>")))
    assert not is_right(expected, response_of_text("<tool_call>f(1)</tool_call>"))
    assert not is_right(expected, response_of_text(expected))
    assert not is_right(expected, Response("", calls=({"name": "f", "arguments": {"n": 2}},)))


def test_a_message_is_the_same_answer_whether_or_not_the_server_takes_it_apart():
    function = {"name": "f", "arguments": '{"n": 1}'}
    apart = {
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    whole = {
        "content": '<think>so</think><tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    }
    assert response_of_message(apart) == response_of_message(whole)
    assert response_of_message(whole).calls == ({"name": "f", "arguments": {"n": 1}},)
    broken = {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert response_of_message(broken).calls == ({"name": "f", "arguments": None},)


def test_json_nested_beyond_reason_is_a_wrong_answer_not_an_error():
    assert not RULES["json"]('{"a": 1}', Response("[" * 200_000))


@pytest.mark.parametrize("format", ["chatml", "harmony"])
def test_lines_written_by_the_trainer_are_read(tmp_path, format):
    written = corpus.held_out_examples(1, 2)
    path = tmp_path / "skills.jsonl"
    path.write_text("\n".join(chat_format.skill_line(format, one) for one in written))
    read = read_skills(path)
    assert [(one.group, one.expected, one.rule) for one in read] == [
        (one.skill, one.expected, one.match) for one in written
    ]
    assert [len(one.tools) for one in read] == [len(one.tools) for one in written]
    # The right answer, as the trainer writes it, is right here.
    for mine, theirs in zip(read, written, strict=True):
        last = [part for part in chat_format.segments("chatml", theirs) if part.is_learned][-1]
        response = response_of_text(last.text.removesuffix("<|im_end|>"))
        assert SKILLS.is_right(mine, response), (mine, response)


GOOD = {"skill": "s", "messages": [{"role": "user", "content": "?"}], "expected": "x"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Input data was truncated"),
        (json.dumps(GOOD), "line 2: Object missing required field `match`"),
        (json.dumps(GOOD | {"match": "exakt"}), "match is 'exakt', it must be one of exact"),
        (json.dumps(GOOD | {"match": "exact", "mesages": []}), "unknown field `mesages`"),
        (json.dumps(GOOD | {"match": "json"}), "expected is not JSON"),
        (json.dumps(GOOD | {"match": "exact", "messages": []}), "length >= 1"),
        (
            json.dumps(GOOD | {"match": "exact", "messages": [{"role": "assistant"}]}),
            "leave its answer out",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "skills.jsonl"
    path.write_text(json.dumps(GOOD | {"match": "exact"}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"skills\.jsonl, line 2") as raised:
        read_skills(path)
    assert complaint in str(raised.value)


def test_a_file_without_examples_is_refused(tmp_path):
    path = tmp_path / "skills.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no examples"):
        read_skills(path)
    with pytest.raises(ConfigError, match="cannot read the examples"):
        read_skills(tmp_path / "none.jsonl")
