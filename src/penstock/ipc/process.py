"""Child processes: spawn a module with a JSON task on stdin, notice its death, stop it.

The child keeps reading stdin; when the parent ends for whatever reason the pipe closes and the
child leaves. `ForkedWorkers` are children that need not import what this process has imported.
"""

import contextlib
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec

from penstock import log
from penstock.errors import ConfigError

# Threads of torch's CPU ops sleep while they wait for each other. When they spin, which is usual,
# they take the core from the one they wait for: with two cores and a load of 10 the built-in model
# then took 500 ms a token instead of 8 (2026-11-15).
_DEFAULT_ENV = {"OMP_WAIT_POLICY": "passive"}
_MAX_REASON_BYTES = 4096  # less than a pipe holds
_MIN_FILES = 64  # what a process opens at its start is some 30; each connection is one more
_log = log.get(__name__)


def need_open_files() -> None:
    """Said at once: a start that runs out of them may fail anywhere."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _MIN_FILES:
        raise ConfigError(
            f"this process may open {most} files at once, it needs {_MIN_FILES} and one more for "
            "each connection; raise the limit, as with 'ulimit -n 4096'"
        )


def own_gpus(index: int, count: int) -> dict[str, str]:
    """The environment of a child that sees, of our GPUs, only the `index`-th `count`."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    first, after = index * count, (index + 1) * count
    names = seen.split(",")[first:after] if seen else map(str, range(first, after))
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def placed_gpus(local_rank: int, count: int) -> dict[str, str]:
    """The same for what a launcher has started, the `local_rank`-th on its node: it may see GPUs of
    its own, or all of the node."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    has_own = seen is not None and len(seen.split(",")) <= count
    return own_gpus(0 if has_own else local_rank, count)


def own_gpu_index(name: str) -> int:
    """Of a GPU that others call so, among those that we see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",").index(name) if seen else int(name)


class Child:
    """One `python -m module`, by `child`. `on_exit(code)`: in a thread, when it ends by itself.

    Why it did so, an exception or the text given to `sys.exit`, comes through a pipe into our log.
    """

    def __init__(
        self,
        module: str,
        task: Mapping[str, Any],
        name: str,
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] = {},
    ) -> None:
        self.name = name
        self._stopping = False
        self._on_exit = on_exit
        self._reason_fd, reason_fd = os.pipe()
        # A session of its own: Ctrl+C reaches the parent alone, which then stops its children in
        # order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.ipc.child", str(reason_fd), module],
            stdin=subprocess.PIPE,
            env={**_DEFAULT_ENV, **os.environ, **env},
            start_new_session=True,
            pass_fds=(*pass_fds, reason_fd),
        )
        os.close(reason_fd)
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
        os.set_blocking(self._reason_fd, False)  # a process that it has left behind may hold it
        try:
            reason = os.read(self._reason_fd, _MAX_REASON_BYTES).decode(errors="replace")
        except BlockingIOError:
            reason = ""
        os.close(self._reason_fd)
        if not self._stopping:
            # With 0 it left because we are leaving.
            level = logging.ERROR if code else logging.DEBUG
            said = f": {reason}" if reason else ""
            _log.log(level, "%s ended by itself with code %d%s", self.name, code, said)
            self._on_exit(code)

    def ask_to_leave(self) -> None:
        """Close the child's stdin; its end is then no surprise."""
        self._stopping = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def kill(self) -> None:
        """At once, for a child that has nothing to put in order."""
        self.ask_to_leave()
        self._process.kill()

    def kill_unasked(self) -> None:
        """A child that hangs: its end counts as its own."""
        self._process.kill()

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to leave, wait, then kill."""
        self.ask_to_leave()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            _log.warning("%s does not stop, it is killed", self.name)
            self._process.kill()
            self._process.wait()


class ForkedWorkers:
    """Forks of this process for later, one for each task, which `act` is then given.

    To be made while there is one thread and no CUDA context: no fork could use another. A first
    fork waits for the tasks and makes the others. All of them leave when this process does.
    """

    def __init__(self, act: Callable[[dict[str, Any]], None]) -> None:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(writing)
            _leave_after(partial(_fork_workers, reading, act))
        os.close(reading)
        self._writing = writing

    def run(self, tasks: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        """Returns when all have left; what then still runs is killed. May be called once."""
        line = memoryview(msgspec.json.encode({"tasks": tasks}) + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._writing, line) :]
        deadline, has_left = time.monotonic() + timeout_s, False
        while not has_left and time.monotonic() < deadline:
            time.sleep(0.01)
            has_left = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.close(self._writing)
        if not has_left:
            os.waitpid(self._pid, 0)

    def dismiss(self) -> None:
        """There are no tasks."""
        os.close(self._writing)
        os.waitpid(self._pid, 0)


def _fork_workers(tasks_fd: int, act: Callable[[dict[str, Any]], None]) -> None:
    os.setpgid(0, 0)
    try:
        tasks = read_task(tasks_fd)["tasks"]
    except EOFError:
        return
    pids = []
    for task in tasks:
        if (pid := os.fork()) == 0:
            _leave_after(partial(act, task))
        pids.append(pid)
    on_parent_exit(partial(os.killpg, 0, signal.SIGKILL), tasks_fd)
    for pid in pids:
        os.waitpid(pid, 0)


def _leave_after(act: Callable[[], None]) -> NoReturn:
    """What its parent would do at its end is not for a fork to do."""
    code = 1
    try:
        act()
        code = 0
    except Exception:
        _log.exception("a forked worker failed")
    finally:
        os._exit(code)


def read_task(fd: int = 0) -> dict[str, Any]:
    """In the child, which has imported what it needs: the task its parent gave."""
    gc.freeze()
    gc.enable()
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(fd, 1 << 16)):
            raise EOFError("the parent left before it gave a task")
        line += part
    return dict(msgspec.json.decode(line))


def on_parent_exit(act: Callable[[], None], fd: int = 0) -> None:
    """In the child: call `act` once the parent closes our stdin, on purpose or by dying."""

    def wait() -> None:
        # Not through sys.stdin: its lock would be held by this thread when the process ends.
        while os.read(fd, 4096):
            pass
        act()

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
