"""Ranks of torchrun on two nodes: of loopback, and of two network namespaces as hosts."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hosts import Hosts, two_hosts
from waiting import free_port, until

SIBLING = Path(__file__).parents[1] / "siblings" / "qwen2_moe"
NUM_STREAMS = 32
# Says `begun` when every stream has a token, and in the end the different texts or errors.
ASK = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=200)
num_streams = int(sys.argv[3])
begun = threading.Barrier(num_streams, action=lambda: print("begun", flush=True), timeout=200)

def ask(_):
    text = ""
    try:
        for chunk in client.completions.create(
            model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=int(sys.argv[2]), temperature=0,
            stream=True, extra_body={"ignore_eos": True},
        ):
            text or begun.wait()
            text += chunk.choices[0].text
        return {"text": text}
    except Exception as error:
        return {"error": str(error)}

with ThreadPoolExecutor(num_streams) as pool:
    answers = list(pool.map(ask, range(num_streams)))
print(json.dumps([one for i, one in enumerate(answers) if one not in answers[:i]]))
"""


@pytest.fixture
def hosts():
    with two_hosts("loopback" if os.geteuid() else "namespaces") as hosts:
        yield hosts


class Nodes:
    """A torchrun on each of two hosts, with two ranks of one server each."""

    def __init__(self, hosts: Hosts, folder: Path, wrapper: tuple[str, ...] = ()) -> None:
        self._hosts, self._port = hosts, free_port()
        self.logs = [folder / f"node{i}-{self._port}.log" for i in range(2)]
        master = free_port()
        env = os.environ | {"PENSTOCK_RANK_SECRET": "0123456789abcdef", "OMP_NUM_THREADS": "1"}
        env.pop("GLOO_SOCKET_IFNAME", None)  # other tests make process groups in this process
        self.launchers = []
        for node in range(2):
            command = [
                *hosts.enter[node],
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node_rank", str(node), "--nproc_per_node", "2", "--no-python"),
                *("--master_addr", hosts.address, "--master_port", str(master)),
                *wrapper,
                *(sys.executable, "-m", "penstock", "serve", str(SIBLING), "--device", "cpu"),
                *("--tp_size", "4", "--host", hosts.address, "--port", str(self._port)),
            ]
            with self.logs[node].open("wb") as log:
                self.launchers.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-6000:] for log in self.logs)

    def ask(self, num_tokens: int, num_streams: int = 1) -> "subprocess.Popen[str]":
        url = f"http://{self._hosts.address}:{self._port}/v1"
        command = [*self._hosts.enter[0], sys.executable, "-c", ASK, url]
        command += [str(num_tokens), str(num_streams)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def until_ready(self) -> None:
        def is_ready() -> bool:
            assert all(one.poll() is None for one in self.launchers), self.said()
            return "is ready on" in self.logs[0].read_text(errors="replace")

        until(is_ready, what=self.said)

    def ranks(self, node: int) -> list[psutil.Process]:
        """The processes that torchrun has started there, in the order of ranks."""
        return psutil.Process(self.launchers[node].pid).children()

    def close(self) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(launcher.pid).children(recursive=True)
                launcher.terminate()
                for one in psutil.wait_procs(tree, timeout=20)[1]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            launcher.kill()
            launcher.wait()


def answer(asked: "subprocess.Popen[str]") -> dict[str, str]:
    """That of every stream."""
    out, _ = asked.communicate(timeout=240)
    (found,) = json.loads(out.splitlines()[-1])
    return dict(found)


def test_two_nodes_serve_and_what_dies_ends_every_request_by_name(hosts, tmp_path):
    """A rank is killed; once a supervisor has started all again, a node vanishes without a word."""
    nodes = Nodes(hosts, tmp_path)
    try:
        nodes.until_ready()
        first = answer(nodes.ask(16))
        assert first.get("text"), first
        _, victim = nodes.ranks(1)
        assert_ends(nodes, victim.kill, "rank 3 on node")
    finally:
        nodes.close()
    # This time the other ranks do not know what rank 0 runs.
    again = Nodes(hosts, tmp_path, (sys.executable, "-m", "penstock.cli.llmapi_launch"))
    try:
        again.until_ready()
        assert answer(again.ask(16)) == first
        if hosts.unplug is not None and hosts.plug is not None:
            assert_ends(again, hosts.unplug, " on node ", hosts.plug)
    finally:
        again.close()


def assert_ends(
    nodes: Nodes, harm: Callable[[], None], said: str, undo: Callable[[], None] = lambda: None
) -> None:
    """Every stream under way ends with that, and then every process of a rank."""
    under_way = nodes.ask(1900, NUM_STREAMS)
    assert under_way.stdout is not None
    assert under_way.stdout.readline() == "begun\n"
    begun_at = time.monotonic()
    harm()
    assert said in answer(under_way).get("error", ""), nodes.said()
    print(f"noticed after {time.monotonic() - begun_at:.1f} s")
    undo()
    until(lambda: all(one.poll() is not None for one in nodes.launchers), what=nodes.said)
    assert all(one.returncode for one in nodes.launchers)
    assert said in nodes.logs[0].read_text()
