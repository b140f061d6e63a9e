"""Ranks of torchrun on two nodes: of loopback, and of two network namespaces as hosts."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from waiting import free_port, until

SIBLING = Path(__file__).parents[1] / "siblings" / "qwen2_moe"
# Says `begun` at the first token, and in the end the text or the error.
ASK = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=200)
text = ""
try:
    for chunk in client.completions.create(
        model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=int(sys.argv[2]), temperature=0,
        stream=True, extra_body={"ignore_eos": True},
    ):
        text or print("begun", flush=True)
        text += chunk.choices[0].text
    print(json.dumps({"text": text}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
"""


@dataclass(frozen=True)
class Hosts:
    address: str  # of the first
    enter: tuple[tuple[str, ...], tuple[str, ...]]  # what a command on each begins with


@contextlib.contextmanager
def namespaces() -> Iterator[Hosts]:
    names = [f"penstock-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"pst{os.getpid() % 10**6}-{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for i, (name, end) in enumerate(zip(names, ends, strict=True)):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces: {error}")
        first, second = (("ip", "netns", "exec", name) for name in names)
        yield Hosts("10.213.7.1", (first, second))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    if request.param == "loopback":
        yield Hosts("127.0.0.1", ((), ()))
        return
    if os.geteuid() or shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("network namespaces need root and ip")
    with namespaces() as hosts:
        yield hosts


class Nodes:
    """A torchrun on each of two hosts, with two ranks of one server each."""

    def __init__(self, hosts: Hosts, folder: Path, secret: str = "0123456789abcdef") -> None:
        self._hosts, self._port = hosts, free_port()
        self.logs = [folder / f"node{i}-{self._port}.log" for i in range(2)]
        master = free_port()
        env = os.environ | {"PENSTOCK_RANK_SECRET": secret, "OMP_NUM_THREADS": "1"}
        env.pop("GLOO_SOCKET_IFNAME", None)  # other tests make process groups in this process
        self.launchers = []
        for node in range(2):
            command = [
                *hosts.enter[node],
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node_rank", str(node), "--nproc_per_node", "2", "--no-python"),
                *("--master_addr", hosts.address, "--master_port", str(master)),
                *(sys.executable, "-m", "penstock", "serve", str(SIBLING), "--device", "cpu"),
                *("--tp_size", "4", "--host", hosts.address, "--port", str(self._port)),
            ]
            with self.logs[node].open("wb") as log:
                self.launchers.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-6000:] for log in self.logs)

    def ask(self, num_tokens: int) -> "subprocess.Popen[str]":
        url = f"http://{self._hosts.address}:{self._port}/v1"
        command = [*self._hosts.enter[0], sys.executable, "-c", ASK, url, str(num_tokens)]
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
    out, _ = asked.communicate(timeout=240)
    return dict(json.loads(out.splitlines()[-1]))


def test_two_nodes_serve_and_a_dead_rank_ends_them_by_name(hosts, tmp_path):
    nodes = Nodes(hosts, tmp_path)
    try:
        nodes.until_ready()
        first = answer(nodes.ask(16))
        assert first.get("text"), first
        under_way = nodes.ask(1900)
        assert under_way.stdout is not None
        assert under_way.stdout.readline() == "begun\n"
        _, victim = nodes.ranks(1)
        victim.kill()
        assert "rank 3 on node" in answer(under_way).get("error", ""), nodes.said()
        until(lambda: all(one.poll() is not None for one in nodes.launchers), what=nodes.said)
        assert all(one.returncode for one in nodes.launchers)
        assert "rank 3 on node" in nodes.logs[0].read_text()
    finally:
        nodes.close()
    again = Nodes(hosts, tmp_path)  # as a supervisor does
    try:
        again.until_ready()
        assert answer(again.ask(16)) == first
    finally:
        again.close()
