"""The Makefile passes on what it is given, and refuses what it would not read."""

import gzip
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


_OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS")  # if it runs these


def dry_run(*arguments: str) -> subprocess.CompletedProcess:
    return make("-n", *arguments)


def make(*arguments: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in _OF_MAKE} | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["serve"], "penstock serve"),
        (["serve", "TP=8"], "penstock serve --tp_size 8"),
        (
            ["serve", "MODEL=some/model", "TP=2", "ARGS=--port 8001"],
            "penstock serve some/model --tp_size 2 --port 8001",
        ),
        (["serve", "MODEL=m", "PORT=9000"], "penstock serve m --port 9000"),
        (["bench", "HOST=10.0.128.193"], "bash bench.sh -H 10.0.128.193"),
        (
            ["bench", "HOST=10.0.128.193", "BENCH_TYPE=throughput,prefill"],
            "bash bench.sh -H 10.0.128.193 --type throughput,prefill",
        ),
        (
            ["bench", "PORT=9000", "MODEL=m", "IMAGE=i:latest", "ARGS=-o out -- --num-prompts 8"],
            "bash bench.sh -p 9000 -m m -i i:latest -o out -- --num-prompts 8",
        ),
        (["bench-engine", "ARGS=--quick"], "benchmarks/table.py --quick"),
        (
            ["test", "ARGS=-k config"],
            "pytest -n 3 --dist loadfile --no-loadscope-reorder --reruns 1 -rR -k config",
        ),
    ],
)
def test_variables_reach_the_command(arguments, command):
    done = dry_run(*arguments)
    assert done.returncode == 0, done.stderr
    last = " ".join(done.stdout.replace("\\\n", " ").splitlines()[-1].split())
    assert last.endswith(command)


@pytest.mark.parametrize(
    ("target", "variable"),
    [
        *(("serve", "HOST"), ("serve", "BENCH_TYPE"), ("bench", "TP"), ("bench-engine", "HOST")),
        *(("bench-engine", "MODEL"), ("test", "TP"), ("check", "ARGS"), ("docker", "MODEL")),
    ],
)
def test_a_variable_that_the_target_does_not_read_is_an_error(target, variable):
    done = dry_run(target, f"{variable}=x")
    assert done.returncode != 0
    assert f"'make {target}' does not read {variable}; it reads PYTHON VENV" in done.stderr
    assert ("go into ARGS" in done.stderr) == (target != "check")


def test_an_image_is_run_with_the_gpus_the_cache_and_the_port(tmp_path):
    """As the cheat sheet's "Using Docker (via Makefile)"; nothing is installed for it."""
    record = tmp_path / "arguments"
    (tmp_path / "docker").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {record}\n')
    (tmp_path / "docker").chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    model = "Qwen/Qwen2.5-14B-Instruct"
    path, home = f"{tmp_path}:{os.environ['PATH']}", str(tmp_path / "home")
    asked = ["serve", "IMAGE=tensorrt-llm-serve:latest", f"MODEL={model}", "TP=8"]
    for more, port, tail in (
        ([], 8000, []),
        (["PORT=9000", "ARGS=--seed 3"], 9000, ["--seed", "3"]),
    ):
        done = make(*asked, *more, folder=tmp_path, PATH=path, HOME=home)
        assert done.returncode == 0, done.stderr
        arguments = record.read_text().splitlines()
        image = arguments.index("tensorrt-llm-serve:latest")
        assert arguments[:6] == ["run", "--rm", "--init", "--gpus", "all", "--ipc"]
        options = list(itertools.pairwise(arguments[:image]))
        assert ("-p", f"{port}:8000") in options
        assert ("-v", f"{home}/.cache:/root/.cache:rw") in options
        assert arguments[image + 1 :] == (
            ["penstock", "serve", model, "--host", "0.0.0.0", "--tp_size", "8", *tail]
        )
    assert not (tmp_path / ".venv").exists()


def test_an_image_is_built_and_saved(tmp_path):
    """With a stand-in for podman, which docker may be replaced by."""
    record = tmp_path / "arguments"
    stand_in = tmp_path / "podman"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {record}\n[ "$1" != save ] || echo layers\n')
    stand_in.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    flags = ["DOCKER=podman", "EFA_VERSION=1.43.2", "ARGS=--no-cache"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = make("docker", *flags, folder=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    built = record.read_text()
    assert built.startswith("build -f deploy/docker/Dockerfile -t tensorrt-llm-serve:latest ")
    assert "--build-arg VERSION=0.1.0 --build-arg REVISION=" in built
    assert built.endswith("--build-arg EFA_VERSION=1.43.2 --no-cache .\n")

    tarball = tmp_path / "tensorrt-llm-serve-latest.tar.gz"
    assert make("save", "DOCKER=podman", folder=tmp_path, PATH=path).returncode == 0
    assert gzip.decompress(tarball.read_bytes()) == b"layers\n"
    named = ("save", "DOCKER=podman", "IMAGE=host/penstock:1")
    assert make(*named, folder=tmp_path, PATH=path).returncode == 0
    assert (tmp_path / "penstock-1.tar.gz").exists()

    tarball.unlink()
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    assert make("save", "DOCKER=podman", folder=tmp_path, PATH=path).returncode != 0
    assert not tarball.exists()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile with an install script and commands that write down how they were called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "compat").mkdir()
    for name in ("pyproject.toml", "compat/pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "install.py").write_text(
        "import os, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1], 'bin')\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "print(' '.join(['install', *sys.argv[2:]]), file=open('called', 'a'))\n"
        "for name in ('penstock', 'python', 'ruff', 'mypy', 'lint-imports'):\n"
        "    (folder / name).write_text('#!/bin/sh\\necho ${0##*/} >> called\\n')\n"
        "    os.chmod(folder / name, 0o755)\n"
    )
    return tmp_path


def called(clone: Path, *targets: str) -> list[str]:
    (clone / "called").unlink(missing_ok=True)
    for target in targets:
        done = make(*target.split(), folder=clone)
        assert done.returncode == 0, done.stderr
    return (clone / "called").read_text().splitlines()


def test_serving_does_not_wait_for_the_packages_of_the_tests(clone):
    assert called(clone, "serve", "serve") == ["install", "penstock", "penstock"]
    assert called(clone, "test") == ["install --dev", "python"]


def test_one_installation_is_enough_for_checks_tests_and_serving(clone):
    first = called(clone, "check", "test", "setup", "serve")
    assert [line for line in first if line.startswith("install")] == ["install --dev"]
    os.utime(clone / "constraints.txt", (2**32, 2**32))
    assert called(clone, "serve")[0] == "install"


def test_the_index_of_torch_reaches_the_installation(clone):
    assert called(clone, "serve TORCH_INDEX=http://cpu.example/")[0] == (
        "install --torch_index http://cpu.example/"
    )
