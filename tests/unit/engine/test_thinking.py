"""Reasoning against a budget, token by token, for tags of one token and for harmony's messages."""

import pytest

from penstock.engine.thinking import Thinking
from penstock.errors import RequestError
from penstock.text.grammars.output_grammar import AnswerStart
from penstock.text.reasoning.budget import thinking_budget
from penstock.types.request import ThinkingBudget

OPEN, CLOSE, WORD = 1, 2, 7
END, BEGIN, CHANNEL, MESSAGE, ANALYSIS, FINAL, ASSISTANT = range(10, 17)
HARMONY = {
    "opening": (CHANNEL, ANALYSIS, MESSAGE),
    "closing": (END,),
    "may_reopen": True,
}


def written(budget: ThinkingBudget, wanted: list[int]) -> list[int]:
    """What comes of a model that wants to write this: forced tokens come between."""
    thinking, output, left = Thinking(budget), [], list(wanted)
    while left or thinking.forced:
        if thinking.forced:
            token = thinking.forced[0]
        elif (token := left.pop(0)) == thinking.banned:
            continue
        output.append(token)
        thinking.on_commit([token])
    return output


def of_tags(num_tokens: int, **fields) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens, opening=(OPEN,), closing=(CLOSE,), ending=(CLOSE,), **fields
    )


@pytest.mark.parametrize(
    ("budget", "wanted", "output"),
    [
        (of_tags(2), [OPEN, WORD, WORD, WORD, 9], [OPEN, WORD, WORD, CLOSE, WORD, 9]),
        (of_tags(2), [OPEN, WORD, CLOSE, 9, OPEN, 9, 9, 9], [OPEN, WORD, CLOSE, 9, OPEN, 9, 9, 9]),
        (of_tags(0, is_open=True), [WORD, WORD], [CLOSE, WORD, WORD]),
        (of_tags(1, is_open=True), [WORD, WORD], [WORD, CLOSE, WORD]),
        (of_tags(1), [WORD] * 12 + [OPEN, 9, 9], [WORD] * 12 + [OPEN, 9, 9]),  # not at the start
        (
            ThinkingBudget(num_tokens=2, ending=(END, BEGIN, ASSISTANT, CHANNEL, FINAL, MESSAGE),
                           **HARMONY),
            [CHANNEL, ANALYSIS, MESSAGE, 7, 7, 7, 7],
            [*HARMONY["opening"], 7, 7, END, BEGIN, ASSISTANT, CHANNEL, FINAL, MESSAGE, 7, 7],
        ),
        (  # with tools: the model chooses, but not analysis
            ThinkingBudget(num_tokens=1, ending=(END, BEGIN, ASSISTANT, CHANNEL),
                           not_next=ANALYSIS, **HARMONY),
            [CHANNEL, ANALYSIS, MESSAGE, 7, ANALYSIS, 8, ANALYSIS],
            [CHANNEL, ANALYSIS, MESSAGE, 7, END, BEGIN, ASSISTANT, CHANNEL, 8, ANALYSIS],
        ),
        (  # the budget is of all messages together
            ThinkingBudget(num_tokens=3, ending=(END,), **HARMONY),
            [CHANNEL, ANALYSIS, MESSAGE, 7, 7, END, CHANNEL, ANALYSIS, MESSAGE, 7, 7],
            [CHANNEL, ANALYSIS, MESSAGE, 7, 7, END, CHANNEL, ANALYSIS, MESSAGE, 7, END, 7],
        ),
    ],
)  # fmt: skip
def test_the_end_is_forced_after_so_many_tokens(budget, wanted, output):
    assert written(budget, wanted) == output


class Known:
    """A tokenizer with these tags."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags

    def id_of(self, tag: str) -> int | None:
        return self.tags.index(tag) if tag in self.tags else None


def test_tags_that_are_no_tokens_and_models_that_nobody_knows_are_refused():
    for start, tags, said in (
        (AnswerStart(), ("<think>", "</think>"), "reasoning_parser"),
        (AnswerStart(reasoning="think"), ("<think>",), "</think> is no token"),
    ):
        with pytest.raises(RequestError, match=said):
            thinking_budget(Known(*tags), start, 5, False)
    past = AnswerStart(reasoning="think", is_past=True)
    assert thinking_budget(Known(), past, 5, False) is None
