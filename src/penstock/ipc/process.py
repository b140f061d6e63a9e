"""Child processes: spawn a module with a JSON task on stdin, notice its death, stop it.

The child keeps reading stdin; when the parent ends for whatever reason the pipe closes and the
child leaves.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock import log

# Threads of torch's CPU ops sleep while they wait for each other. When they spin, which is usual,
# they take the core from the one they wait for: with two cores and a load of 10 the built-in model
# then took 500 ms a token instead of 8 (2026-11-15).
_DEFAULT_ENV = {"OMP_WAIT_POLICY": "passive"}
_log = log.get(__name__)


class Child:
    """One `python -m module`. `on_exit(code)` runs in a thread when it ends by itself."""

    def __init__(
        self,
        module: str,
        task: Mapping[str, Any],
        name: str,
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._stopping = False
        self._on_exit = on_exit
        # A session of its own: Ctrl+C reaches the parent alone, which then stops its children in
        # order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            env=_DEFAULT_ENV | os.environ,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        self._watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._stopping:
            _log.error("%s ended by itself with code %d", self.name, code)
            self._on_exit(code)

    def ask_to_leave(self) -> None:
        """Close the child's stdin; its end is then no surprise."""
        self._stopping = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to leave, wait, then terminate, then kill."""
        self.ask_to_leave()
        for signal_child in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(grace_s)
                return
            except subprocess.TimeoutExpired:
                _log.warning("%s does not stop, insisting", self.name)
                signal_child()
        self._process.wait()


def read_task() -> dict[str, Any]:
    """In the child: the task its parent gave."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 16)
    return dict(msgspec.json.decode(line))


def on_parent_exit(act: Callable[[], None]) -> None:
    """In the child: call `act` once the parent closes our stdin, on purpose or by dying."""

    def wait() -> None:
        # Not through sys.stdin: its lock would be held by this thread when the process ends.
        while os.read(0, 4096):
            pass
        act()

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
