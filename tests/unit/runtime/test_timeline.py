"""The phases of a start, as they are logged and sent with `Ready`."""

import pytest

from penstock.runtime import timeline as timeline_module
from penstock.runtime.timeline import Timeline


@pytest.fixture
def clock(monkeypatch):
    times = iter((0.0, 1.5, 2.0, 2.25))
    monkeypatch.setattr(timeline_module.time, "perf_counter", lambda: next(times))


def test_phases_come_in_order_with_their_seconds(clock):
    timeline = Timeline()
    with timeline.phase("load weights"):
        pass
    with timeline.phase("capture 3 graphs"):
        pass
    assert timeline.phases == [("load weights", 1.5), ("capture 3 graphs", 0.25)]
    assert str(timeline) == "1.8 s (load weights 1.5 s, capture 3 graphs 0.2 s)"


def test_a_phase_that_fails_is_not_listed(clock):
    timeline = Timeline()
    with pytest.raises(OSError, match="disk"), timeline.phase("load weights"):
        raise OSError("disk")
    assert timeline.phases == []


def test_the_rest_makes_the_phases_add_up_to_what_was_waited(monkeypatch):
    monkeypatch.setattr(timeline_module.time, "time", lambda: 110.0)
    timeline = Timeline(begun_at=100.0)
    timeline.phases += [("read settings", 1.0), ("load weights", 6.5)]
    timeline.add_rest()
    assert timeline.phases[-1] == ("other", 2.5)
    assert str(timeline).startswith("10.0 s (")


def test_a_start_that_nobody_timed_has_no_rest():
    timeline = Timeline()
    timeline.add_rest()
    assert timeline.phases == []
