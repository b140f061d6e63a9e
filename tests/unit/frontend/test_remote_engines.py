"""Engines that processes of a launcher keep: how many there are, who is refused, who is told."""

import re
import socket
import threading

import pytest
from waiting import free_port, until

from penstock.config.launch import Place
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend import remote_engines
from penstock.frontend.remote_engines import RemoteEngines, find_remote_engines
from penstock.ipc.address import address
from penstock.ipc.channel import Receiver, Sender
from penstock.ipc.meeting import join
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineEnded,
    EngineTask,
    Fatal,
    ForClient,
    Hello,
    KillEngine,
    Stop,
    ToClient,
    encode,
)

SECRET = b"a secret of sixteen"


def place(rank, port, size=2):
    return Place(
        launcher="torchrun", rank=rank, size=size, local_rank=0, local_size=1, host="127.0.0.1",
        port=port, node=f"node{rank}",
    )  # fmt: skip


class Server:
    """What `EngineHandle` and one client do."""

    def __init__(self, folder):
        self.port, self.ended = free_port(), []
        self.engines = RemoteEngines(place(0, self.port), SECRET, None)
        at, task = address(str(folder), "engine"), {"replica": 1}
        self.engine = self.engines.start(1, task | {"address": at}, self.ended.append)
        self.engines.open()
        self.client = Receiver(address(str(folder), "client"), ToClient)
        self.sender = Sender(at)
        self.greet()

    def greet(self):
        own = self.client.address
        self.sender.send(Hello(version=PROTOCOL_VERSION, client_id=1, address=own))

    def keeper(self):
        link, told = join(place(1, self.port), SECRET, None)
        assert isinstance(told, EngineTask)
        link.listen(lambda reason: None)
        return link


@pytest.fixture
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("s"))
    yield made
    made.engines.close()


def test_what_clients_and_engine_say_passes_a_keeper_even_one_that_comes_back(server):
    for _ in range(2):
        link = server.keeper()
        greeted = link.receive()
        assert isinstance(greeted, Hello) and greeted.client_id == 1
        server.sender.send(Abort(request_ids=(7,)))
        assert link.receive() == Abort(request_ids=(7,))
        link.send(ForClient(client_id=2, payload=b"nobody's"))
        link.send(ForClient(client_id=1, payload=encode(Fatal(message="of the engine"))))
        assert server.client.receive(-1) == Fatal(message="of the engine")
        server.engine.kill_unasked()
        assert link.receive() == KillEngine()
        link.send(EngineEnded(how="ended by signal 9"))
        until(lambda: server.ended == ["ended by signal 9"])
        link.close()
        until(lambda: len(server.ended) == 2)
        assert server.ended.pop() == "is out of reach: node node1 (127.0.0.1) has left"
        server.ended.clear()


def test_a_second_keeper_of_the_same_replica_is_refused(server):
    link = server.keeper()
    with pytest.raises(ConfigError, match="replica 1 is here already, on node node1"):
        join(place(1, server.port), SECRET, None)
    stopping = threading.Thread(target=server.engine.stop)
    stopping.start()
    while not isinstance(link.receive(), Stop):
        pass
    link.close()
    stopping.join()
    assert server.ended == []  # nobody is surprised


def test_clients_are_told_when_a_replica_does_not_come(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(remote_engines, "MEET_S", 0.1)
    server = Server(tmp_path_factory.mktemp("s"))
    try:
        for _ in range(2):  # who had asked by then, and who asks later
            told = server.client.receive(-1)
            assert isinstance(told, Fatal)
            assert told.message.startswith("replica 1, which torchrun starts, did not come within")
            server.greet()
    finally:
        server.engines.close()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "data_parallel_size is 2, and torchrun has started 4 processes: each of them starts "
            "the 2 ranks of one replica itself; have 2 started (srun --ntasks 2,"),
        (2, "set PENSTOCK_RANK_SECRET"),
    ],
)  # fmt: skip
def test_a_launcher_starts_one_process_for_each_replica(monkeypatch, size, message):
    monkeypatch.setattr(remote_engines, "find_place", lambda launcher: place(0, 29501, size))
    monkeypatch.delenv("PENSTOCK_RANK_SECRET", raising=False)
    config = EngineConfig(model="m", data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_remote_engines(config)
    assert find_remote_engines(EngineConfig(model="m")) is None


def test_the_port_of_the_meeting_is_free_again(server):
    server.engines.close()

    def is_free():
        try:
            socket.create_server(("127.0.0.1", server.port)).close()
        except OSError:
            return False
        return True

    until(is_free)
