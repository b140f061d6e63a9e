"""The siblings' corpus: repeatable, exactly scored, and held out by wording and by operands."""

import itertools
import json
from random import Random

import corpus
import pytest
from chat_format import parse_answer, skill_line
from corpus import (
    HELD_NUMBERS,
    MATCH_RULES,
    SKILLS,
    Answer,
    held_out_examples,
    score,
    train_examples,
)
from tables import HELD_WORDS
from wordings import is_held

FAMILIES = {
    "arithmetic": "calculation",
    "problem": "calculation",
    "think": "calculation",
    "no_think": "calculation",
    "sorting": "list",
    "copying": "list",
    "json": "field",
    "tool": "field",
    "tool_answer": "field",
}


def spoken(example):
    """The last answer as an OpenAI client would see it."""
    message = example.messages[-1]
    calls = tuple(call["function"] for call in message.get("tool_calls", ()))
    return Answer(message["content"], message.get("reasoning_content", ""), calls)


def test_the_same_seed_gives_the_same_corpus():
    assert list(train_examples(3, 500)) == list(train_examples(3, 500))
    assert list(train_examples(3, 500)) != list(train_examples(4, 500))
    assert held_out_examples(3, 5) == held_out_examples(3, 5)


def test_every_skill_is_in_both_splits():
    assert {example.skill for example in train_examples(0, 2000)} == set(SKILLS)
    assert [example.skill for example in held_out_examples(0, 2)] == [
        skill for skill in SKILLS for _ in range(2)
    ]


@pytest.mark.parametrize("skill", SKILLS)
def test_the_right_answer_scores_and_another_does_not(skill):
    examples = [e for e in held_out_examples(0, 40) if e.skill == skill]
    others = [e for e in examples if e.expected != examples[0].expected]
    assert others
    match = SKILLS[skill].match
    assert match in MATCH_RULES
    for example in examples:
        answer = spoken(example)
        assert score(match, example.expected, answer), answer
        assert not score(match, example.expected, Answer("", answer.reasoning))
        if not answer.calls:
            spoiled = Answer(answer.content + "9", answer.reasoning)
            assert not score(match, example.expected, spoiled)
    assert not score(match, examples[0].expected, spoken(others[0]))


def test_the_rules_of_scoring():
    assert score("answer", "7", Answer("Answer: 8. No. Answer: 7\n"))
    assert not score("answer", "7", Answer("7"))
    assert score("hashes", "7", Answer("3+4=7\n#### 7"))
    assert score("json", '{"a":1,"b":2}', Answer('{"b": 2, "a": 1}'))
    assert not score("json", '{"a":1}', Answer("a is 1"))
    call = {"name": "f", "arguments": {"x": 1}}
    assert score("tool_call", json.dumps(call), Answer("", calls=(call,)))
    assert not score("tool_call", json.dumps(call), Answer("", calls=(call, call)))
    assert not score("tool_call", json.dumps(call), Answer(json.dumps(call)))
    assert score("thought_answer", "7", Answer("Answer: 7", "3+4=7"))
    assert not score("thought_answer", "7", Answer("Answer: 7"))
    assert not score("unthought_answer", "7", Answer("Answer: 7", "3+4=7"))
    assert score("unthought_answer", "7", Answer("Answer: 7", "\n"))
    with pytest.raises(ValueError, match="unknown rule 'flying'"):
        score("flying", "1", Answer("1"))


def test_broken_answers_are_parsed_as_wrong_ones():
    assert parse_answer("chatml", "<tool_call>\n{oops\n</tool_call><|im_end|>").calls == ({},)
    assert parse_answer("chatml", "<think>never closed").content == "<think>never closed"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{oops<|call|>"
    assert parse_answer("harmony", call).calls == ({},)
    assert parse_answer("harmony", "no channel at all") == Answer("")


@pytest.mark.parametrize("format", ["chatml", "harmony"])
def test_a_line_of_skills_is_what_an_openai_client_sends(format):
    for example in held_out_examples(0, 20):
        line = json.loads(skill_line(format, example))
        assert set(line) - {"tools", "chat_template_kwargs"} == {
            *("skill", "messages", "expected", "match")
        }
        assert score(line["match"], line["expected"], spoken(example))
        roles = [message["role"] for message in line["messages"]]
        assert roles[-1] in ("user", "tool") and ("tools" in line) == bool(example.tools)
        for message, after in itertools.pairwise(line["messages"]):
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                assert after["tool_call_id"] == call["id"]


def test_every_grammar_has_wordings_of_both_splits_and_no_leftover_signs():
    for grammar in corpus.grammars():
        train, test = set(grammar.all("train")), set(grammar.all("test"))
        assert len(train) >= 50 and len(test) >= 5, grammar.frames
        assert not train & test
        for wording in train | test:
            assert not set("()|") & set(wording), wording


def test_no_wording_asks_for_two_different_things():
    wordings = [
        wording
        for grammar in corpus.grammars()
        for wording in {*grammar.all("train"), *grammar.all("test")}
    ]
    assert len(wordings) == len(set(wordings))


def test_no_example_uses_a_wording_of_the_other_split():
    known = {
        split: {wording for grammar in corpus.grammars() for wording in grammar.all(split)}
        for split in ("train", "test")
    }
    assert not known["train"] & known["test"]
    seen = {"train": set(), "test": set()}
    for example in (*train_examples(0, 3000), *held_out_examples(0, 50)):
        assert set(example.wordings) <= known[example.split]
        assert all(is_held(w) == (example.split == "test") for w in example.wordings)
        seen[example.split].update(example.wordings)
    assert len(seen["train"]) > 2000


def test_the_splits_share_no_operands():
    for skill, family in FAMILIES.items():
        held, maker, rng = HELD_NUMBERS[family], SKILLS[skill].make, Random(0)
        for _ in range(500):
            assert not held & set(maker(rng, "train").operands)
            numbers = [o for o in maker(rng, "test").operands if isinstance(o, int)]
            assert not numbers or held & set(numbers)

    counted = {
        split: {word for _ in range(300) for word in SKILLS["counting"].make(rng, split).operands}
        for split, rng in (("train", Random(0)), ("test", Random(0)))
    }
    assert not counted["train"] & set(HELD_WORDS)
    assert counted["test"] == set(HELD_WORDS)


@pytest.mark.parametrize("skill", ["story", "json"])
def test_the_splits_share_no_pairs(skill):
    maker = SKILLS[skill].make
    rng = Random(0)
    pairs = {
        split: {
            e.operands for e in (maker(rng, split) for _ in range(4000)) if len(e.operands) == 2
        }
        for split in ("train", "test")
    }
    assert pairs["train"] and pairs["test"] and not pairs["train"] & pairs["test"]


@pytest.mark.parametrize("op", "+-*")
def test_the_written_steps_are_true(op):
    for a in (*range(1, 100), *range(100, 1000, 7)):
        for b in range(2, 10) if op == "*" else {1, 9, 10, 45, 98, 100, 367, a - 1, a}:
            if (op == "-" and b >= a) or b < 1:
                continue
            working, result = corpus.steps(a, op, b)
            left, _, rest = working.rstrip(".").partition(": ")
            if op == "-":
                ones = rest.split(";")
                assert "".join(part.split("=")[1].split(",")[0] for part in ones[::-1]).lstrip(
                    "0"
                ) == str(result)
            assert left == f"{a}{op}{b}"
            lines = [part for part in rest.replace(";", ",").split(", ") if "=" in part]
            for line in lines:
                said, _, value = line.partition("=")
                assert arithmetic(said) == int(value), working
            assert result == arithmetic(left)


def arithmetic(text):
    """Value of `a*b`, or of a sum and difference of numbers."""
    if "*" in text:
        a, b = text.split("*")
        return int(a) * int(b)
    first, *rest = text.replace("-", "+-").split("+")
    return int(first) + sum(map(int, rest))
