"""What a process may use of the machine it runs on."""

import pytest
import torch

from penstock.kernels import device


@pytest.fixture
def group(tmp_path, monkeypatch):
    """The control group of a container with 64 cores and 256 GB around it."""
    folder = tmp_path / "groups" / "service"
    folder.mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/service\n")
    monkeypatch.setattr(device, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(device, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(64)))
    return folder


@pytest.mark.parametrize(
    ("limit", "num_cores"),
    [(None, 64), ("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("broken", 64)],
)
def test_cores_are_those_a_container_may_use(group, limit, num_cores):
    if limit is not None:
        (group / "cpu.max").write_text(limit + "\n")
    assert device._num_usable_cores() == num_cores


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 256), ("max", 256), ("8", 8), ("1000", 256)]
)
def test_memory_is_what_a_container_may_use(group, limit, expected):
    if limit is not None:
        (group / "memory.max").write_text(limit + "\n")
    assert device._usable_bytes(256) == expected
