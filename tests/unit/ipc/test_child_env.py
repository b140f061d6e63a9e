"""What a child process finds in its environment."""

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
    assert ended.wait(30) and codes == [code]
