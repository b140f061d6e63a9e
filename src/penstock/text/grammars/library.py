"""The library that grammars are written for: llguidance. Its limits, its checks, its vocabulary.

Only this module and `engine/grammars` call it. It knows no torch, so the API server asks it, too.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import llguidance

if TYPE_CHECKING:  # the engine reads the limits, and no tokenizer before it needs one
    from penstock.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 18  # of the grammar as it is sent: schema, regular expression, tools
# Fuel and sizes bound the time of what a user brings. A state of the lexer takes 1 to 2 KB.
LIMITS = llguidance.LLParserLimits(
    max_grammar_size=50_000,
    initial_lexer_fuel=2_000_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


def find_fault(grammar: str) -> str | None:
    """Why this cannot be a grammar, in the library's words. None: it can."""
    found = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
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
