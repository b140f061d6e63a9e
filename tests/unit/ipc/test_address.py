"""Folders of sockets: found a place for, and removed when their process is gone, and only then."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.ipc import address as places
from penstock.ipc.address import address, private_folder, remove
from penstock.ipc.channel import Receiver
from penstock.ipc.messages import ToEngine

HOLD = "from penstock.ipc.address import private_folder as f; print(f(), flush=True); input()"


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR for this process and those it starts, the only place that is looked at."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(places, "_OTHERS", ())
    return folder


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not(
    temporary: Path,
) -> None:
    live, used = holder()
    dead, left = holder()
    (left / "engine-1-2").touch()
    dead.kill()
    dead.wait()
    assert left.is_dir()
    own = Path(private_folder())
    assert not left.exists() and used.is_dir() and own.is_dir()
    again = Path(private_folder())
    assert own.is_dir() and used.is_dir()
    for folder in (own, again):
        remove(str(folder))
        assert not folder.exists()
    live.kill()
    live.wait()


def test_what_others_called_like_it_is_left_alone(temporary: Path) -> None:
    (temporary / "penstock-file").touch()
    (temporary / "penstock-new").mkdir()  # no lock yet: it may be in the making
    victim = temporary / "somebody"
    victim.mkdir()
    (victim / "lock").touch()
    (temporary / "penstock-link").symlink_to(victim)
    linked = temporary / "penstock-linked-lock"
    linked.mkdir()
    (linked / "lock").symlink_to(victim / "lock")
    before = sorted(temporary.rglob("*"))
    remove(private_folder())
    assert sorted(temporary.rglob("*")) == before


def test_the_folder_of_another_user_is_left_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, left = holder()
    dead.kill()
    dead.wait()
    me = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(places.os, "getuid", lambda: me + 1)
        remove(private_folder())
    assert left.is_dir()


def test_a_folder_is_for_this_user_alone(temporary: Path) -> None:
    folder = private_folder()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    remove(folder)


@pytest.mark.parametrize("length", [30, 60, 90, 200])
def test_a_long_tmpdir_is_passed_over(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A Unix socket's path takes some hundred bytes, and TMPDIR may be longer."""
    monkeypatch.setattr(places, "_OTHERS", ("/tmp",))
    long = temporary / ("d" * (length - len(str(temporary)) - 1))
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = private_folder()
    assert Path(folder).parent == (long if length < 64 else Path("/tmp"))
    assert not list(long.iterdir()) or Path(folder).parent == long
    receiver = Receiver(address(folder, "engine"), ToEngine)
    receiver.close()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"{folder}/rank1023-4194304-9999")
    remove(folder)


def test_without_any_place_the_error_says_what_to_set(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("d" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ConfigError, match=r"too long a path.*set TMPDIR to a short path"):
        private_folder()
    monkeypatch.setattr(places, "_OTHERS", ("/no/such/folder",))
    with pytest.raises(ConfigError, match="No such file or directory"):
        private_folder()
