"""run.sbatch: under a real Slurm where there is one, and with stand-ins for srun and docker."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from openai import APIConnectionError, APIError, OpenAI
from waiting import free_port

SCRIPT = Path(__file__).parents[2] / "run.sbatch"
SIBLING = Path(__file__).parents[1] / "siblings" / "qwen2_moe"
TIMEOUT_S = 150
NUM_STREAMS = 32
# Runs what it is given without its own flags; `docker` and `curl` are the test's.
SRUN = """#!/bin/sh
[ "$1" != --help ] || exec echo "no containers here"
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""
DOCKER = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
    "image inspect"*) exit "${ABSENT:-0}" ;;
    run*) exit "${SERVER_CODE:-0}" ;;
    load) cat >/dev/null && echo "Loaded image: tensorrt-llm-serve:latest" ;;
esac
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    serve = "from penstock.cli.main import trtllm_serve; trtllm_serve()"
    launch = "from penstock.cli.llmapi_launch import main; main()"
    for name, text in (
        ("trtllm-serve", f'#!/bin/sh\nexec {sys.executable} -c "{serve}" "$@"\n'),
        ("trtllm-llmapi-launch", f'#!/bin/sh\nexec {sys.executable} -c "{launch}" "$@"\n'),
        ("srun", SRUN),
        ("docker", DOCKER),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(folder: Path, programs: Path, *flags: object, **env: str) -> tuple[int, str, list[str]]:
    """Exit code, what it said, and the calls of docker; within a job of one node."""
    calls = folder / "calls"
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "HOME": str(folder)} | env
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    given |= {"CALLS": str(calls), "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, flags)],
        env=clean | given,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    docker = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, done.stdout + done.stderr, docker


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        ((), {}, "name a model"),
        (("m",), {"SLURM_JOB_ID": ""}, "there is no allocation"),
        (("m",), {}, "tensorrt-llm-serve-latest.tar.gz; 'make docker && make save' write it"),
        (("m", "--image"), {}, "--image wants a value"),
        (("m", "-w", "/no/where"), {}, "there is no folder for --workspace"),
        (("--image", "i:1", "--container-mount", "/no/where", "m"), {}, "no folder /no/where"),
        (
            ("--no-container", "m", "--dp_size", "3"),
            {"SLURM_JOB_NUM_NODES": "2", "MASTER_ADDR": "h"},
            "no multiple of 2 nodes",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(tmp_path, programs, flags, env, says):
    code, said, docker = run(tmp_path, programs, *flags, **env)
    assert code == 2 and says in said
    assert not any(call.startswith("run") for call in docker)


def test_the_image_of_the_workspace_is_loaded_and_runs_with_what_the_job_has(tmp_path, programs):
    image = tmp_path / "tensorrt-llm-serve-latest.tar.gz"
    image.write_bytes(b"")
    flags = ("-w", tmp_path, "--container-mount", tmp_path, "some/model", "--tp_size", "2")
    code, said, docker = run(
        tmp_path, programs, *flags, ABSENT="1", SLURM_STEP_GPUS="2,5", SLURM_JOB_GPUS="0,2,5"
    )
    assert code == 0, said
    inspected, loaded, ran = docker
    assert (inspected, loaded) == (
        "image inspect tensorrt-llm-serve:latest",
        "load",
    )
    assert ran.startswith("run --rm --init --sig-proxy=false --name penstock-7 ")
    assert f"--volume {tmp_path}/.cache:/root/.cache:rw" in ran
    assert f"--volume {tmp_path}:{tmp_path}" in ran
    assert '--gpus "device=2,5"' in ran
    command = "tensorrt-llm-serve:latest trtllm-serve some/model --tp_size 2 --host 0.0.0.0"
    assert ran.endswith(command)
    assert "the server ended with code 0" in said


def test_an_image_that_is_there_is_loaded_again_only_by_force(tmp_path, programs):
    image = tmp_path / "penstock-v1.tar.gz"
    image.write_bytes(b"")
    flags = ("--image", image, "m", "--host", "10.0.0.1", "--port=9000")
    code, said, docker = run(tmp_path, programs, *flags)
    assert code == 0, said
    assert docker[0] == "image inspect penstock:v1"
    assert docker[1].endswith("penstock:v1 trtllm-serve m --host 10.0.0.1 --port=9000")
    (tmp_path / "calls").unlink()
    code, said, docker = run(tmp_path, programs, "--force", *flags, ABSENT="1")
    assert code == 0, said
    assert docker[0] == "image rm --force penstock:v1"
    assert docker[2] == "load"
    assert docker[3] == "tag tensorrt-llm-serve:latest penstock:v1"
    assert docker[4] == "rm --force penstock-7"


def test_a_name_is_pulled_from_its_registry(tmp_path, programs):
    code, said, docker = run(tmp_path, programs, "--image", "host/name:1", "m", ABSENT="1")
    assert code == 0, said
    assert docker[1] == "pull --quiet host/name:1"
    assert " host/name:1 trtllm-serve m " in docker[2]


def test_the_exit_code_is_that_of_the_server(tmp_path, programs):
    code, said, _ = run(tmp_path, programs, "--image", "host/name:1", "m", SERVER_CODE="1")
    assert code == 1 and "the server ended with code 1" in said


def test_on_several_nodes_every_rank_has_a_container_that_knows_its_place(tmp_path, programs):
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "MASTER_ADDR": "10.0.0.1"}
    code, said, docker = run(
        tmp_path,
        programs,
        "--image",
        "host/name:1",
        "m",
        SLURM_PROCID="5",
        SERVER_CODE="9",
        **nodes,
    )
    assert "rank 5 ended with code 9" in said
    assert code == 1  # 9 is no code of the server
    assert "--name penstock-7-5 " in docker[1]
    for name in ("MASTER_ADDR", "PENSTOCK_RANK_SECRET", "SLURM_PROCID", "SLURM_STEP_NODELIST"):
        assert f"--env {name} " in docker[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not os.environ.get("PENSTOCK_TEST_SLURM"):
        pytest.skip("starts daemons of Slurm: PENSTOCK_TEST_SLURM=1 runs it")
    if (why := slurm_cluster.missing()) is not None:
        pytest.skip(why)
    with slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as cluster:
        yield cluster


def wait_for(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def job_env(tmp_path_factory, programs) -> dict[str, str]:
    """With our programs and the real srun on the path."""
    folder = tmp_path_factory.mktemp("job-bin")
    for name in ("trtllm-serve", "trtllm-llmapi-launch"):
        (folder / name).symlink_to(programs / name)
    return {"PATH": f"{folder}:{os.environ['PATH']}:/usr/sbin", "OMP_NUM_THREADS": "1"}


def test_slurm_serves_with_two_ranks_and_scancel_lets_requests_finish(cluster, job_env):
    port = free_port()
    flags = ("--no-container", "tiny", "--tp_size", 2, "--port", port, "--device", "cpu")
    job = cluster.call("sbatch", "--parsable", SCRIPT, *flags, **job_env).strip()
    log = cluster.folder / f"penstock-{job}.log"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    try:
        wait_for(lambda: "run.sbatch: ready: http://" in said(), lambda: said() + cluster.logs())
        assert "2 ranks" in said()
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "What is 3 + 4?"}]
        reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=16)
        assert reply.choices[0].message.content
        stream = client.completions.create(
            model="tiny", prompt="What is 3 + 4?", max_tokens=24, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(stream)
        cluster.call("scancel", job)
        assert [*stream][-1].choices[0].finish_reason == "length"
        wait_for(lambda: "the server ended with code" in said(), said)
        assert "the server ended with code 0" in said()
        wait_for(lambda: cluster.state(job) == "CANCELLED", cluster.logs)
    finally:
        with contextlib.suppress(AssertionError):
            cluster.call("scancel", job)


def stream(client: OpenAI, begun: threading.Barrier) -> str:
    """The error that ends it."""
    chunks = client.completions.create(
        model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=1900, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(chunks)
    begun.wait()
    with pytest.raises(APIError) as found:
        for _ in chunks:
            pass
    return str(found.value)


def test_two_nodes_of_slurm_serve_and_a_dead_rank_ends_every_request(cluster, job_env):
    port = free_port()
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    serve = (SIBLING, "--tp_size", 4, "--port", port, "--device", "cpu")
    place = ("-N", 2, "--ntasks-per-node=2", "--overcommit")

    def answer() -> str:
        reply = client.completions.create(
            model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=16, temperature=0
        )
        return reply.choices[0].text

    job = cluster.call(
        "sbatch", "--parsable", *place, SCRIPT, "--no-container", *serve, **job_env
    ).strip()
    log = cluster.folder / f"penstock-{job}.log"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    try:
        wait_for(lambda: "run.sbatch: ready: http://" in said(), lambda: said() + cluster.logs())
        first = answer()
        assert first
        begun = threading.Barrier(NUM_STREAMS + 1, timeout=TIMEOUT_S)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(stream, client, begun) for _ in range(NUM_STREAMS)]
            begun.wait()
            rank_process(job, 3).kill()
            errors = {one.result() for one in streams}
        assert len(errors) == 1 and "rank 3 on node n1 (127.0.0.1) ended" in errors.pop()
        wait_for(lambda: cluster.state(job) == "FAILED", said)
        assert "the server ended with code 1" in said()
        assert "ExitCode=1:0" in cluster.call("scontrol", "show", "job", job)
    finally:
        with contextlib.suppress(AssertionError):
            cluster.call("scancel", job)
    # As a supervisor does, this time by the wrapper.
    env = job_env | {"MASTER_ADDR": "127.0.0.1", "PENSTOCK_RANK_SECRET": "0123456789abcdef"}
    command = ["srun", "--job-name=again", *place, "trtllm-llmapi-launch", "trtllm-serve", *serve]
    words = [str(word) for word in command]
    again = subprocess.Popen(words, env=cluster.env | env, cwd=cluster.folder)
    try:
        wait_for(lambda: is_ready(client), cluster.logs)
        assert answer() == first
        cluster.call("scancel", "--name=again")
        wait_for(lambda: again.poll() is not None, cluster.logs)
    finally:
        again.kill()
        again.wait()


def test_two_nodes_of_slurm_have_a_replica_each(cluster, job_env):
    port = free_port()
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    serve = ("tiny", "--dp_size", 2, "--tp_size", 2, "--port", port, "--device", "cpu")
    job = cluster.call(
        "sbatch", "--parsable", "-N", 2, SCRIPT, "--no-container", *serve, **job_env
    ).strip()
    log = cluster.folder / f"penstock-{job}.log"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    def ask(number: int) -> str:
        reply = client.completions.create(
            model="tiny", prompt=f"{number} What is 3 + 4?", max_tokens=16, temperature=0
        )
        return reply.choices[0].text

    try:
        wait_for(lambda: "run.sbatch: ready: http://" in said(), lambda: said() + cluster.logs())
        assert "replica 1 starts on node n1" in said()
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(ask, range(8))]
        family = processes_of(job, 1)
        engines = [one for one in family if "penstock.engine_process" in one.cmdline()]
        assert len(engines) == 1 and len(engines[0].children()) == 1  # its second rank
        engines[0].kill()
        wait_for(lambda: "engine 1 is started again" in said(), said)
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(ask, range(8))] == answers
        cluster.call("scancel", job)
        wait_for(lambda: "the server ended with code" in said(), said)
        assert "the server ended with code 0" in said()
    finally:
        with contextlib.suppress(AssertionError):
            cluster.call("scancel", job)


def rank_process(job: str, rank: int) -> psutil.Process:
    (found,) = processes_of(job, rank)
    return found


def processes_of(job: str, rank: int) -> list[psutil.Process]:
    """With those that it has started."""

    def is_it(process: psutil.Process) -> bool:
        env = process.environ()
        return process.name().startswith("python") and (
            env.get("SLURM_JOB_ID"),
            env.get("SLURM_PROCID"),
        ) == (job, str(rank))

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_it(process):
                found.append(process)
    return found


def is_ready(client: OpenAI) -> bool:
    try:
        client.models.list()
    except APIConnectionError:
        return False
    return True
