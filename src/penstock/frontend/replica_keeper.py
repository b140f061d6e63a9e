"""Keeps an engine on another node than the API servers: what a process does that a launcher has
started for a replica.

It starts the engine, again when it is told to, and stands between it and its clients. It stays
until the first API server lets it go or has left, whatever signal comes.
"""

import os
import signal
import time
from typing import Any

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.errors import BackendError
from penstock.frontend.engine_handle import ENGINE_MODULE, how_it_ended
from penstock.ipc.address import address, private_folder, remove
from penstock.ipc.channel import Sender
from penstock.ipc.link import Link
from penstock.ipc.messages import (
    ClientLeft,
    EngineEnded,
    EngineTask,
    Hello,
    KillEngine,
    Message,
    Stop,
)
from penstock.ipc.process import Child, placed_gpus
from penstock.ipc.relay import ClientRelay

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORDS_S = 0.5
_log = log.get(__name__)


def keep_engine(link: Link, task: EngineTask, place: Place) -> int:
    """The exit code of this process: 0 when the first API server has said that it is over."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    keeper = _Keeper(link, place)

    def on_end(reason: str) -> None:
        _log.error("the server at %s has left%s", place.host, reason and f": {reason}")
        keeper.stop()
        os._exit(1)

    keeper.handle(task)
    link.listen(on_end)
    while not isinstance(message := link.receive(), Stop):
        keeper.handle(message)
    keeper.stop()
    return 0


class _Keeper:
    def __init__(self, link: Link, place: Place) -> None:
        self._link, self._place = link, place
        self._folder = private_folder()
        self._address = address(self._folder, "engine")
        self._to_engine = Sender(self._address)
        self._clients: dict[int, ClientRelay] = {}
        self._child: Child | None = None

    def handle(self, message: Message) -> None:
        match message:
            case EngineTask(task=task):
                self._start(msgspec.json.decode(task))
            case KillEngine():
                self._kill()
            case Hello(client_id=client_id):
                relay = self._clients.get(client_id)
                if relay is None:
                    relay = ClientRelay(self._folder, client_id, self._tell_server)
                    self._clients[client_id] = relay
                self._tell_engine(msgspec.structs.replace(message, address=relay.address))
            case _:
                if isinstance(message, ClientLeft) and message.client_id in self._clients:
                    self._clients.pop(message.client_id).close()
                self._tell_engine(message)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
        remove(self._folder)

    def _start(self, task: dict[str, Any]) -> None:
        if self._child is not None and self._child.alive:
            return  # told twice, by a server whose link was away for a moment
        begun_at = time.time()
        task |= {"address": self._address, "begun_at": begun_at, "spawned_at": begun_at}
        env = placed_gpus(self._place.local_rank, task["num_gpus"])
        name = f"engine {task['replica']}"
        self._child = Child(ENGINE_MODULE, task, name, self._ended, env=env)

    def _tell_engine(self, message: Message) -> None:
        try:
            self._to_engine.send(message)
        except BackendError as error:
            _log.error("%s; the engine is killed", error)
            self._kill()

    def _tell_server(self, message: Message) -> None:
        try:
            self._link.send(message)
        except BackendError as error:  # the end of the link is noticed, too
            _log.debug("%s", error)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill_unasked()

    def _ended(self, code: int) -> None:
        time.sleep(_LAST_WORDS_S)  # why it has ended is on its way to the clients
        self._tell_server(EngineEnded(how=how_it_ended(code, f" on node {self._place.node}")))
