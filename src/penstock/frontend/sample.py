"""Token deltas of one sample -> its text deltas: detokenize, find stop strings, coalesce, parse.

Pure: no queue, no event loop, no engine.
"""

from collections.abc import Mapping

from penstock.text.detokenizer import Detokenizer
from penstock.text.output_parser import OutputParser, Parsed
from penstock.text.stop_strings import StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.types.outputs import TextDelta, TokenDelta, TokenLogprob
from penstock.types.request import FinishReason
from penstock.types.sampling import SamplingParams


class Sample:
    """Sends its first token, every `stream_interval`-th and its finish; with None only its finish.

    `parser` takes reasoning and tool calls out of the text, in which `tags` stand for some tokens.
    """

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        stream_interval: int | None,
        parser: OutputParser | None = None,
        tags: Mapping[int, str] | None = None,
        cached_unit: int = 1,
    ) -> None:
        self.is_done = False
        self.is_held = False  # nothing but the finish is sent; `catch_up` sends the rest
        self._index = index
        self._sampling = sampling
        self._stream_interval = stream_interval
        self._parser = parser
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        if tokenizer is not None and (sampling.detokenize or sampling.stop):
            self._detokenizer = Detokenizer(
                tokenizer, sampling.skip_special_tokens, None if parser is None else tags
            )
        if sampling.stop:
            self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self.num_tokens = 0  # made for it up to now, whether sent or not
        self._num_sent = 0
        self._num_steps = 0  # that made them
        # what is not sent yet; text only with stop strings, else it is made from the ids when sent
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._stop_logprob: TokenLogprob | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._pooled = b""
        self._num_cached = 0
        self._cached_unit = cached_unit

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What to send now, if anything."""
        assert not self.is_done, delta.request_id
        ids = delta.token_ids
        has_stop_id = delta.stop_id is not None and ids[-1:] == (delta.stop_id,)
        if delta.pooled:
            self._pooled, ids, has_stop_id = delta.pooled, (), False  # no output was asked for
        if has_stop_id:
            ids = ids[:-1]  # it ends the output and is not part of it
        found = None
        if self._stops is not None:
            ids = self._search(ids, self._stops, is_last=delta.finish is not None)
            found = self._stops.found
        else:
            self.num_tokens += len(ids)
        self._num_steps = max(self._num_steps, delta.num_steps)
        self._ids += ids
        self._logprobs += delta.logprobs[: len(ids)]
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.num_cached_tokens:
            # Of whole blocks: by single tokens one could ask what another's prompt begins with.
            num_units = delta.num_cached_tokens // self._cached_unit
            self._num_cached = num_units * self._cached_unit
        if found is not None:
            return self._send(FinishReason.STOP, found)
        if has_stop_id:  # it was made all the same
            self.num_tokens += 1
            self._stop_logprob = delta.logprobs[-1] if delta.logprobs else None
        if delta.finish is not None:
            is_asked = delta.stop_id in self._sampling.stop_token_ids
            return self._send(delta.finish, delta.stop_id if is_asked else None, delta.error)
        return self._send(None) if self._is_due() else None

    def catch_up(self) -> TextDelta | None:
        """What became due while it was held."""
        return self._send(None) if self._is_due() else None

    def _search(self, ids: tuple[int, ...], stops: StopStrings, is_last: bool) -> tuple[int, ...]:
        """Add the tokens' text; returns those up to the one that completes a stop string."""
        assert self._detokenizer is not None
        for num_kept, token_id in enumerate(ids, start=1):
            text = self._detokenizer.push((token_id,))
            self.num_tokens += 1
            is_searched = self._parser is None or self._parser.is_searched(text)
            may_stop = is_searched and self.num_tokens > self._sampling.min_tokens
            self._text.append(stops.push(text) if may_stop else stops.flush() + text)
            if stops.found is not None:
                return ids[:num_kept]
        if is_last:
            self._text.append(stops.push(self._detokenizer.flush()))
            self._text.append(stops.flush())
        return ids

    def _is_due(self) -> bool:
        interval = self._stream_interval
        if interval is None or self.is_held or self.num_tokens == self._num_sent:
            return False
        is_first = self._num_sent == 0
        return is_first or self.num_tokens // interval > self._num_sent // interval

    def _send(
        self,
        finish: FinishReason | None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> TextDelta:
        parsed = self._parse(is_last=finish is not None) if self._sampling.detokenize else Parsed()
        sent = TextDelta(
            index=self._index,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            token_ids=tuple(self._ids),
            num_tokens=self.num_tokens - self._num_sent,
            logprobs=tuple(self._logprobs),
            stop_logprob=self._stop_logprob,
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached_tokens=self._num_cached,
            finish=finish,
            stop_reason=stop_reason,
            error=error,
            tokens_per_step=self.num_tokens / self._num_steps if self._num_steps else 1.0,
            pooled=self._pooled,
        )
        self.is_done = finish is not None
        self._num_sent = self.num_tokens
        self._num_cached = 0
        for pending in (self._text, self._ids, self._logprobs, self._prompt_logprobs):
            pending.clear()
        return sent

    def _parse(self, is_last: bool) -> Parsed:
        text = self._take_text(is_last)
        if self._parser is None:
            return Parsed(text=text)
        parsed = self._parser.push(text)
        return parsed.joined(self._parser.flush()) if is_last else parsed

    def _take_text(self, is_last: bool) -> str:
        if self._stops is not None:
            return "".join(self._text)
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(self._ids)
        return text + self._detokenizer.flush() if is_last else text
