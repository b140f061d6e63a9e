"""Installs Penstock into a virtual environment and says how far it is: python3 tools/install.py DIR

With --dev also what tests and checks need. Standard library only. What pip says goes to
DIR/install.log and is shown when it fails.
"""

from __future__ import annotations  # an older Python must be able to say that it is too old

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MIN_PYTHON = (3, 11)
_POLL_S = 0.2
_LINE_S = 15.0  # between two lines where there is no terminal
_SILENT_S = 5.0  # the index should have answered by then
_NO_ANSWER = "the package index does not answer, trying again"
_UNREACHABLE = (
    "the package index cannot be reached; check the network and pip's configuration "
    "(pip's own words: {log})"
)
# Several GB that a machine without a GPU has no use for; said before they are fetched.
_CUDA_WARNING = """\
No GPU was found here, and this PyTorch comes with CUDA: several GB. PyTorch's index of CPU wheels
(its address is on pytorch.org, "Get started", Compute Platform CPU) has one of 200 MB: press Ctrl+C
and run make again with TORCH_INDEX=ADDRESS."""
_MAX_TAIL_BYTES = 4096
_AT_WORK = re.compile(
    rb"(?:Collecting (?P<collecting>[\w.-]+)|(?:Downloading|Using cached) (?P<file>\S+)"
    rb"|(?P<retrying>Retrying \()"
    rb"|(?P<placing>Installing collected packages)|(?P<building>Building \S+ for \S+"
    rb"|Installing build dependencies))"
)
_ARRIVED = re.compile(rb"^ *(?:Downloading|Using cached|Processing) ", re.MULTILINE)
_NO_CONNECTION = re.compile(rb"Retrying \(|Failed to establish|ConnectionError|ConnectTimeout")
_CUDA_PACKAGE = re.compile(rb"(?:Collecting|Downloading|Using cached) (?:\S*/)?nvidia[-_]")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the virtual environment, created if need be")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--torch_index", help="package index for PyTorch alone, e.g. of CPU wheels")
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    if sys.version_info < MIN_PYTHON:
        found, needed = (".".join(map(str, one[:2])) for one in (sys.version_info, MIN_PYTHON))
        print(f"Python {needed} or newer is needed, this is {found}; name one: make PYTHON=...")
        return 2
    begun_at = time.monotonic()
    python, log = folder / "bin" / "python", folder / "install.log"
    if not python.exists():
        print(f"creating {folder}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
    log.unlink(missing_ok=True)
    steps = (
        ("PyTorch", (*(("--index-url", args.torch_index) if args.torch_index else ()), "torch")),
        # With the Python names of TensorRT-LLM: this environment is ours, the real one is not here.
        ("Penstock", ("-e", ".[dev]" if args.dev else ".", "-e", "./compat")),
    )
    for number, (name, packages) in enumerate(steps, start=1):
        progress = Progress(f"installing {name} ({number}/{len(steps)})")
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "--progress-bar", "off", "-c", "constraints.txt", *packages]
        status = run(command, log, progress, warns_of_cuda=not has_gpu())
        if status:
            progress.end("failed")
            print(f"\ncannot install {name}: {why(log)}", flush=True)
            return status
        progress.end("done")
    print(f"installed in {time.monotonic() - begun_at:.0f} s; the command is {folder}/bin/penstock")
    return 0


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def run(command: Sequence[str], log: Path, progress: Progress, warns_of_cuda: bool) -> int:
    """pip's exit code; its output is added to `log`."""
    with log.open("ab") as said:
        begin = said.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress.show(at_work_on(log))
                if warns_of_cuda and _CUDA_PACKAGE.search(log.read_bytes(), begin):
                    warns_of_cuda = False
                    progress.say(_CUDA_WARNING)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return process.returncode


def why(log: Path) -> str:
    """Why pip failed. Where nothing could be fetched, its last words blame versions instead."""
    text = log.read_bytes()
    last_arrival = max((found.start() for found in _ARRIVED.finditer(text)), default=0)
    if _NO_CONNECTION.search(text, last_arrival):
        return _UNREACHABLE.format(log=log)
    sys.stdout.write(text.decode("utf-8", errors="replace"))
    return f"pip's own words are above and in {log}"


def at_work_on(log: Path) -> str:
    """What pip's last lines say that it does, in few words."""
    with log.open("rb") as said:
        said.seek(max(0, said.seek(0, os.SEEK_END) - _MAX_TAIL_BYTES))
        found = list(_AT_WORK.finditer(said.read()))
    if not found:
        return ""
    last = {name: text.decode(errors="replace") for name, text in found[-1].groupdict(b"").items()}
    if last["file"]:
        return "fetching " + last["file"].rpartition("/")[2].partition("-")[0]
    if last["collecting"]:  # next it says what it fetches, as soon as the index has answered
        is_silent = time.time() - log.stat().st_mtime > _SILENT_S
        return _NO_ANSWER if is_silent else "looking for " + last["collecting"]
    if last["retrying"]:
        return _NO_ANSWER
    return "placing the files" if last["placing"] else "building"


class Progress:
    """One line that is written anew on a terminal; elsewhere a line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun_at = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self._next_line_at = self._begun_at
        self._shown = ""
        self.show("")

    def show(self, what: str) -> None:
        now = time.monotonic()
        is_news = what != self._shown and what == _NO_ANSWER  # not to be kept back
        self._shown = what
        if self._is_terminal:
            self._write("\r\033[K" + self._line(what))
        elif now >= self._next_line_at or is_news:
            self._next_line_at = now + _LINE_S
            self._write(self._line(what) + "\n")

    def say(self, text: str) -> None:
        """Lines that stay."""
        self._write(("\r\033[K" if self._is_terminal else "") + text + "\n")

    def end(self, how: str) -> None:
        self.say(self._line(how))

    def _line(self, what: str) -> str:
        elapsed_s = time.monotonic() - self._begun_at
        return f"{self._title}, {elapsed_s:.0f} s{': ' if what else ''}{what}"[:79]

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on")
        sys.exit(130)
