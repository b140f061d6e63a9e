"""Forks of a process: what they have, that they leave, that no one is left behind.

Each in a program of its own: a test process has threads.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from penstock.ipc.process import own_gpus, placed_gpus

PROGRAM = """
import os, pathlib, sys, time
from penstock.ipc.process import ForkedWorkers

folder = pathlib.Path(sys.argv[1])
imported = object()  # as only a copy can have it

def act(task):
    unfinished = folder / f"unfinished{task['number']}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"pid{task['number']}")
    time.sleep(task.get("sleep", 0))
    assert not task.get("fails")
    (folder / str(task["number"])).write_text(str(id(imported)))

workers = ForkedWorkers(act)
"""
KILLER = """
import signal, threading

def kill():
    while not (folder / "pid1").exists():
        time.sleep(0.02)
    os.kill(workers._pid, signal.SIGKILL)

threading.Thread(target=kill).start()
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM + program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)


def is_gone(folder: Path, number: int) -> bool:
    """Killed, if not waited for: those of a dead process are somebody else's."""
    stat = Path("/proc", (folder / f"pid{number}").read_text(), "stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_each_task_has_a_copy_with_all_that_was_made_before(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        'workers.run([{"number": 1}, {"number": 2}, {"number": 3}], 30)\nprint(id(imported))',
    ).stdout
    assert {(tmp_path / str(number)).read_text() for number in (1, 2, 3)} == {said.strip()}
    pids = {(tmp_path / f"pid{number}").read_text() for number in (1, 2, 3)}
    assert len(pids) == 3 and all(is_gone(tmp_path, number) for number in (1, 2, 3))


def test_one_that_fails_says_so_and_stops_nobody(tmp_path: Path) -> None:
    done = run(tmp_path, 'workers.run([{"number": 1, "fails": True}, {"number": 2}], 30)')
    assert "AssertionError" in done.stderr
    assert not (tmp_path / "1").exists() and (tmp_path / "2").exists()


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    run(tmp_path, 'workers.run([{"number": 1, "sleep": 50}, {"number": 2}], 4)')
    assert not (tmp_path / "1").exists() and (tmp_path / "2").exists()
    until(lambda: is_gone(tmp_path, 1))


def test_without_tasks_all_leave(tmp_path: Path) -> None:
    run(tmp_path, "workers.dismiss()\ntry:\n os.waitpid(-1, 0)\nexcept ChildProcessError: pass")
    run(tmp_path, "workers.run([], 30)")
    assert not list(tmp_path.iterdir())


def test_the_first_copy_may_be_killed(tmp_path: Path) -> None:
    """Before it has tasks, or after: nobody waits for ever, and nobody is left behind."""
    kill = "import signal\nos.kill(workers._pid, signal.SIGKILL)\n"
    run(tmp_path, kill + 'time.sleep(0.1)\nworkers.run([{"number": 1}], 30)')
    assert not list(tmp_path.iterdir())
    task = '[{"number": 1, "sleep": 50}]'
    run(tmp_path, KILLER + f"workers.run({task}, 30)")
    until(lambda: is_gone(tmp_path, 1))


def test_they_leave_with_the_process(tmp_path: Path) -> None:
    """Which may be killed, while they wait for tasks or while they have some."""
    waiting = run(tmp_path, "print(workers._pid)").stdout.strip()
    (tmp_path / "pid0").write_text(waiting)
    until(lambda: is_gone(tmp_path, 0))
    command = [sys.executable, "-c", PROGRAM + 'workers.run([{"number": 1, "sleep": 50}], 60)']
    with subprocess.Popen([*command, str(tmp_path)]) as parent:
        until((tmp_path / "pid1").exists)
        parent.kill()
    until(lambda: is_gone(tmp_path, 1))


@pytest.mark.parametrize(
    "seen, index, expected",
    [(None, 0, "0,1"), (None, 2, "4,5"), ("7,3,GPU-a,GPU-b", 1, "GPU-a,GPU-b"), ("7", 1, "")],
)
def test_replicas_have_gpus_of_their_own(monkeypatch, seen, index, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert own_gpus(index, 2) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    "seen, local_rank, expected",
    [
        (None, 1, "2,3"),
        ("0,1,2,3", 1, "2,3"),  # all of the node, as torchrun leaves them
        ("6,7", 1, "6,7"),  # its own, as of srun --gpus-per-task
    ],
)
def test_replicas_of_a_launcher_may_have_been_given_their_gpus(
    monkeypatch, seen, local_rank, expected
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert placed_gpus(local_rank, 2) == {"CUDA_VISIBLE_DEVICES": expected}
