"""`thinking_budget`: how a model's reasoning is closed after so many tokens, in ids.

Tags must be single tokens: then no text that only looks like one is taken for one.
"""

from penstock.errors import RequestError
from penstock.text.grammars.output_grammar import AnswerStart
from penstock.text.reasoning import think
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.formats import FORMATS
from penstock.types.request import ThinkingBudget

_PARAM = "thinking_token_budget"


def thinking_budget(
    tokenizer: Tokenizer, start: AnswerStart, num_tokens: int, has_tools: bool
) -> ThinkingBudget | None:
    """None: the output begins behind the reasoning."""
    if start.reasoning is None:
        raise RequestError(
            "unsupported",
            f"{_PARAM}: nobody knows how this model marks its reasoning; name a reasoning_parser "
            "at the start of the server",
            _PARAM,
        )
    if start.is_past:
        return None
    if start.reasoning == "harmony":
        return _harmony(tokenizer, num_tokens, has_tools)
    opening, closing = (_token(tokenizer, tag) for tag in (think.OPEN, think.CLOSE))
    tags = FORMATS["kimi_k2"].tags[:1] if start.reasoning == "kimi_k2" else ()
    return ThinkingBudget(
        num_tokens=num_tokens,
        opening=(opening,),
        closing=(closing, *(_token(tokenizer, tag) for tag in tags)),
        ending=(closing,),
        is_open=start.is_inside,
    )


def _harmony(tokenizer: Tokenizer, num_tokens: int, has_tools: bool) -> ThinkingBudget:
    """Its messages of analysis. Behind them the final one; with tools the model chooses, but not
    to think again."""
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    begin, channel, message, end = (_token(tokenizer, name) for name in names)
    words = {
        word: tuple(tokenizer.encode(word, add_special_tokens=False))
        for word in ("analysis", "assistant", "final")
    }
    ending = (end, begin, *words["assistant"], channel)
    return ThinkingBudget(
        num_tokens=num_tokens,
        opening=(channel, *words["analysis"], message),
        closing=(end,),
        ending=ending if has_tools else (*ending, *words["final"], message),
        not_next=words["analysis"][0] if has_tools else None,
        may_reopen=True,
    )


def _token(tokenizer: Tokenizer, tag: str) -> int:
    if (found := tokenizer.id_of(tag)) is None:
        raise RequestError(
            "unsupported",
            f"{_PARAM}: {tag} is no token of this model, so the end of its reasoning is not known "
            "for certain; leave it out, and bound the output by max_tokens",
            _PARAM,
        )
    return found
