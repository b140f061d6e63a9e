"""A real terminal for tests: tmux types and pastes, and its screen is read back."""

import subprocess
import tempfile
import time
from pathlib import Path

import penstock

WIDTH = 60
_AND_THEN = 'trap : INT; "$@"; echo "ended with status $?"; exec sleep 600'


class Screen:
    """One tmux server with one window; opened again it is another one."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._socket = ""

    def open(self, *command: str) -> None:
        self._socket = tempfile.mktemp(dir="/tmp", prefix="tmux-")  # the path of a socket is short
        source = Path(penstock.__file__).parents[1]
        environment = (f"PENSTOCK_HOME={self._home}", f"PYTHONPATH={source}")
        given = [word for one in environment for word in ("-e", one)]
        size = ("-x", str(WIDTH), "-y", "40")
        self._tmux("new-session", "-d", *size, *given, "sh", "-c", _AND_THEN, "sh", *command)

    def keys(self, *names: str) -> None:
        self._tmux("send-keys", "--", *names)

    def paste(self, text: str) -> None:
        self._tmux("set-buffer", "--", text)
        self._tmux("paste-buffer", "-p", "-d")

    @property
    def text(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-200")

    def wait_for(self, *parts: str, within_s: float = 240.0) -> str:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            seen = self.text
            if all(part in seen for part in parts):
                return seen
            time.sleep(0.05)
        raise AssertionError(f"{parts} did not appear on:\n{self.text}")

    def close(self) -> None:
        command = ["tmux", "-S", self._socket, "kill-server"]
        subprocess.run(command, capture_output=True, check=False)
        Path(self._socket).unlink(missing_ok=True)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", self._socket, "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
