"""Log-probabilities -> the forms of the completions API, the chat API and `prompt_logprobs`."""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.server.openai.reply import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types.outputs import TokenLogprob


class TokenNames:
    """Id -> how the API writes a token. A piece of a character is written as its bytes."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        """`as_ids`: a token's name is its id, so that all tokens have different ones."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def as_ids(self) -> "TokenNames":
        return TokenNames(self._tokenizer, as_ids=True)

    def raw(self, token_id: int) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        raw = self.raw(token_id)
        if raw is None or self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self.raw(token_id)
        return TopLogprob(self.name(token_id), logprob, None if raw is None else list(raw))


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    chosen = []
    for entry in entries:
        one = names.top_logprob(entry.token_id, entry.logprob)
        top = [names.top_logprob(*pair) for pair in entry.top]
        chosen.append(ChatTokenLogprob(one.token, one.logprob, one.bytes, top))
    return ChatLogprobs(chosen)


class CompletionWriter:
    """Writes one sample's tokens in order; `text_offset` runs on from chunk to chunk."""

    def __init__(self, names: TokenNames, num_top: int, num_named: int = 0) -> None:
        """`num_named`: tokens of the output that are reported, if not the best `num_top`."""
        self._names = names
        self._num_top = num_top
        self._num_named = num_named
        self._offset = 0

    def write_prompt(
        self, into: CompletionLogprobs, ids: Sequence[int], entries: Iterable[TokenLogprob]
    ) -> None:
        """The first token has nothing before it, so no probability."""
        self._write(into, ids[0], None, None)
        self._write_all(into, entries, self._num_top)

    def write(self, into: CompletionLogprobs, entries: Iterable[TokenLogprob]) -> None:
        self._write_all(into, entries, self._num_named or self._num_top)

    def _write_all(
        self, into: CompletionLogprobs, entries: Iterable[TokenLogprob], num_top: int
    ) -> None:
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, logprob in entry.top[:num_top]:
                top.setdefault(self._names.name(token_id), logprob)
            top.setdefault(self._names.name(entry.token_id), entry.logprob)
            self._write(into, entry.token_id, entry.logprob, top)

    def _write(
        self,
        into: CompletionLogprobs,
        token_id: int,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        into.text_offset.append(self._offset)
        into.token_logprobs.append(logprob)
        into.tokens.append(self._names.name(token_id))
        into.top_logprobs.append(top)
        self._offset += len((self._names.raw(token_id) or b"").decode(errors="ignore"))


def prompt_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> list[Any]:
    """vLLM's form: one entry per prompt token, null for the first."""
    written: list[Any] = [None]
    for entry in entries:
        ranked = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        written.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": names.name(token_id),
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return written
