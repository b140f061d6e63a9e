"""The gate of adapters: a request starts when its adapter has a slot and was read."""

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.adapters import Adapters
from penstock.errors import ConfigError, RequestError
from penstock.types.adapter import Adapter
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams


@dataclass(frozen=True)
class Join:
    request_id: int
    adapter: Any = None


@dataclass(frozen=True)
class Plan:
    joins: tuple[Join, ...]


class Host:
    """Reads nothing until it is told to."""

    def __init__(self) -> None:
        self.reading: dict[str, Future] = {}
        self.needed: list[list[str]] = []

    def prepare(self, adapter, is_needed=()):
        self.needed.append(list(is_needed))
        return self.reading.setdefault(adapter.id, Future())

    def forget(self, adapter_id):
        del self.reading[adapter_id]

    def close(self):
        pass


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def adapters(host):
    return Adapters(host, 2)


def ask(number: int, name: str | None) -> Request:
    adapter = None if name is None else Adapter(id=name, name=f"the {name}", path=f"/{name}")
    return Request(
        id=number, prompt_ids=(1,), sampling=SamplingParams(), max_tokens=1, adapter=adapter
    )


def joins(adapters, *numbers: int):
    """What the ranks are told of these requests."""
    plan = adapters.equip(Plan(tuple(Join(number) for number in numbers)))
    return [one.adapter and (one.adapter.adapter.id, one.adapter.slot) for one in plan.joins]


def test_requests_without_an_adapter_pass(adapters):
    assert adapters.ready(ask(1, None)) and joins(adapters, 1) == [None]


def test_one_waits_until_its_adapter_is_read_and_carries_its_slot(adapters, host):
    assert not adapters.ready(ask(1, "a"))
    host.reading["a"].set_result(None)
    assert adapters.ready(ask(1, "a")) and adapters.ready(ask(2, "a"))
    assert joins(adapters, 2, 7, 1) == [("a", 0), None, ("a", 0)]


def test_an_adapter_on_the_device_is_not_read_again(adapters, host):
    adapters.ready(ask(1, "a"))
    host.reading["a"].set_result(None)
    adapters.ready(ask(1, "a"))
    joins(adapters, 1)
    host.reading.clear()
    assert adapters.ready(ask(2, "a")) and not host.reading


def test_only_adapters_with_a_slot_are_read_and_none_of_them_may_be_forgotten(adapters, host):
    for number, name in enumerate("abc"):
        adapters.ready(ask(number, name))
    assert set(host.reading) == {"a", "b"}
    assert host.needed[-1] == ["a", "b"]


def test_what_cannot_be_read_ends_the_request_and_is_tried_again_by_the_next(adapters, host):
    adapters.ready(ask(1, "a"))
    host.reading["a"].set_exception(ConfigError("no such folder"))
    with pytest.raises(RequestError, match="adapter 'the a' cannot be used: no such folder"):
        adapters.ready(ask(1, "a"))
    adapters.on_close(ask(1, "a"))
    assert not adapters.ready(ask(2, "a")) and not host.reading["a"].done()


def test_the_end_of_a_request_frees_its_slot(adapters, host):
    for number, name in enumerate("abc"):
        adapters.ready(ask(number, name))
    adapters.on_close(ask(1, "b"))
    assert not adapters.ready(ask(2, "c")) and "c" in host.reading
    adapters.on_close(SimpleNamespace(id=9, adapter=None))
