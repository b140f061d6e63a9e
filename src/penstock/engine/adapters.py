"""`Adapters`: a gate holds a request until its adapter has a slot and is in host memory; the rows
that join then carry it to the ranks (`runtime/adapters.py`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from penstock.core.loop import Executor, StepHandle
from penstock.engine.adapter_slots import SlotTable
from penstock.errors import RequestError
from penstock.types.adapter import Adapter, AdapterInSlot
from penstock.types.request import Request
from penstock.types.step import LateInputs, RowJoin, StepPlan


class Host(Protocol):
    """Adapters in the memory of this process."""

    def prepare(self, adapter: Adapter, is_needed: Sequence[str] = ()) -> "Future[Any]": ...

    def forget(self, adapter_id: str) -> None: ...

    def close(self) -> None: ...


class Adapters:
    """Gate and follower. `host`: None where this run has no adapters."""

    def __init__(self, host: Host | None, num_slots: int = 0, num_dp_ranks: int = 1) -> None:
        self._host, self._num_dp_ranks = host, num_dp_ranks
        self._slots = SlotTable(num_slots)
        self._running: dict[int, Adapter] = {}  # by request: it has a slot
        self._sent: set[str] = set()  # ids of those that went to the ranks, since in a slot
        # Of rows that have one, by data-parallel rank and row.
        self._by_row: dict[tuple[int, int], AdapterInSlot] = {}

    # Gate

    def ready(self, request: Request) -> bool:
        adapter = request.adapter
        if adapter is None or request.id in self._running:
            return True
        assert self._host is not None, "refused before it was sent"
        if self._slots.take(request.id, adapter.id) is None:
            return False
        in_slots = self._slots.adapters
        self._sent.intersection_update(in_slots)
        if adapter.id not in self._sent:
            # Only what has a slot is read, so host memory holds all of it.
            unsent = [one for one in in_slots if one is not None and one not in self._sent]
            reading = self._host.prepare(adapter, unsent)
            if not reading.done():
                return False
            if (error := reading.exception()) is not None:
                self._host.forget(adapter.id)  # whoever asks next may find it repaired
                raise RequestError(
                    "invalid_value", f"adapter '{adapter.name}' cannot be used: {error}", "model"
                )
        self._running[request.id] = adapter
        return True

    # Follower

    def on_commit(self, request: Request, token_ids: Sequence[int]) -> str | None:
        return None

    def known_tokens(self, request: Request) -> Sequence[int]:
        return ()

    def on_close(self, request: Request) -> None:
        if request.adapter is not None:
            self._running.pop(request.id, None)
            self._slots.release(request.id)

    # What the ranks are told

    def equip(self, plan: StepPlan) -> StepPlan:
        """The plan, its joins with their adapters; where ranks have other rows, with the adapters
        of them all."""
        if any(join.request_id in self._running for join in plan.joins):
            plan = replace(plan, joins=tuple(map(self._equipped, plan.joins)))
        if self._num_dp_ranks == 1:
            return plan
        for join in plan.joins:
            self._by_row.pop((join.dp_rank, join.row), None)
            if join.adapter is not None:
                self._by_row[join.dp_rank, join.row] = join.adapter
        if not self._by_row:
            return plan
        places = zip(plan.dp_ranks.tolist(), plan.rows.tolist(), strict=True)
        found = [self._by_row[place] for place in places if place in self._by_row]
        return replace(plan, adapters=tuple({one.slot: one for one in found}.values()))

    def _equipped(self, join: RowJoin) -> RowJoin:
        if (adapter := self._running.get(join.request_id)) is None:
            return join
        slot = self._slots.slot_of(join.request_id)
        assert slot is not None
        self._sent.add(adapter.id)
        return replace(join, adapter=AdapterInSlot(adapter=adapter, slot=slot))

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


class EquippedExecutor:
    """An executor whose plans pass `equip` first."""

    def __init__(self, executor: Executor, equip: Callable[[StepPlan], StepPlan]) -> None:
        self._executor = executor
        self._equip = equip

    def forward(self, plan: StepPlan) -> None:
        self._executor.forward(self._equip(plan))

    def sample(self, step_id: int, late: LateInputs) -> StepHandle:
        return self._executor.sample(step_id, late)
