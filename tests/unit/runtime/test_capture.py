"""Graphs that are captured while the server is idle. The device is a stand-in."""

import pytest
import torch

from penstock.runtime import capture
from penstock.runtime.capture import IdleCapture


class Graphs:
    def __init__(self, num_left: int, fails_at: int = -1) -> None:
        self.num_left, self.fails_at, self.num_captured = num_left, fails_at, 0

    def capture_next(self) -> bool:
        if self.num_captured == self.fails_at:
            raise torch.OutOfMemoryError("no memory")
        self.num_captured += 1
        return self.num_captured < self.num_left


@pytest.fixture
def free(monkeypatch):
    """Bytes free on the device, in a list of one."""
    known = [10 << 30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (known[0], 100 << 30))
    return known


def test_a_turn_captures_one_graph_until_none_is_left(free):
    graphs = Graphs(3)
    idle = IdleCapture(graphs)
    seen = [(idle.turn(), graphs.num_captured) for _ in range(5)]
    assert seen == [(True, 1), (True, 2), (False, 3), (False, 3), (False, 3)]


def test_where_memory_is_short_no_more_are_captured(free):
    graphs = Graphs(9)
    idle = IdleCapture(graphs)
    idle.turn()
    free[0] = capture._LEAST_FREE_BYTES - 1
    idle.turn()
    free[0] = 10 << 30
    idle.turn()
    assert graphs.num_captured == 1


def test_a_capture_that_finds_no_memory_is_the_last_one(free):
    graphs = Graphs(9, fails_at=2)
    idle = IdleCapture(graphs)
    for _ in range(4):
        idle.turn()
    graphs.fails_at = -1
    idle.turn()
    assert graphs.num_captured == 2
