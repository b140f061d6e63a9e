"""The library that grammars are written for: llguidance. Its limits, its checks, its vocabulary.

Only this module and `engine/grammars` call it. It knows no torch, so the API server asks it, too.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llguidance

if TYPE_CHECKING:  # the engine reads the limits, and no tokenizer before it needs one
    from penstock.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 18  # of the grammar as it is sent: schema, regular expression, tools
MAX_PROPERTIES = 1024  # of one object; the time to compile them grows with the square


def limits(num_properties: int = 0) -> llguidance.LLParserLimits:
    """Fuel and sizes bound the time of what a user brings. A state of the lexer takes 1 to 2 KB.

    `num_properties`: of all objects of its schemas. Where they may be left out, each of them is a
    way to go on: four items of a parser's row, and up to 400 of a mask (2026-11-19).
    """
    num_properties = min(num_properties, MAX_PROPERTIES)
    return llguidance.LLParserLimits(
        max_items_in_row=2_000 + 8 * num_properties,
        step_max_items=50_000 + 512 * num_properties,
        max_grammar_size=50_000,
        initial_lexer_fuel=2_000_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def limits_of(grammar: str) -> llguidance.LLParserLimits:
    """Those under which this one runs."""
    has_schemas = '"json_schema"' in grammar
    return limits(_num_properties(json.loads(grammar)) if has_schemas else 0)


def _num_properties(part: Any) -> int:
    if isinstance(part, list):
        return sum(map(_num_properties, part))
    if not isinstance(part, dict):
        return 0
    named = part.get("properties")
    num_own = len(named) if isinstance(named, dict) else 0
    return num_own + sum(map(_num_properties, part.values()))


def find_fault(grammar: str) -> str | None:
    """Why this cannot be a grammar, in the library's words. None: it can."""
    found = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    is_error, messages = found
    return "; ".join(messages) if is_error else None


fault_of = lru_cache(maxsize=64)(find_fault)  # the same grammars come again and again


class _Vocabulary:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: "Tokenizer", size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        # A model may have more rows of logits than there are tokens: nothing allows those.
        known = range(min(size, tokenizer.vocab_size))
        self.tokens = [tokenizer.token_bytes(i) for i in known] + [b""] * (size - len(known))
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < size)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def make_vocabulary(
    tokenizer: "Tokenizer", size: int, eos_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """`size`: tokens of the model. Where a grammar may end, each of `eos_ids` may come.

    For 128,000 tokens it takes about a second.
    """
    known = _Vocabulary(tokenizer, size, eos_ids[0])
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(known), eos_token=list(eos_ids))
