"""Ranks on two nodes of a Ray cluster, both on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psutil
import pytest
from openai import APIError, OpenAI
from waiting import free_port, until

SIBLING = Path(__file__).parents[1] / "siblings" / "qwen2_moe"
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address."""
    pytest.importorskip("ray", reason="pip install ray -c constraints.txt runs it")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        cluster.add_node(num_cpus=2, num_gpus=0)
        yield cluster.address
    finally:
        cluster.shutdown()


class RayServer:
    def __init__(self, cluster: str, folder: Path, *flags: str) -> None:
        port = free_port()
        self._log = folder / f"server-{port}.log"
        config = folder / "ray.yaml"
        config.write_text("orchestrator_type: ray\n")
        command = [
            *(sys.executable, "-m", "penstock", "serve", str(SIBLING), "--device", "cpu"),
            *("--config", str(config), "--port", str(port), *flags),
        ]
        env = os.environ | {"RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"}
        env.pop("GLOO_SOCKET_IFNAME", None)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=200
        )

    def __enter__(self) -> "RayServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.said()
            return "is ready on" in self.said()

        until(is_ready, what=self.said)

    def answer(self) -> str:
        reply = self.client.completions.create(
            model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=16, temperature=0
        )
        return reply.choices[0].text

    def error(self, begun: Barrier) -> str:
        """What ends a long stream."""
        chunks = self.client.completions.create(
            model="qwen2_moe", prompt="What is 3 + 4?", max_tokens=1900, temperature=0,
            stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(chunks)
        begun.wait()
        with pytest.raises(APIError) as found:
            for _ in chunks:
                pass
        return str(found.value)


def test_two_nodes_of_ray_serve_and_a_dead_rank_ends_every_request(cluster, tmp_path):
    with RayServer(cluster, tmp_path, "--tp_size", "4") as server:
        server.until_ready()
        assert "4 ranks" in server.said()
        first = server.answer()
        assert first
        ranks = [
            child
            for parent in psutil.process_iter(["cmdline"])
            if "ray::Keeper" in " ".join(parent.info["cmdline"] or ())
            for child in parent.children()
        ]
        assert len(ranks) == 3
        begun = Barrier(NUM_STREAMS + 1, timeout=200)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(server.error, begun) for _ in range(NUM_STREAMS)]
            begun.wait()
            ranks[-1].kill()
            [error] = {one.result() for one in streams}
        assert "the engine cannot go on" in error and "rank " in error
        assert server.process.wait(60) == 1, server.said()
    # Ray has its resources back: the cluster has no more than these ranks want.
    with RayServer(cluster, tmp_path, "--tp_size", "4") as again:
        again.until_ready()
        assert again.answer() == first
    assert again.process.returncode == 0, again.said()


def test_more_ranks_than_the_cluster_has_places_for_are_refused(cluster, tmp_path):
    with RayServer(cluster, tmp_path, "--tp_size", "4", "--pp_size", "2") as server:
        assert server.process.wait(120)
        assert "8 ranks want 1 CPU each, and the Ray cluster has 4 CPU in all" in server.said()
