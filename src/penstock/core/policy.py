"""Admission: how much cache must be free before a sequence starts, and who leaves when it is short.

Who is next is decided by `queue`.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from penstock.config.run import CapacityPolicy
from penstock.core.kv.manager import KVManager, PrefixMatch
from penstock.core.sequence import Sequence

_SPARE_SHARE = 0.01  # of all blocks stay free for running sequences when one more is admitted
_NUM_RECENT = 512  # outputs
_GUESSED_LENGTH = 1024  # of an output, before any has ended
_GUESS_COUNTS = 4


class OutputLengths:
    """How long recent outputs became, and how long those under way will become by that."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)
        self._sorted: np.ndarray | None = None

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._sorted = None

    def left(self, seqs: list[Sequence]) -> np.ndarray:
        """Tokens each will still write: the mean of those recent outputs that were longer than what
        it has written, and a guess that counts as a few of them."""
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._recent, np.float64))
            self._sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0.0)  # from here on
        written = np.array([seq.num_output for seq in seqs], np.float64)
        limits = np.array([seq.request.max_tokens for seq in seqs], np.float64)
        first = np.searchsorted(self._sorted, written, side="right")
        guessed = np.minimum(limits, np.maximum(_GUESSED_LENGTH, 2 * written))
        num_longer = len(self._sorted) - first
        length = (self._sums[first] + _GUESS_COUNTS * guessed) / (num_longer + _GUESS_COUNTS)
        left: np.ndarray = np.maximum(1.0, np.minimum(limits, length) - written)
        return left


def may_start(
    policy: CapacityPolicy,
    kv: KVManager,
    seq: Sequence,
    match: PrefixMatch,
    running: list[Sequence],
    lengths: OutputLengths,
) -> bool:
    """Whether `seq` may join `running`."""
    if policy is CapacityPolicy.GUARANTEED_NO_EVICT:
        lengths_at_end = [most_tokens(s) for s in [*running, seq]]
        return kv.could_hold(lengths_at_end) and kv.fits(match, seq.num_tokens, 0)
    if not running:  # alone, a sequence may take everything
        return kv.fits(match, seq.num_tokens, 0)
    # One block each for the running ones and a little more, so that admission does not cause the
    # next preemption.
    if not kv.fits(match, seq.num_tokens, len(running), _SPARE_SHARE):
        return False
    if policy is CapacityPolicy.MAX_UTILIZATION:
        return True
    num_free = kv.num_free_tokens * (1 - _SPARE_SHARE) + kv.num_free_host_tokens
    return _growth(seq, match, running, lengths) <= num_free


def _growth(
    seq: Sequence, match: PrefixMatch, running: list[Sequence], lengths: OutputLengths
) -> float:
    """Tokens by which all sequences together will have grown at the peak, if all run on at the same
    pace and each gives its own back at its end."""
    left = lengths.left([*running, seq])
    own = np.array([s.num_tokens - s.num_shared for s in running] + [0.0])
    order = np.argsort(left)
    left, own = left[order], own[order]
    num_still = np.arange(len(left), 0, -1)  # that write when the one in question ends
    given_back = np.cumsum(own) - own
    return float((num_still * left - given_back).max()) + seq.num_tokens - match.num_tokens


def most_tokens(seq: Sequence) -> int:
    """What `seq` may ever write; its last token is never fed, so its cache is not needed."""
    return seq.num_prompt + seq.request.max_tokens - 1


def makes_way(policy: CapacityPolicy, running: Iterable[Sequence]) -> Sequence | None:
    """Who leaves for a tenant of which nothing runs: the least important one of the tenant that has
    most running by its weight. So one that fills all rows for long delays another by a step. None
    where each has one at most, or where nobody ever leaves: then it gets the next free row."""
    if policy is CapacityPolicy.GUARANTEED_NO_EVICT:
        return None
    return max(
        (seq for seq in running if seq.account.num_running > 1),
        key=lambda seq: (seq.account.num_running / seq.account.weight, seq.sort_key),
        default=None,
    )


def victim(candidates: Iterable[Sequence]) -> Sequence:
    """Who leaves when the cache is short: of the tenant that was served most, the least important.
    By arrival alone a tenant with many old requests would always win against one with a new one."""
    return max(candidates, key=lambda seq: (seq.account.served, seq.sort_key))
