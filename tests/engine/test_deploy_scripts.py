"""bench.sh and test.sh against a real server, and against one that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server
from waiting import free_port

ROOT = Path(__file__).parents[2]
SHORT = ("--", "--num-prompts", "2", "--random-input-len", "20", "--random-output-len", "3")


@pytest.fixture(scope="module")
def server():
    with Server("tiny", num_threads=1, kv_cache_config={"max_tokens": 8192}) as server:
        yield server


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A PATH whose `penstock` is the one under test."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "penstock"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def call(path: str, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / script), *map(str, arguments)]
    env = os.environ | {"PATH": path}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_all_eight_requests_are_answered(server, path):
    done = call(path, "test.sh", "-H", "127.0.0.1", "-p", server.port)
    assert done.stdout.splitlines()[-1] == "Results: 8 passed, 0 failed"
    assert done.returncode == 0


def test_a_server_that_is_not_there_fails_all_of_them(path):
    done = call(path, "test.sh", "-H", "127.0.0.1", "-p", free_port(), "-m", "m")
    assert done.stdout.splitlines()[-1] == "Results: 0 passed, 8 failed"
    assert done.returncode == 1


def test_every_type_of_load_leaves_its_results(server, path, tmp_path):
    talk = [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": "It is seven."}]
    conversations = tmp_path / "talk.json"
    conversations.write_text(json.dumps([{"conversations": talk}]))
    out = tmp_path / "out"
    where = ("-H", "127.0.0.1", "-p", server.port, "-o", out, "-d", conversations)
    done = call(path, "bench.sh", *where, *SHORT)
    assert done.returncode == 0, done.stderr
    names = {file.stem for file in out.glob("*.json")}
    assert names == {
        "throughput",
        *(f"prefill_{n}" for n in (128, 512, 1024, 2048, 4096)),
        *(f"decode_{n}" for n in (128, 256, 512, 1024)),
        *("latency_128_128", "latency_512_256"),
        *(f"concurrency_{n}" for n in (1, 4, 16, 64, 256)),
        *("sharegpt", "sharegpt_4"),
    }
    assert done.stdout.count("Serving Benchmark Result") == len(names)
    record = json.loads((out / "concurrency_64.json").read_text())
    assert (record["model_id"], record["max_concurrency"]) == ("tiny", 64)
    assert (record["completed"], record["total_output_tokens"]) == (2, 6)
    assert json.loads((out / "throughput.json").read_text())["max_concurrency"] is None


def test_only_the_types_named_run(server, path, tmp_path):
    where = ("--host", "127.0.0.1", "--port", server.port, "--output", tmp_path)
    done = call(path, "bench.sh", *where, "--type", "latency,throughput", *SHORT)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.json"))) == 3
    done = call(path, "bench.sh", *where, "--type", "speed")
    assert done.returncode == 2
    assert "unknown type 'speed'" in done.stderr


def test_a_run_that_fails_shows_in_the_exit_code_and_ends_no_other(server, path, tmp_path):
    where = ("-H", "127.0.0.1", "-p", server.port, "-o", tmp_path, "-t", "sharegpt,latency")
    done = call(path, "bench.sh", *where, "-d", "/no/where", *SHORT)
    assert done.returncode == 1
    assert "sharegpt_4 failed" in done.stderr
    assert {file.stem for file in tmp_path.glob("*.json")} == {"latency_128_128", "latency_512_256"}


def test_an_image_runs_the_client_in_a_container(server, path, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "docker $@"\n')
    docker.chmod(0o755)
    where = (
        "-H",
        "10.0.0.1",
        "-m",
        "m",
        "-i",
        "penstock:latest",
        "-o",
        tmp_path,
        "-t",
        "throughput",
    )
    done = call(f"{tmp_path}:{path}", "bench.sh", *where)
    assert done.returncode == 0
    assert "--network host" in done.stdout
    assert (
        "penstock:latest penstock bench serve --host 10.0.0.1 --port 8000 --model m" in done.stdout
    )


def test_the_image_in_a_tarball_is_loaded_first(path, tmp_path):
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/sh
echo "$@" >> {calls}
case $1 in load) echo "Loaded image: tensorrt-llm-serve:latest" ;; esac
"""
    )
    docker.chmod(0o755)
    where = ("-H", "10.0.0.1", "-m", "m", "-o", tmp_path / "out", "-t", "throughput")
    image = tmp_path / "tensorrt-llm-serve-latest.tar.gz"
    done = call(f"{tmp_path}:{path}", "bench.sh", *where, "-i", image)
    assert done.returncode == 1
    assert f"there is no file {image}" in done.stderr
    assert not calls.exists()

    image.write_bytes(b"")
    done = call(f"{tmp_path}:{path}", "bench.sh", *where, "-i", image)
    assert done.returncode == 0, done.stderr
    loaded, ran = calls.read_text().splitlines()
    assert loaded == f"load -i {image}"
    assert ran.startswith("run --rm --network host")
    assert " tensorrt-llm-serve:latest penstock bench serve --host 10.0.0.1 " in ran

    docker.write_text("#!/bin/sh\necho 'no daemon' >&2\nexit 1\n")
    done = call(f"{tmp_path}:{path}", "bench.sh", *where, "-i", image)
    assert done.returncode == 1
    assert f"docker cannot load {image}" in done.stderr


def test_the_model_is_the_first_that_is_listed(path, tmp_path):
    """Some servers list more than one, and ids of other things within."""
    listed = {"data": [{"id": "org/a", "permission": [{"id": "perm-1"}]}, {"id": "b"}]}
    for name, says in (("curl", json.dumps(listed)), ("penstock", "penstock $@")):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<END\n{says}\nEND\n")
        (tmp_path / name).chmod(0o755)
    out = ("-o", tmp_path / "out", "-t", "throughput")
    done = call(f"{tmp_path}:{path}", "bench.sh", *out)
    assert "--port 8000 --model org/a --backend" in done.stdout
