"""What follows an operation of a step when the step has committed, or failed."""

from collections import deque
from collections.abc import Callable

Done = Callable[[bool], None]


class Completions:
    def __init__(self) -> None:
        self._open: deque[tuple[int, Done]] = deque()  # in the order of steps

    def add(self, step: int, done: Done) -> None:
        assert not self._open or self._open[-1][0] <= step, (self._open[-1][0], step)
        self._open.append((step, done))

    def settle(self, step: int, failed: bool) -> None:
        """`step` has committed. One that failed fails what is open in the steps behind it, too:
        they may have read what it did not write."""
        while self._open and (failed or self._open[0][0] <= step):
            _, done = self._open.popleft()
            done(not failed)
