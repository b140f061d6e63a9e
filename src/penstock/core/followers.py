"""Followers: what is kept per request beside the core and moves on with its committed tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.types.request import Request


class LateEntry(NamedTuple):
    """A request with `late_inputs` in a step that is about to be sampled: row `position` of its
    logits is the request's first, row `position + j` has been fed the first j of `drafts`."""

    request: Request
    position: int
    drafts: list[int]
    is_void: bool  # its tokens are known already: it must keep none of the drafts


class Follower(Protocol):
    """Told about the commits of requests with `late_inputs` and the end of those with
    `has_followers`; the others cost nothing."""

    def on_commit(self, request: Request, token_ids: Sequence[int]) -> str | None:
        """The request has these new tokens, one or several. Returns why it must fail, if so."""

    def known_tokens(self, request: Request) -> Sequence[int]:
        """What must come next, whatever the model says. Nothing has changed until `on_commit` is
        told of them; fewer of them may be taken, or none."""

    def on_close(self, request: Request) -> None:
        """The request has ended, in whatever way; it may never have started."""
