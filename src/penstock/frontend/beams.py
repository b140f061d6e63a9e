"""`BeamSearch`: which continuations of a prompt are kept, by the log-probabilities of each step.

Pure: no engine, no text. The rules are those of transformers' `generate(num_beams=...)`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.types.outputs import TokenLogprob

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    entries: tuple[TokenLogprob, ...] = ()
    logprob: float = 0.0  # of all its tokens

    def with_token(self, token_id: int, logprob: float, step: TokenLogprob) -> "Beam":
        ids = [one for one, _ in step.top]
        entry = TokenLogprob(token_id, logprob, ids.index(token_id) + 1, step.top)
        return Beam((*self.token_ids, token_id), (*self.entries, entry), self.logprob + logprob)


@dataclass(frozen=True, slots=True)
class Finished:
    beam: Beam
    score: float  # its log-probability over its length to the power of the length penalty
    stop_id: int | None  # None: it is as long as may be


class BeamSearch:
    """`running` are to be continued; once `is_done`, `finished` has the best, the best first."""

    def __init__(
        self,
        width: int,
        stop_ids: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._width = width
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0
        self.running = [Beam()]
        self.finished: list[Finished] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Of each beam: enough to go on with, whichever of them end an output."""
        return self._width + len(self._stop_ids)

    def step(self, tops: Sequence[TokenLogprob]) -> None:
        """`tops[i].top`: the likeliest tokens behind `running[i]`, at least `num_candidates`."""
        assert not self.is_done
        found = [
            beam.with_token(token_id, logprob, top)
            for beam, top in zip(self.running, tops, strict=True)
            for token_id, logprob in top.top
        ]
        found.sort(key=lambda beam: beam.logprob, reverse=True)
        self._length += 1
        is_last = self._length == self._max_tokens
        self.running = [one for one in found if one.token_ids[-1] not in self._stop_ids]
        self.running = [] if is_last else self.running[: self._width]
        # Of those that end only the best count; the others are behind some that go on.
        for one in found[: self._width]:
            last = one.token_ids[-1]
            is_stopped = last in self._stop_ids
            if is_last or is_stopped:
                score = one.logprob / self._length**self._length_penalty
                self.finished.append(Finished(one, score, last if is_stopped else None))
        self.finished.sort(key=lambda one: one.score, reverse=True)
        del self.finished[self._width :]
        self.is_done = not self.running or not self._may_improve()

    def _may_improve(self) -> bool:
        if len(self.finished) < self._width:
            return True
        if self._early_stopping is True:
            return False
        length = self._length
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        best = self.running[0].logprob / length**self._length_penalty
        return bool(best > self.finished[-1].score)
