"""Queue order and admission: who is next, and how much cache must be free before it starts."""

from bisect import insort
from collections.abc import Iterator

from penstock.config.run import CapacityPolicy
from penstock.core.kv.manager import KVManager, PrefixMatch
from penstock.core.sequence import Sequence

_SPARE_SHARE = 0.01  # of all blocks stay free for running sequences when one more is admitted


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


def may_start(
    policy: CapacityPolicy,
    kv: KVManager,
    seq: Sequence,
    match: PrefixMatch,
    running: list[Sequence],
    num_overshoot: int,
) -> bool:
    """Whether `seq` may join `running`; steps in flight may write `num_overshoot` tokens more."""
    if policy is CapacityPolicy.GUARANTEED_NO_EVICT:
        texts = [most_tokens(s, num_overshoot) for s in [*running, seq]]
        return kv.could_hold(texts) and kv.fits(match, seq.num_tokens, 0)
    # One block each for the running ones and a little more, so that admission does not cause the
    # next preemption. Alone, a sequence may take everything.
    return kv.fits(match, seq.num_tokens, len(running), _SPARE_SHARE if running else 0.0)


def most_tokens(seq: Sequence, num_overshoot: int) -> int:
    """What `seq` may ever write; its last token is never fed, so its cache is not needed."""
    return seq.num_prompt + seq.request.max_tokens - 1 + num_overshoot
