"""Reads harmony, the format that gpt-oss answers in: messages with a channel and a recipient.

`analysis` is reasoning, `final` and `commentary` to nobody are the answer, and what is sent to
`functions.NAME` is a tool call. The format's marks are tokens of their own. The detokenizer writes
each as one character that no text can hold (`mark_letters`), so words that only look like a mark
are words, and no piece of text ends within one.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from penstock.text.parsed import Parsed
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.calls import Calls

MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
STOP_MARKS = ("<|return|>", "<|call|>")
FUNCTIONS = "functions."
_NO_ARGUMENTS = "{}"
_OWN_ROLE = "assistant "  # of a header whose beginning is in the prompt, or was left out
# A header names a role, a channel, a recipient and a format. What is longer is not one.
_MAX_HEADER_CHARS = 512

# Halves of surrogate pairs: decoding UTF-8 never gives one.
_LETTERS = {mark: chr(0xDC80 + i) for i, mark in enumerate(MARKS)}
_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS = _LETTERS.values()
_ANY_MARK = re.compile(f"[{''.join(_LETTERS.values())}]")


def mark_letters(tokenizer: Tokenizer) -> dict[int, str]:
    """Token id -> the letter that stands for it in the text given to `HarmonyParser`."""
    found = {tokenizer.id_of(mark): letter for mark, letter in _LETTERS.items()}
    return {token_id: letter for token_id, letter in found.items() if token_id is not None}


class _Body(Enum):
    """What the words of a message are."""

    REASONING = auto()
    ANSWER = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class _Header:
    role: str
    channel: str
    recipient: str

    @classmethod
    def of(cls, text: str) -> "_Header":
        """Text between `<|start|>` and `<|message|>`; recipients stand on either side of the
        channel."""
        before, _, after = text.replace(_CONSTRAIN, " ").partition(_CHANNEL)
        words, channel = before.split(), after.replace(_CHANNEL, " ").split()
        recipients = [word[3:] for word in words + channel if word.startswith("to=")]
        return cls(
            role=words[0] if words else "",
            channel=channel[0] if channel else "",
            recipient=recipients[0] if recipients else "",
        )


class HarmonyParser:
    """Begins within a header, after the `<|start|>assistant` of the prompt, or `in_answer`.

    `tool_names`: some models leave out the `functions.` before the name of a tool they were given.
    """

    def __init__(self, tool_names: Collection[str] = (), in_answer: bool = False) -> None:
        self._tool_names = frozenset(tool_names)
        self._calls = Calls()
        self._body = _Body.ANSWER if in_answer else None  # None: in a header
        self._header = [_OWN_ROLE]
        self._num_header_chars = 0
        self._said = dict.fromkeys(_Body, False)  # whether there is text of that kind
        self._is_new = dict.fromkeys(_Body, False)  # a further message of that kind has begun
        self._searches = in_answer

    def push(self, text: str) -> Parsed:
        reasoning: list[str] = []
        answer: list[str] = []
        at = 0
        for mark in _ANY_MARK.finditer(text):
            self._take(text[at : mark.start()], reasoning, answer)
            self._turn(mark[0], answer)
            at = mark.end()
        self._take(text[at:], reasoning, answer)
        return Parsed("".join(reasoning), "".join(answer), self._calls.take())

    def finish(self) -> Parsed:
        """The end of the answer, whether or not its last message was closed."""
        answer: list[str] = []
        self._close(answer)
        return Parsed("", "".join(answer), self._calls.take())

    def is_searched(self, piece: str) -> bool:
        """Whether stop strings count in the next piece of text: not in headers."""
        if marks := _ANY_MARK.findall(piece):
            self._searches = marks[-1] == _MESSAGE
            return False
        return self._searches

    def _take(self, words: str, reasoning: list[str], answer: list[str]) -> None:
        if not words:
            return
        if self._body is None:
            self._header.append(words)
            self._num_header_chars += len(words)
            if self._num_header_chars <= _MAX_HEADER_CHARS:
                return
            words = _ANY_MARK.sub("", "".join(self._header).removeprefix(_OWN_ROLE))
            self._open(_Body.ANSWER)
        assert self._body is not None
        if self._body is _Body.CALL:
            self._said[_Body.CALL] = True
            self._calls.add(words)
            return
        out = reasoning if self._body is _Body.REASONING else answer
        out.append(self._separator() + words)

    def _turn(self, mark: str, answer: list[str]) -> None:
        if mark == _MESSAGE and self._body is None:
            self._begin(_Header.of("".join(self._header)))
        elif mark in (_START, *_ENDS):
            self._close(answer)
            self._header = [mark if mark == _START else _OWN_ROLE]
        elif mark == _CHANNEL and self._body is not None:  # the message before was not closed
            self._close(answer)
            self._header = [_OWN_ROLE, mark]
        elif self._body is None and self._num_header_chars <= _MAX_HEADER_CHARS:
            self._header.append(mark)
            self._num_header_chars += 1

    def _begin(self, header: _Header) -> None:
        name = header.recipient.removeprefix(FUNCTIONS)
        is_call = header.recipient.startswith(FUNCTIONS) or name in self._tool_names
        if header.role.lstrip(_START) not in ("assistant", ""):
            self._open(_Body.REASONING)  # it plays a tool or the user: nobody asked for that
        elif is_call and name:
            self._open(_Body.CALL)
            self._calls.begin(name)
        elif header.channel == "analysis" or header.recipient:
            self._open(_Body.REASONING)
        else:
            self._open(_Body.ANSWER)

    def _open(self, body: _Body) -> None:
        self._body = body
        self._is_new[body] = self._said[body]
        if body is _Body.CALL:
            self._said[body] = False

    def _close(self, answer: list[str]) -> None:
        """The end of a message, or of a header that never came to its message."""
        if self._body is _Body.CALL and not self._said[_Body.CALL]:
            self._calls.add(_NO_ARGUMENTS)
        if self._body is None and (words := self._words_of_no_header()):
            self._open(_Body.ANSWER)
            answer.append(self._separator() + words)
        self._body, self._header, self._num_header_chars = None, [], 0

    def _words_of_no_header(self) -> str:
        """Text outside of messages, from a model that does not keep to the format."""
        text = "".join(self._header)
        if not text.startswith(_OWN_ROLE) or _ANY_MARK.search(text) or " to=" in text:
            return ""
        return text.removeprefix(_OWN_ROLE)

    def _separator(self) -> str:
        """Messages of one kind are lines of one text."""
        assert self._body is not None
        is_new, self._is_new[self._body] = self._is_new[self._body], False
        self._said[self._body] = True
        return "\n" if is_new else ""
