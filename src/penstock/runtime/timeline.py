"""`Timeline`: the phases of a start and their seconds, as they are logged and sent with `Ready`."""

import contextlib
import time
from collections.abc import Iterator


class Timeline:
    """Named phases of a start, in order, with their seconds. `begun_at`: of the whole start."""

    def __init__(self, begun_at: float | None = None) -> None:
        self.phases: list[tuple[str, float]] = []
        self._begun_at = begun_at

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phases.append((name, time.perf_counter() - started))

    def add_rest(self) -> None:
        """What was in no phase, as the last one: all of them are then what somebody waited."""
        if self._begun_at is not None:
            self.phases.append(("other", max(0.0, time.time() - self._begun_at - self._total_s)))

    @property
    def _total_s(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.phases]
        return f"{self._total_s:.1f} s ({', '.join(parts)})"
