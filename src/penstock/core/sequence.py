"""`Sequence`: one request's state inside the engine, with named transitions.

Lengths here are what has been committed; what is in flight is counted, never guessed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

import numpy as np

from penstock.core.kv.manager import Holder
from penstock.core.kv.prefix_index import ExtraKeys, Tokens
from penstock.types.outputs import TokenLogprob
from penstock.types.request import Request


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_EDGES = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


class Account:
    """The tokens that one tenant was served, computed for its prompts and written."""

    __slots__ = ("num_running", "num_tokens", "weight")

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.num_tokens = 0.0
        self.num_running = 0  # sequences

    @property
    def served(self) -> float:
        """By weight: equal for tenants that had their shares."""
        return self.num_tokens / self.weight


class Sequence:
    def __init__(self, request: Request, sort_key: tuple[int, int]) -> None:
        self.request = request
        self.sort_key = sort_key  # smaller is more important
        self.account = Account()  # its tenant's, once it waits
        self.state = State.WAITING
        self.epoch = 0  # one more with each preemption; results of an earlier epoch are dropped
        self.num_prompt = len(request.prompt_ids)
        self.num_tokens = self.num_prompt  # prompt and committed output
        # Of its first block; those behind it follow from it.
        self.extra_keys: ExtraKeys = {0: request.cache_keys} if request.cache_keys else {}
        self._tokens: Tokens = request.prompt_ids  # full, so `append` writes to another array
        # While running:
        self.dp_rank = 0  # and after it, until it runs again
        self.row = -1
        self.holder: Holder | None = None
        self.num_shared = 0  # tokens taken over from the cache, maybe others' too
        self.num_prefill = 0  # tokens this epoch must compute or take over before it decodes
        self.num_planned = 0  # of these, how many have been planned
        self.num_pending = 0  # tokens that steps in flight bring at most
        # What its row has drafted, as far as results have come; how many of them are for now.
        self.drafts: Seq[int] = ()
        self.num_drafts = 0
        self.num_in_flight = 0  # all planned steps in flight
        self.num_void = 0  # the first of these, whose tokens are known already (`extend`)
        self.is_extended = False  # its row must be told of its newest tokens
        self.last_step = -1  # the newest step that may write its blocks
        self.num_cached = 0  # prompt tokens taken over from the cache in the first epoch
        self.num_prompt_logprobs = 0  # positions whose prompt log-probabilities were reported
        self.num_reported = 0  # output tokens that were sent in deltas
        self.num_steps = 0  # committed steps that brought output
        self.unreported_logprobs: list[TokenLogprob] = []
        self.has_prefilled = False  # its prompt was computed and committed at least once
        # Planned no more: it is preempted when its steps in flight have committed.
        self.is_leaving = False

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_report_due(self) -> bool:
        every = self.request.stream_interval
        return self.num_reported == 0 or self.num_output // every > self.num_reported // every

    @property
    def is_prefilling(self) -> bool:
        return self.num_planned < self.num_prefill

    @property
    def wants_tokens(self) -> bool:
        """Whether one more decode is of use even if those in flight bring all they may."""
        return self.num_wanted > 0 and not self.is_leaving

    @property
    def num_wanted(self) -> int:
        return self.request.max_tokens - self.num_output - self.num_pending

    def start(
        self, dp_rank: int, row: int, holder: Holder, num_shared: int, num_computed: int
    ) -> None:
        self._move(State.RUNNING)
        self.dp_rank, self.row, self.holder = dp_rank, row, holder
        self.num_prefill = self.num_tokens
        self.num_shared, self.num_planned = num_shared, num_computed

    def preempt(self) -> None:
        """Back to waiting; results in flight are void."""
        self._move(State.WAITING)
        self.epoch += 1
        self._leave()

    def finish(self) -> None:
        self._move(State.FINISHED)
        self._leave()

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate(
                [self._tokens, np.empty(len(self._tokens) + 64, np.int32)]
            )
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take tokens that need not be drawn. They are computed as those of a prompt, behind what
        steps in flight feed; what these would draw is void."""
        num_fed = self.num_tokens - 1 + self.num_in_flight
        for token_id in token_ids:
            self.append(token_id)
        self.num_prefill, self.num_planned = self.num_tokens, num_fed
        self.num_void, self.num_pending = self.num_in_flight, 0
        self.is_extended = True

    def _leave(self) -> None:
        self.row, self.holder = -1, None
        self.num_prefill = self.num_planned = self.num_pending = self.num_in_flight = 0
        self.is_leaving = self.is_extended = False
        self.drafts, self.num_drafts, self.num_void = (), 0, 0

    def _move(self, to: State) -> None:
        assert to in _EDGES[self.state], (self.id, self.state, to)
        self.state = to
