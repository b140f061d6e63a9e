"""`--dp_size 2` where a launcher has started a process for each replica: on two network namespaces
as hosts, or on loopback. Engines and nodes die and come back behind one port."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import Hosts, two_hosts
from waiting import free_port, until

# For each line on stdin: so many streams, their tokens; says when all have begun, and how they end.
ASK = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=200)
for line in sys.stdin:
    num_streams, num_tokens = map(int, line.split())
    begun = threading.Barrier(num_streams, action=lambda: print("begun", flush=True), timeout=200)
    def ask(number):
        text = ""
        try:
            for chunk in client.completions.create(
                model="tiny", prompt=f"{number} A story", max_tokens=num_tokens, temperature=0,
                stream=True, extra_body={"ignore_eos": True},
            ):
                text or begun.wait()
                text += chunk.choices[0].text
            return {"text": text}
        except Exception as error:
            return {"error": str(error)}
    with ThreadPoolExecutor(num_streams) as pool:
        print(json.dumps(list(pool.map(ask, range(num_streams)))), flush=True)
"""
METRICS = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"


class Replicas:
    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._port, self._master_port = free_port(), free_port()
        self._processes: dict[int, subprocess.Popen] = {}
        for rank in range(2):
            self.start(rank)
        until(lambda: "is ready on" in self.said(0), what=lambda: self.said(0) + self.said(1))
        command = [*hosts.enter[0], sys.executable, "-c", ASK, f"{self._url}/v1"]
        self._client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def _url(self) -> str:
        return f"http://{self._hosts.address}:{self._port}"

    def start(self, rank: int) -> None:
        """As torchrun does, of a node each with one process."""
        env = os.environ | {
            "PENSTOCK_RANK_SECRET": "0123456789abcdef", "RANK": str(rank), "WORLD_SIZE": "2",
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": self._hosts.address,
            "MASTER_PORT": str(self._master_port),
        }  # fmt: skip
        command = [*self._hosts.enter[rank], sys.executable, "-m", "penstock", "serve", "tiny"]
        command += ["--device", "cpu", "--dp_size", "2", "--host", self._hosts.address]
        command += ["--num_postprocess_workers", "2"]
        command += ["--port", str(self._port)]
        with (self._folder / f"{rank}.log").open("ab") as log:
            self._processes[rank] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def said(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text(errors="replace")

    def begin(self, num_streams: int, num_tokens: int) -> None:
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.write(f"{num_streams} {num_tokens}\n")
        assert self._client.stdout.readline() == "begun\n"

    def ends(self) -> list[dict[str, str]]:
        assert self._client.stdout is not None
        return json.loads(self._client.stdout.readline())

    def num_up(self) -> int:
        command = [*self._hosts.enter[0], sys.executable, "-c", METRICS]
        said = subprocess.run(
            [*command, f"{self._url}/prometheus/metrics"],
            capture_output=True, text=True, check=True, timeout=240,
        )  # fmt: skip
        line = next(one for one in said.stdout.splitlines() if one.startswith("penstock_engines"))
        return int(float(line.split()[-1]))

    def remote_engine(self) -> psutil.Process:
        family = psutil.Process(self._processes[1].pid).children(recursive=True)
        return next(one for one in family if "penstock.engine_process" in one.cmdline())

    def kill_keeper(self) -> None:
        """With its engine, which leaves when it does."""
        engine = self.remote_engine()
        self._processes[1].kill()
        self._processes[1].wait()
        until(lambda: not engine.is_running())

    def stop(self) -> list[int]:
        """The exit codes, after a signal to the first."""
        self._processes[0].send_signal(signal.SIGINT)
        return [one.wait(timeout=240) for one in self._processes.values()]

    def close(self) -> None:
        for process in (*self._processes.values(), self._client):
            process.kill()
            process.wait()


@pytest.fixture
def replicas(tmp_path):
    with two_hosts("loopback" if os.geteuid() else "namespaces") as hosts:
        made = Replicas(hosts, tmp_path)
        try:
            yield made
        finally:
            made.close()


def test_replicas_on_two_nodes_serve_behind_one_port_die_and_come_back(replicas):
    replicas.begin(8, 40)
    first = replicas.ends()
    assert all(one.get("text") for one in first)
    assert replicas.remote_engine().cpu_times().user > 0
    for does_node_leave in (False, True):
        replicas.begin(8, 800)
        if does_node_leave:
            replicas.kill_keeper()
            why = "is out of reach: node"
        else:
            replicas.remote_engine().kill()
            why = "ended by signal 9 on node"
        errors = [one["error"] for one in replicas.ends() if "error" in one]
        # An API server other than the first knows no more than that.
        assert 0 < len(errors) < 8, errors
        assert all(why in one or "the engine process ended; its log" in one for one in errors)
        if does_node_leave:
            assert replicas.num_up() == 1
            replicas.start(1)
        until(lambda: replicas.num_up() == 2, what=lambda: replicas.said(0) + replicas.said(1))
        replicas.begin(8, 40)
        assert replicas.ends() == first
    assert replicas.stop() == [0, 0], replicas.said(0) + replicas.said(1)
