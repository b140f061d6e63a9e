"""What comes back: ids from the engine (`TokenDelta`), text from `frontend` (`TextDelta`).

The two deltas are made once per token: as msgspec records in 0.2 us, as frozen dataclasses in 2.
They hold no cycles, so the garbage collector need not look at them.
"""

from dataclasses import dataclass

import msgspec

from penstock.types.request import FinishReason
from penstock.types.step import Float32s


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its best alternatives; natural log, before temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """News of one sequence. The delta with `finish` is its last; exactly one is ever sent."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # of prompt positions 1.., in order, over several deltas
    num_cached_tokens: int = (
        0  # prompt tokens whose cache was reused; set with the first output token
    )
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended it
    error: str | None = None  # with FinishReason.ERROR: what went wrong, for the user
    num_steps: int = 0  # that brought output, since the beginning
    pooled: bytes = b""  # what `Request.pooling` asked for, float32; with the first output token


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one tool call: `id` and `name` come once and first, `arguments` in pieces."""

    index: int  # among the calls of its sample
    id: str = ""
    name: str = ""
    arguments: str = ""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text of one sample, after detokenization and stop strings.

    Where the output is parsed, `text` is the content, without reasoning and tool calls.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0  # made for it: those, and the stop token, which is not part of the text
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_logprob: TokenLogprob | None = None  # of the stop token
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # stop string or stop id; None for EOS and length
    error: str | None = None  # with FinishReason.ERROR: what went wrong, for the user
    tokens_per_step: float = 1.0  # with finish: of all its output
    pooled: bytes = b""  # what `GenerateInput.pooling` asked for, float32
    beam_score: float | None = None  # with finish, of a beam search


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text as the model wrote it, which may be broken


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished sample; `reasoning` and `tool_calls` are taken out of the text by `LLM.chat`."""

    index: int
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None
    pooled: bytes = b""  # for `EmbeddingOutput`
    beam_score: float | None = None  # log-probability / length ** length_penalty
    avg_decoded_tokens_per_iter: float = 1.0  # by speculation more than one


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """What `LLM.embed` returns for one prompt."""

    embedding: Float32s
    prompt_token_ids: tuple[int, ...]
    usage: Usage
