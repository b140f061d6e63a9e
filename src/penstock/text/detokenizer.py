"""Turns the token ids of one sample into text as they arrive, never showing half a character.

Every token costs the length of its own bytes, whatever came before it. A character whose bytes are
spread over several tokens waits until it is whole. Bytes that are no UTF-8 become U+FFFD; in a
sentencepiece-style vocabulary only those bytes do, where a decode of all ids at once would give up
the whole run of byte tokens.
"""

import codecs
from collections.abc import Mapping, Sequence

from penstock.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """`tags`: tokens that stand for a text of their own, shown even if they are special."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        tags: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._tags = tags or {}
        self._utf8 = _UTF8(errors="replace")
        self._at_start = True

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        if not self._tags or self._tags.keys().isdisjoint(ids):
            return self._push_words(ids)
        text, start = [], 0
        for at, token_id in enumerate(ids):
            if (tag := self._tags.get(token_id)) is not None:
                text += [self._push_words(ids[start:at]), self.flush(), tag]
                start = at + 1
        return "".join(text) + self._push_words(ids[start:])

    def _push_words(self, ids: Sequence[int]) -> str:
        piece_of, skipped = self._tokenizer.token_bytes, self._skipped
        pieces = [piece_of(token_id) for token_id in ids if token_id not in skipped]
        if self._at_start:
            self._trim_start(pieces)
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """What was waiting for the rest of its character."""
        return self._utf8.decode(b"", True)

    def _trim_start(self, pieces: list[bytes]) -> None:
        for i, piece in enumerate(pieces):
            if piece:
                pieces[i] = self._tokenizer.trim_first(piece)
                self._at_start = False
                return
