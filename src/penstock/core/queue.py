"""`WaitingQueue`: who starts next. Fair between tenants; within one by priority, then by arrival.

Fair queueing by a virtual token counter: the tenant that was served the fewest tokens by its weight
is next. Does not decide whether there is room (see `policy`), and knows no keys and no names.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from penstock.core.sequence import Account, Sequence


class _Line:
    """The waiting sequences of one tenant, the most important first."""

    __slots__ = ("account", "joined", "seqs")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.seqs: list[Sequence] = []
        self.joined = 0  # number of the time at which it last began to wait


class WaitingQueue:
    """Work-conserving: whoever waits alone is next. A tenant that begins to wait starts level with
    those that wait already, so nobody saves up turns by being idle, and none is owed for having
    used what nobody else wanted."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        # A heap of (served, -joined, line). What a line was served only grows, so an entry may be
        # out of date; it is brought up to date, or dropped, when it comes to the front.
        self._order: list[tuple[float, int, _Line]] = []
        self._last_waited = Account()
        self._num_joins = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should start, as long as each that is handed out is removed
        or lets others pass; what it is charged meanwhile counts for who comes after it."""
        self._first()
        order = self._order.copy()
        num_passed: dict[int, int] = {}
        while order:
            served, joined, line = order[0]
            position = num_passed.get(joined, 0)
            if joined != -line.joined or position >= len(line.seqs):
                heappop(order)
            elif served < line.account.served:
                heapreplace(order, (line.account.served, joined, line))
            else:
                seq = line.seqs[position]
                yield seq
                if position < len(line.seqs) and line.seqs[position] is seq:
                    num_passed[joined] = position + 1

    def add(self, seq: Sequence) -> None:
        request = seq.request
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = _Line(Account(weight=request.weight))
        seq.account = line.account
        insort(line.seqs, seq, key=_importance)
        self._num_waiting += 1
        if len(line.seqs) == 1:
            self._join(line)

    def remove(self, seq: Sequence) -> None:
        line = self._lines[seq.request.tenant]
        position = bisect_left(line.seqs, seq.sort_key, key=_importance)
        assert line.seqs[position] is seq, seq.id
        del line.seqs[position]
        self._num_waiting -= 1
        if not line.seqs:
            self._last_waited = line.account

    def _join(self, line: _Line) -> None:
        first = self._first()
        level = (self._last_waited if first is None else first.account).served
        account = line.account
        account.num_tokens = max(account.num_tokens, level * account.weight)
        self._num_joins += 1
        line.joined = self._num_joins  # of equals the one that came last: the others were served
        heappush(self._order, (account.served, -line.joined, line))
        if len(self._order) > 2 * len(self._lines) + 8:  # lines that came and went
            self._order = [
                (one.account.served, -one.joined, one) for one in self._lines.values() if one.seqs
            ]
            heapify(self._order)

    def _first(self) -> _Line | None:
        """The line that is next, its entry at the front and up to date."""
        order = self._order
        while order:
            served, joined, line = order[0]
            if joined != -line.joined or not line.seqs:
                heappop(order)
            elif served < line.account.served:
                heapreplace(order, (line.account.served, joined, line))
            else:
                return line
        return None


def _importance(seq: Sequence) -> tuple[int, int]:
    return seq.sort_key
