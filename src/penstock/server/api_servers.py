"""API servers beside the first: how many, started, started again when one dies, stopped together.

All accept from one listening socket, which the first has bound and the others inherit. The kernel
keeps one queue, so a connection goes to a process that is free to take it, however few there are,
and none is lost with a process that dies; with a socket for each (`SO_REUSEPORT`) a hash would
decide, and a second server on the port would not be noticed.
"""

import asyncio
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.ipc.channel import ChannelFull, Sender
from penstock.ipc.messages import ClientLeft
from penstock.ipc.process import Child
from penstock.server.launch_state import LaunchState
from penstock.server.shared_state import SharedState

MODULE = "penstock.server.api_server_process"
FIRST_CLIENT_ID = 1
FAILED = 1  # exit code of an API server that would fail again
_RESTART_DELAY_S = 1.0
_CPUS_PER_API_SERVER = 4
_MOST_BY_DEFAULT = 4  # one writes more events per second than a GPU makes tokens; more cut delays
_FEW_STREAMS = 32
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")  # torch would know better, and take seconds to load
_log = log.get(__name__)


def choose_num_api_servers(
    config: EngineConfig, num_cpus: int | None = None, has_gpu: bool | None = None
) -> tuple[int, str]:
    """The number and why; what is not given is looked up on this machine."""
    if config.num_postprocess_workers is not None:
        return max(1, config.num_postprocess_workers), "set by num_postprocess_workers"
    if has_gpu is None:
        has_gpu = any(Path(node).exists() for node in _GPU_NODES)
    if config.device == "cpu" or not has_gpu:
        return 1, "one keeps up with a CPU"
    if config.max_batch_size is not None and config.max_batch_size <= _FEW_STREAMS:
        return 1, f"one keeps up with max_batch_size {config.max_batch_size}"
    num_cpus = num_cpus or os.cpu_count() or 1
    fitting = max(1, min(_MOST_BY_DEFAULT, num_cpus // _CPUS_PER_API_SERVER))
    return (
        fitting,
        f"one for every {_CPUS_PER_API_SERVER} of {num_cpus} CPUs, {_MOST_BY_DEFAULT} at most",
    )


class ApiServerProcesses:
    """Those beside the first. `reason`: why there are so many. `on_failure` is called when one ends
    in a way that starting it again would not mend.
    """

    def __init__(
        self,
        launched: LaunchState,
        shared: SharedState,
        reason: str,
        on_failure: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = launched.listener
        self._shared = shared
        self._on_failure = on_failure
        self._to_engines = [Sender(one) for one in launched.engine.addresses]
        self._client_ids = itertools.count(FIRST_CLIENT_ID + 1)
        self._stopping = False
        folder = launched.tokenizer_folder
        self._task = {
            "config": launched.config.model_dump(mode="json"),
            "access": launched.access.to_task(),  # the configuration itself has no keys
            "tokenizer_folder": None if folder is None else str(folder),
            "engines": launched.engine.addresses,
            "shared_state": shared.path,
            "num_api_servers": shared.num_api_servers,
            "reason": reason,
            "listener": launched.listener.fileno(),
        }
        self._children: dict[int, Child] = {}
        for index in range(1, shared.num_api_servers):
            self._start(index)

    def _start(self, index: int) -> None:
        if self._stopping:
            return
        # Never the id of one before it, whose requests may still be running.
        client_id = next(self._client_ids)

        def ended(code: int) -> None:
            self._loop.call_soon_threadsafe(self._ended, index, client_id, code)

        self._children[index] = Child(
            MODULE,
            {**self._task, "index": index, "client_id": client_id},
            f"API server {index}",
            ended,
            pass_fds=(self._listener.fileno(),),
        )

    def _ended(self, index: int, client_id: int, code: int) -> None:
        if self._stopping:
            return
        self._shared.forget(index)
        for engine in self._to_engines:
            try:
                engine.send(ClientLeft(client_id=client_id))
            except ChannelFull as error:  # an engine that hangs is somebody else's to notice
                _log.warning("%s", error)
        if code == FAILED:
            _log.error("API server %d would fail again; stopping", index)
            self._on_failure()
            return
        _log.warning("API server %d is started again", index)
        self._loop.call_later(_RESTART_DELAY_S, partial(self._start, index))

    @property
    def are_gone(self) -> bool:
        return not any(child.alive for child in self._children.values())

    def ask_to_leave(self) -> None:
        """All finish what they have; may be called twice."""
        self._stopping = True
        for child in self._children.values():
            child.ask_to_leave()

    async def stop(self) -> None:
        """Until all are gone."""
        self.ask_to_leave()
        await asyncio.gather(*(asyncio.to_thread(one.stop) for one in self._children.values()))
        for engine in self._to_engines:
            engine.close()
