"""Slots of adapters under any order of requests that come, run and end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.adapter_slots import SlotTable

NUM_SLOTS = 3
NAMES = "abcdefg"


class Slots(RuleBasedStateMachine):
    """Requests ask until they have a slot, as a gate does, and end whenever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(NUM_SLOTS)
        self.waiting: dict[int, str] = {}
        self.running: dict[int, tuple[str, int]] = {}
        self.next_id = 0

    @rule(name=st.sampled_from(NAMES))
    def arrive(self, name):
        self.waiting[self.next_id] = name
        self.next_id += 1

    @rule()
    def plan(self):
        """Everybody who waits is asked, in order."""
        for request, name in list(self.waiting.items()):
            if (slot := self.table.take(request, name)) is not None:
                del self.waiting[request]
                self.running[request] = name, slot
                assert self.table.take(request, name) == slot  # asked again, after a preemption

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.table.release(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request]
        self.table.release(request)

    @invariant()
    def a_slot_keeps_its_adapter_while_somebody_runs_with_it(self):
        for request, (name, slot) in self.running.items():
            assert self.table.adapters[slot] == name
            assert self.table.slot_of(request) == slot

    @invariant()
    def no_adapter_has_two_slots(self):
        held = [name for name in self.table.adapters if name is not None]
        assert len(held) == len(set(held))

    @invariant()
    def pins_are_those_who_run(self):
        counts = [sum(slot == own for _, own in self.running.values()) for slot in range(NUM_SLOTS)]
        assert [self.table.num_pins(slot) for slot in range(NUM_SLOTS)] == counts

    def teardown(self):
        """Whoever waits gets its turn: with every round of ends somebody else runs."""
        for _ in range(len(self.waiting) + 2):
            for request in list(self.running):
                self.table.release(request)
            self.running.clear()
            self.plan()
        assert not self.waiting


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_one_not_used_for_longest_goes_first():
    table = SlotTable(2)
    for request, name in enumerate("aba"):
        table.take(request, name)
        table.release(request)
    table.take(3, "c")
    assert table.adapters == ("a", "c")


def test_an_adapter_that_waits_is_not_starved_by_those_that_have_slots():
    table = SlotTable(2)
    for request, name in enumerate("aab"):
        assert table.take(request, name) is not None
    assert table.take(10, "c") is None  # reserves the slot of b, which has fewer requests
    assert table.take(11, "b") is None and table.take(12, "a") == 0
    assert table.take(10, "c") is None
    table.release(2)
    assert table.take(11, "b") is None
    assert table.take(10, "c") == 1
    assert table.take(13, "c") == 1


def test_a_reservation_goes_with_the_last_who_waits_for_it():
    table = SlotTable(1)
    table.take(0, "a")
    assert table.take(1, "b") is None and table.take(2, "b") is None
    table.release(1)
    assert table.take(3, "a") is None
    table.release(2)
    assert table.take(3, "a") == 0
