"""Parses harmony, gpt-oss's output format: messages with a channel and a recipient.

`analysis` is reasoning, `final` and `commentary` to nobody are content, and what is sent to
`functions.NAME` is a tool call. The detokenizer writes each of the format's special tokens as one
character that no text can hold (`special_token_letters`), so words that only look like one are
words, and no piece of text ends within one.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from penstock.text.output_parser import Parsed
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.calls import Calls

SPECIAL_TOKENS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
STOP_TOKENS = ("<|return|>", "<|call|>")
FUNCTIONS = "functions."
_NO_ARGUMENTS = "{}"
_OWN_ROLE = "assistant "  # of a header whose beginning is in the prompt, or was left out
# A header names a role, a channel, a recipient and a format. What is longer is not one.
_MAX_HEADER_CHARS = 512

# Halves of surrogate pairs: decoding UTF-8 never gives one.
_LETTERS = {token: chr(0xDC80 + i) for i, token in enumerate(SPECIAL_TOKENS)}
_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS = _LETTERS.values()
_ANY_SPECIAL_TOKEN = re.compile(f"[{''.join(_LETTERS.values())}]")


def special_token_letters(tokenizer: Tokenizer) -> dict[int, str]:
    """Token id -> the letter that stands for it in the text given to `HarmonyParser`."""
    found = {tokenizer.id_of(token): letter for token, letter in _LETTERS.items()}
    return {token_id: letter for token_id, letter in found.items() if token_id is not None}


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an output, if this tokenizer has them."""
    found = [tokenizer.id_of(token) for token in STOP_TOKENS]
    return tuple(one for one in found if one is not None)


class _Body(Enum):
    """What the words of a message are."""

    REASONING = auto()
    FINAL = auto()
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
    """Begins within a header, after the `<|start|>assistant` of the prompt, or `in_final`.

    `tool_names`: some models leave out the `functions.` before the name of a tool they were given.
    """

    def __init__(self, tool_names: Collection[str] = (), in_final: bool = False) -> None:
        self._tool_names = frozenset(tool_names)
        self._calls = Calls()
        self._body = _Body.FINAL if in_final else None  # None: in a header
        self._header = [_OWN_ROLE]
        self._num_header_chars = 0
        self._said = dict.fromkeys(_Body, False)  # whether there is text of that kind
        self._is_new = dict.fromkeys(_Body, False)  # a further message of that kind has begun
        self._searches = in_final

    def push(self, text: str) -> Parsed:
        reasoning: list[str] = []
        content: list[str] = []
        at = 0
        for token in _ANY_SPECIAL_TOKEN.finditer(text):
            self._take(text[at : token.start()], reasoning, content)
            self._turn(token[0], content)
            at = token.end()
        self._take(text[at:], reasoning, content)
        return Parsed("".join(reasoning), "".join(content), self._calls.take())

    def flush(self) -> Parsed:
        """The end of the output, whether or not its last message was closed."""
        content: list[str] = []
        self._close(content)
        return Parsed("", "".join(content), self._calls.take())

    def is_searched(self, piece: str) -> bool:
        """Whether stop strings count in the next piece of text: not in headers."""
        if tokens := _ANY_SPECIAL_TOKEN.findall(piece):
            self._searches = tokens[-1] == _MESSAGE
            return False
        return self._searches

    def _take(self, words: str, reasoning: list[str], content: list[str]) -> None:
        if not words:
            return
        if self._body is None:
            self._header.append(words)
            self._num_header_chars += len(words)
            if self._num_header_chars <= _MAX_HEADER_CHARS:
                return
            words = _ANY_SPECIAL_TOKEN.sub("", "".join(self._header).removeprefix(_OWN_ROLE))
            self._open(_Body.FINAL)
        assert self._body is not None
        if self._body is _Body.CALL:
            self._said[_Body.CALL] = True
            self._calls.add(words)
            return
        out = reasoning if self._body is _Body.REASONING else content
        out.append(self._separator() + words)

    def _turn(self, token: str, content: list[str]) -> None:
        if token == _MESSAGE and self._body is None:
            self._begin(_Header.of("".join(self._header)))
        elif token in (_START, *_ENDS):
            self._close(content)
            self._header = [token if token == _START else _OWN_ROLE]
        elif token == _CHANNEL and self._body is not None:  # the message before was not closed
            self._close(content)
            self._header = [_OWN_ROLE, token]
        elif self._body is None and self._num_header_chars <= _MAX_HEADER_CHARS:
            self._header.append(token)
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
            self._open(_Body.FINAL)

    def _open(self, body: _Body) -> None:
        self._body = body
        self._is_new[body] = self._said[body]
        if body is _Body.CALL:
            self._said[body] = False

    def _close(self, content: list[str]) -> None:
        """The end of a message, or of a header that never came to its message."""
        if self._body is _Body.CALL and not self._said[_Body.CALL]:
            self._calls.add(_NO_ARGUMENTS)
        if self._body is None and (words := self._words_of_no_header()):
            self._open(_Body.FINAL)
            content.append(self._separator() + words)
        self._body, self._header, self._num_header_chars = None, [], 0

    def _words_of_no_header(self) -> str:
        """Text outside of messages, from a model that does not keep to the format."""
        text = "".join(self._header)
        if not text.startswith(_OWN_ROLE) or _ANY_SPECIAL_TOKEN.search(text) or " to=" in text:
            return ""
        return text.removeprefix(_OWN_ROLE)

    def _separator(self) -> str:
        """Messages of one kind are lines of one text."""
        assert self._body is not None
        is_new, self._is_new[self._body] = self._is_new[self._body], False
        self._said[self._body] = True
        return "\n" if is_new else ""
