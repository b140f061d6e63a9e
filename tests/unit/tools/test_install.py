"""`make setup` says how far it is, on a terminal and elsewhere; if it fails, what pip said."""

import importlib.util
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "install.py"
NOISE = "WARNING: something nobody needs to see"
PIP = f"""#!/bin/sh
echo "$*" >> {{folder}}/commands
echo "{NOISE}"
echo "Collecting torch"
echo "  Downloading a.b/torch-2.13.0-cp311.whl (180 MB)"
sleep 0.5
case "$*" in *"$FAILS"*) echo "ERROR: no such wheel" >&2; exit 3;; esac
"""
# What pip says where no host can be reached: first of the connection, then of versions.
OFFLINE = """#!/bin/sh
echo "Collecting torch==2.13.0 (from -c constraints.txt (line 3))"
echo "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by \
'NewConnectionError(Temporary failure in name resolution)': /simple/torch/"
sleep 0.5
echo "ERROR: ResolutionImpossible: conflicting dependencies"
exit 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A virtual environment whose python is a script that talks like pip."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(PIP.format(folder=tmp_path))
    python.chmod(0o755)
    return tmp_path


def install(
    folder: Path, *arguments: str, fails: str = "nothing", **env: str
) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    env = os.environ | {"FAILS": fails} | env
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, env=env, timeout=240, check=False, **said)


def test_without_a_terminal_there_are_a_few_lines_with_times_and_no_word_of_pip(folder):
    done = install(folder)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "installing PyTorch (1/2), 0 s"
    assert "installing Penstock (2/2), 0 s" in lines
    assert lines[-1].endswith(f"the command is {folder}/bin/penstock")
    assert len(lines) == 5 and NOISE not in done.stdout
    assert NOISE in (folder / "install.log").read_text()


def test_on_a_terminal_one_line_is_written_anew(folder):
    ours, theirs = pty.openpty()
    command = [sys.executable, str(SCRIPT), str(folder)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"FAILS": "-"}):
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # how a terminal says that nobody writes any more
            pass
    os.close(ours)
    assert re.search(rb"\r\x1b\[Kinstalling PyTorch \(1/2\), \d+ s: fetching torch\r", shown)


def test_a_failure_shows_the_whole_log_and_passes_the_status_on(folder):
    done = install(folder, "--dev", fails="-e .[dev]")
    assert done.returncode == 3
    assert re.search(r"^installing PyTorch \(1/2\), \d+ s: done$", done.stdout, re.MULTILINE)
    assert NOISE in done.stdout and "ERROR: no such wheel" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("cannot install Penstock: ")


def script():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_old_python_is_named(folder, monkeypatch, capsys):
    module = script()
    monkeypatch.setattr(module.sys, "version_info", (3, 9, 2))
    assert module.main([str(folder)]) == 2
    assert "Python 3.11 or newer is needed, this is 3.9" in capsys.readouterr().out


def test_serving_gets_no_packages_of_tests_and_torch_alone_has_an_index_of_its_own(folder):
    assert install(folder, "--torch_index", "http://cpu.example/").returncode == 0
    torch, penstock = (folder / "commands").read_text().splitlines()
    assert torch.endswith("-c constraints.txt --index-url http://cpu.example/ torch")
    assert penstock.endswith("-c constraints.txt -e . -e ./compat")
    assert install(folder, "--dev").returncode == 0
    assert (folder / "commands").read_text().endswith("-e .[dev] -e ./compat\n")


def test_an_index_that_cannot_be_reached_is_named_not_a_conflict_of_versions(folder):
    (folder / "bin" / "python").write_text(OFFLINE)
    done = install(folder)
    assert done.returncode == 1
    assert "the package index does not answer, trying again" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("cannot install PyTorch: the package index cannot be reached; check")
    assert str(folder / "install.log") in last
    assert "ResolutionImpossible" not in done.stdout


def test_a_failure_after_an_index_answered_again_is_shown_as_pip_tells_it(folder):
    fetched = 'echo "  Downloading torch-2.13.0.whl (180 MB)"; sleep 0.5'
    (folder / "bin" / "python").write_text(OFFLINE.replace("sleep 0.5", fetched))
    done = install(folder)
    assert "ResolutionImpossible" in done.stdout
    assert "pip's own words are above" in done.stdout.splitlines()[-1]


def test_an_index_that_accepts_and_says_nothing_is_told_after_seconds(monkeypatch, tmp_path):
    module, log = script(), tmp_path / "install.log"
    log.write_text("Collecting torch==2.13.0\n")
    assert module.at_work_on(log) == "looking for torch"
    os.utime(log, (0, log.stat().st_mtime - 6))
    assert module.at_work_on(log).startswith("the package index does not answer")


def test_gigabytes_of_cuda_are_announced_once_where_there_is_no_gpu(folder, tmp_path):
    python = folder / "bin" / "python"
    python.write_text('#!/bin/sh\necho "Collecting nvidia-cublas (from torch)"\n' + "sleep 0.5\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "sleep"):
        (tools / name).symlink_to(f"/bin/{name}")
    if not Path("/proc/driver/nvidia/version").exists():
        done = install(folder, PATH=str(tools))
        assert done.stdout.count("this PyTorch comes with CUDA: several GB") == 2  # of each step
        assert "TORCH_INDEX=" in done.stdout
    (tools / "nvidia-smi").touch(mode=0o755)
    assert "CUDA" not in install(folder, PATH=str(tools)).stdout
