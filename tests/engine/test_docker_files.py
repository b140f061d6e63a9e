"""deploy/docker: the Dockerfile passes its linter, its scripts do what they say; none is built."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_dockerfile_has_nothing_for_the_linter_to_say():
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint on this machine")
    done = subprocess.run(
        [hadolint, "--no-color", "-"], input=DOCKERFILE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_and_is_in_the_context():
    context = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in context if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", DOCKERFILE)
        for source in line.replace("--chmod=755 ", "").split()[:-1]
    ]
    assert len(copied) == 8
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in allowed), source
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert package_data["readme"] in copied and package_data["license-files"] == ["LICENSE"]


def test_every_switch_of_make_docker_is_an_argument_of_the_build():
    [names] = re.findall(r"(?m)^BUILD_ARGS := (.*)$", MAKEFILE)
    declared = set(re.findall(r"(?m)^ARG (\w+)", DOCKERFILE))
    assert set(names.split()) | {"VERSION", "REVISION"} == declared


def test_labels_health_and_entry_point_are_those_of_an_image_for_others():
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", DOCKERFILE))
    assert labels == {"title", "description", "licenses", "version", "revision", "base.name"}
    for name in ("HEALTHCHECK", "ENTRYPOINT", "CMD", "EXPOSE 8000"):
        assert re.search(rf"(?m)^{name}", DOCKERFILE)
    for name in ("entrypoint.sh", "healthcheck.py"):
        assert f"/opt/penstock/docker/{name}" in DOCKERFILE
        assert os.access(DOCKER / name, os.X_OK)


@pytest.mark.parametrize(
    ("uid", "owner", "becomes"),
    [
        (0, 1234, "setpriv --reuid 1234 --regid 1234 --clear-groups trtllm-serve tiny"),
        (0, 0, "trtllm-serve tiny"),
        (4321, 1234, "trtllm-serve tiny"),
    ],
)
def test_the_server_runs_as_the_owner_of_the_cache(tmp_path, uid, owner, becomes):
    """With stand-ins for the commands that look and that change the user."""
    (tmp_path / ".cache").mkdir()
    for name, does in (
        ("id", f"echo {uid}"),
        ("stat", f"echo {owner}"),
        ("setpriv", 'echo "setpriv $@"'),
        ("trtllm-serve", 'echo "trtllm-serve $@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [DOCKER / "entrypoint.sh", "trtllm-serve", "tiny"],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == becomes + "\n"
    assert ("belongs to root" in done.stderr) == (uid == owner == 0)


@pytest.fixture(scope="module")
def healthcheck() -> Any:
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeConnection:
    """A server that is well on port 9000 of 127.0.0.1."""

    asked: tuple[str, int] = ("", 0)

    def __init__(self, host: str, port: int, timeout: float) -> None:
        type(self).asked = (host, port)

    def request(self, method: str, path: str) -> None:
        assert (method, path) == ("GET", "/health")
        if self.asked != ("127.0.0.1", 9000):
            raise ConnectionRefusedError

    def getresponse(self) -> Any:
        return type("Response", (), {"status": 200})


@pytest.mark.parametrize(
    ("words", "asked", "is_well"),
    [
        (("trtllm-serve", "m", "--host", "0.0.0.0", "--port", "9000"), ("127.0.0.1", 9000), True),
        (("penstock", "serve", "m", "--port=1", "--port=9000", "--host=127.0.0.1"),
         ("127.0.0.1", 9000), True),
        (("/sbin/docker-init", "--", "x.sh", "trtllm-serve", "m"), ("localhost", 8000), False),
        (("bash",), ("", 0), True),
    ],
)  # fmt: skip
def test_the_health_check_asks_where_the_server_listens(
    healthcheck: Any, monkeypatch: Any, words: Sequence[str], asked: tuple, is_well: bool
) -> None:
    monkeypatch.setattr(healthcheck.http.client, "HTTPConnection", FakeConnection)
    FakeConnection.asked = ("", 0)
    assert healthcheck.is_well("\0".join(words) + "\0") is is_well
    assert FakeConnection.asked == asked
