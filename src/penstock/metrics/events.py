"""What happened to a request, as plain records; emitted by whoever drives it.

msgspec records, because one is made per token.
"""

import msgspec


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first output token of a sample reached the API server."""

    since_arrival_s: float


class MoreTokens(msgspec.Struct, frozen=True, gc=False):
    """Later tokens of a sample arrived together, `since_previous_s` after the ones before."""

    since_previous_s: float
    num_tokens: int


class SampleFinished(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sample ended, for whatever reason (`finish` is a value of `FinishReason`)."""

    finish: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    e2e_s: float
    decode_s: float | None  # from the first token to the last; None: not seen one by one


class RequestRefused(msgspec.Struct, frozen=True, gc=False):
    """A request was answered with an error before it reached the engine."""

    status: int


Event = FirstToken | MoreTokens | SampleFinished | RequestRefused
