"""Queue order and admission: who is next, and how much cache must be free before it starts."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

import numpy as np

from penstock.config.run import CapacityPolicy
from penstock.core.kv.manager import KVManager, PrefixMatch
from penstock.core.sequence import Sequence

_SPARE_SHARE = 0.01  # of all blocks stay free for running sequences when one more is admitted
_NUM_RECENT = 512  # answers
_GUESSED_LENGTH = 1024  # of an answer, before any has ended
_GUESS_COUNTS = 4


class WaitingQueue:
    """Waiting sequences, larger priority first, then first come first served."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._items))

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=lambda item: item.sort_key)

    def remove(self, seq: Sequence) -> None:
        self._items.remove(seq)


class OutputLengths:
    """How long recent answers became, and how long those under way will become by that."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)
        self._sorted: np.ndarray | None = None

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._sorted = None

    def left(self, seqs: list[Sequence]) -> np.ndarray:
        """Tokens each will still write: the mean of those recent answers that were longer than what
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
    num_overshoot: int,
) -> bool:
    """Whether `seq` may join `running`; steps in flight may write `num_overshoot` tokens more."""
    if policy is CapacityPolicy.GUARANTEED_NO_EVICT:
        texts = [most_tokens(s, num_overshoot) for s in [*running, seq]]
        return kv.could_hold(texts) and kv.fits(match, seq.num_tokens, 0)
    if not running:  # alone, a sequence may take everything
        return kv.fits(match, seq.num_tokens, 0)
    # One block each for the running ones and a little more, so that admission does not cause the
    # next preemption.
    if not kv.fits(match, seq.num_tokens, len(running), _SPARE_SHARE):
        return False
    if policy is CapacityPolicy.MAX_UTILIZATION:
        return True
    num_free = kv.num_free_tokens * (1 - _SPARE_SHARE) + kv.num_host_tokens
    return _growth(seq, match, running, lengths) <= num_free


def _growth(
    seq: Sequence, match: PrefixMatch, running: list[Sequence], lengths: OutputLengths
) -> float:
    """Tokens by which all texts together will have grown when they need most, if all run on at the
    same pace and each gives its own back at its end."""
    left = lengths.left([*running, seq])
    own = np.array([s.num_tokens - s.num_shared for s in running] + [0.0])
    order = np.argsort(left)
    left, own = left[order], own[order]
    num_still = np.arange(len(left), 0, -1)  # that write when the one in question ends
    given_back = np.cumsum(own) - own
    return float((num_still * left - given_back).max()) + seq.num_tokens - match.num_tokens


def most_tokens(seq: Sequence, num_overshoot: int) -> int:
    """What `seq` may ever write; its last token is never fed, so its cache is not needed."""
    return seq.num_prompt + seq.request.max_tokens - 1 + num_overshoot
