"""A rank other than 0: loads its shard, then runs every plan it is sent, in order. One that
chooses tokens sends back what it found.

Started by rank 0 as `python -m penstock.runtime.worker`, or by a launcher (`launched_worker`): the
messages are the same.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock import log
from penstock.config.run import RunConfig
from penstock.ipc.channel import Peer, Receiver, Sender
from penstock.ipc.messages import (
    Forward,
    RankCache,
    RankFailed,
    RankReady,
    RankResult,
    SampleTokens,
    Stop,
    ToRank,
)
from penstock.ipc.process import on_parent_exit, read_task
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.device_step import DeviceStep
from penstock.runtime.memory import fitted
from penstock.runtime.model_loader import rank_device
from penstock.runtime.rank import finish_rank, load_rank
from penstock.runtime.timeline import Timeline


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells a rank at its start."""

    rank: int
    config: RunConfig
    model_kwargs: dict[str, Any] | None  # what replaces fields of the model's configuration
    revision: str | None
    meeting_point: str  # "host:port" of the process group
    log_level: str | None
    interface: str | None = None  # of the network to other nodes, where rank 0 knows it
    is_interface_asked: bool = False


class LocalTask(msgspec.Struct, frozen=True, kw_only=True):
    """The same for a child of rank 0."""

    task: WorkerTask
    address: str  # where this rank receives
    rank0_address: str


class ResultThread:
    """Waits for steps in order and tells rank 0: the rank itself launches the next one meanwhile.
    No more steps are under way than rank 0 has in flight."""

    def __init__(self, rank: int, connect: Callable[[], Peer]) -> None:
        self._rank, self._connect = rank, connect
        self._steps: queue.SimpleQueue[DeviceStep] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def put(self, step: DeviceStep) -> None:
        self._steps.put(step)

    def _run(self) -> None:
        rank0 = self._connect()  # a socket belongs to one thread
        try:
            while True:
                result = self._steps.get().wait()
                rank0.send(RankResult(rank=self._rank, result=result))
        except Exception:
            log.get(__name__).exception("rank %d failed", self._rank)
            os._exit(1)  # rank 0 sees it


def run(task: WorkerTask, receive: Callable[[], Any], connect: Callable[[], Peer]) -> None:
    """Until rank 0 says stop. `connect`: a way to rank 0, for the thread that asks."""
    config = task.config
    timeline = Timeline()
    rank0 = connect()
    try:
        device = rank_device(config, task.rank)
        mesh = RankMesh.create(
            task.rank,
            config.mesh,
            task.meeting_point,
            device,
            with_one_shot=config.one_shot_sums,
        )
        spec = parse_model_spec(Path(config.model_path), task.model_kwargs)
        loaded = load_rank(config, spec, mesh, timeline)
        memory = loaded.memory
        rank0.send(RankReady(rank=task.rank, cache=memory.size, weight_bytes=memory.weights))
        runner = None
        results = ResultThread(task.rank, connect) if mesh.is_sampling_rank else None
        while True:
            match receive():
                case RankCache(cache=cache):
                    config = fitted(config, cache)
                    runner = finish_rank(loaded, config, spec, cache, timeline)
                case Forward(plan=plan):
                    assert runner is not None
                    runner.forward(plan)
                case SampleTokens(step_id=step_id, late=late):
                    assert runner is not None
                    step = runner.sample(step_id, late)
                    if results is not None:
                        results.put(step)
                case Stop():
                    mesh.close()
                    return
    except Exception as error:
        log.get(__name__).exception("rank %d failed", task.rank)
        rank0.send(RankFailed(rank=task.rank, message=f"{type(error).__name__}: {error}"))
        raise


def main() -> None:
    local = msgspec.convert(read_task(), LocalTask)
    log.setup(f"rank {local.task.rank}", local.task.log_level)
    on_parent_exit(lambda: os._exit(0))
    inbox = Receiver(local.address, ToRank)
    try:
        run(local.task, lambda: inbox.receive(timeout_ms=-1), lambda: Sender(local.rank0_address))
    except Exception:
        sys.exit(1)


if __name__ == "__main__":
    main()
