"""The siblings' corpus: repeatable, exactly scored, and held out by wording and by operands."""

import json
from random import Random

import corpus
import pytest
from corpus import HELD_NUMBERS, SKILLS, held_out_examples, score, train_examples
from tables import HELD_WORDS

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
    """The last answer as a model would say it in ChatML."""
    message = example.messages[-1]
    text = message["content"]
    if "reasoning_content" in message:
        text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
    for call in message.get("tool_calls", ()):
        text += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    return text


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
def test_the_right_answer_scores_and_a_corrupted_one_does_not(skill):
    examples = [e for e in held_out_examples(0, 40) if e.skill == skill]
    others = [e for e in examples if e.expected != examples[0].expected]
    assert others
    for example in examples:
        text = spoken(example)
        assert score(skill, example.expected, text), text
        assert not score(skill, example.expected, text + "9"), text
        assert not score(skill, example.expected, "")
    assert not score(skill, examples[0].expected, spoken(others[0]))


def test_thinking_is_scored_not_only_its_answer():
    assert not score("think", "7", "Answer: 7")
    assert not score("think", "7", "<think>\n\n</think>\n\nAnswer: 7")
    assert not score("no_think", "7", "<think>\n3+4=7\n</think>\n\nAnswer: 7")
    assert score("no_think", "7", "<think>\n\n</think>\n\nAnswer: 7")


def test_an_unknown_skill_is_refused():
    with pytest.raises(ValueError, match="unknown skill 'flying'"):
        score("flying", "1", "1")


def test_the_splits_share_no_wording():
    assert not corpus.wordings_of("train") & corpus.wordings_of("test")
    for split, examples in (
        ("train", train_examples(0, 3000)),
        ("test", held_out_examples(0, 50)),
    ):
        known = corpus.wordings_of(split)
        for example in examples:
            assert example.split == split
            assert set(example.wordings) <= known


def test_the_splits_share_no_operands():
    for skill, family in FAMILIES.items():
        held, maker, rng = set(HELD_NUMBERS[family]), SKILLS[skill][0], Random(0)
        for _ in range(500):
            assert not held & set(maker(rng, "train").operands)
            numbers = [o for o in maker(rng, "test").operands if isinstance(o, int)]
            assert not numbers or held & set(numbers)

    counted = {
        split: {word for _ in range(300) for word in SKILLS["counting"][0](rng, split).operands}
        for split, rng in (("train", Random(0)), ("test", Random(0)))
    }
    assert not counted["train"] & set(HELD_WORDS)
    assert counted["test"] == set(HELD_WORDS)


@pytest.mark.parametrize("skill", ["story", "json"])
def test_the_splits_share_no_pairs(skill):
    maker = SKILLS[skill][0]
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
    for a in range(1, 100):
        for b in range(1, 10) if op == "*" else range(1, a + 1):
            working, result = corpus.steps(a, op, b)
            left, _, rest = working.rstrip(".").partition(": ")
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
