"""What a child process finds in its environment, what it ignores, and how it says why it ended."""

import threading

import pytest

from penstock.ipc.process import Child

MODULE = """
import os, sys
sys.exit({"passive": 3, "active": 4}[os.environ["OMP_WAIT_POLICY"]])
"""


@pytest.mark.parametrize(("set_by_user", "code"), [(None, 3), ("active", 4)])
def test_threads_of_a_child_wait_asleep_unless_the_user_says_otherwise(
    tmp_path, monkeypatch, set_by_user, code
):
    (tmp_path / "says_policy.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)
    codes, ended = [], threading.Event()
    Child("says_policy", {}, "child", lambda code: (codes.append(code), ended.set()))
    assert ended.wait(240) and codes == [code]


COLLECTS = """
import gc, sys
from penstock.ipc.process import read_task
before = gc.isenabled()
task = read_task()
sys.exit(task["code"] if gc.isenabled() and gc.get_freeze_count() and not before else 1)
"""


def test_garbage_is_looked_for_once_a_child_has_imported_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "says_when.py").write_text(COLLECTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    codes, ended = [], threading.Event()
    Child("says_when", {"code": 5}, "child", lambda code: (codes.append(code), ended.set()))
    assert ended.wait(240) and codes == [5]


ENDS = """
import sys
from penstock.ipc.process import read_task
match read_task():
    case {"says": text}: sys.exit(text)
    case {"raises": text}: raise ValueError(text)
    case _: sys.exit(3)
"""


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ({"says": "no room"}, "child ended by itself with code 1: no room"),
        ({"says": "x" * 9000}, "child ended by itself with code 1: " + "x" * 1000),
        ({"raises": "no sense"}, "child ended by itself with code 1: ValueError: no sense"),
        ({}, "child ended by itself with code 3"),
    ],
)
def test_why_a_child_ended_is_in_the_log_of_its_parent(tmp_path, monkeypatch, caplog, task, line):
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = threading.Event()
    Child("ends", task, "child", lambda code: ended.set())
    assert ended.wait(240)
    assert [record.getMessage() for record in caplog.records] == [line]


SIGNALED = """
import os, signal, sys
from penstock.ipc.process import read_task
read_task()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
sys.exit(5)
"""


def test_signals_that_end_a_server_do_not_end_its_children(tmp_path, monkeypatch):
    (tmp_path / "signaled.py").write_text(SIGNALED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    codes, ended = [], threading.Event()
    Child("signaled", {}, "child", lambda code: (codes.append(code), ended.set()))
    assert ended.wait(240) and codes == [5]
