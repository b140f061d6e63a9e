"""`SlotTable`: which adapter has which slot, and who waits for one. Names and numbers alone.

A slot is pinned by every request that runs with its adapter. A free one goes to who asks, the one
not used for longest first. Where all are pinned, the first to ask for an adapter that has none
reserves one: no further request takes that one's adapter, so its pins come to an end.
"""

from collections import OrderedDict


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        self._adapters: list[str | None] = [None] * num_slots
        self._pins: list[set[int]] = [set() for _ in range(num_slots)]
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))  # oldest first
        self._reserved: dict[int, str] = {}  # slot -> the adapter that comes next
        self._by_request: dict[int, int] = {}
        self._waiting: dict[int, str] = {}  # by request

    @property
    def adapters(self) -> tuple[str | None, ...]:
        return tuple(self._adapters)

    def slot_of(self, request_id: int) -> int | None:
        return self._by_request.get(request_id)

    def num_pins(self, slot: int) -> int:
        return len(self._pins[slot])

    def take(self, request_id: int, adapter: str) -> int | None:
        """The slot that holds the adapter until `release`; None: ask again later."""
        if (own := self._by_request.get(request_id)) is not None:
            return own
        slot = self._find(adapter)
        if slot is None:
            self._waiting[request_id] = adapter
            return None
        self._waiting.pop(request_id, None)
        if self._adapters[slot] != adapter:
            assert not self._pins[slot], slot
            self._adapters[slot] = adapter
            self._cancel(adapter)
        self._pins[slot].add(request_id)
        self._by_request[request_id] = slot
        self._order.move_to_end(slot)
        return slot

    def release(self, request_id: int) -> None:
        """The request has ended, whether it had a slot or waited for one."""
        slot = self._by_request.pop(request_id, None)
        if slot is not None:
            self._pins[slot].remove(request_id)
        gone = self._waiting.pop(request_id, None)
        if gone is not None and gone not in self._waiting.values():
            self._cancel(gone)

    def _cancel(self, adapter: str) -> None:
        self._reserved = {slot: one for slot, one in self._reserved.items() if one != adapter}

    def _find(self, adapter: str) -> int | None:
        if adapter in self._adapters:
            slot = self._adapters.index(adapter)
            return None if slot in self._reserved else slot
        mine = next((slot for slot, one in self._reserved.items() if one == adapter), None)
        others = [slot for slot in self._order if slot not in self._reserved]
        for slot in others if mine is None else [mine, *others]:
            if not self._pins[slot]:
                return slot
        if mine is None and others:
            self._reserved[min(others, key=lambda slot: len(self._pins[slot]))] = adapter
        return None
