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


def test_available_memory_counts_what_files_only_keep(group, tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n")
    monkeypatch.setattr(device, "_MEMINFO", meminfo)
    assert device.available_bytes() == 600 << 10
    (group / "memory.max").write_text(f"{500 << 10}\n")
    (group / "memory.current").write_text(f"{400 << 10}\n")
    (group / "memory.stat").write_text(
        f"anon 5\nactive_file {50 << 10}\ninactive_file {99 << 10}\n"
    )
    assert device.available_bytes() == (500 - 400 + 50 + 99) << 10
    (group / "memory.max").write_text("max\n")
    assert device.available_bytes() == 600 << 10


def test_a_process_knows_what_it_has_in_memory():
    assert 10 << 20 < device.resident_bytes() < 100 << 30
