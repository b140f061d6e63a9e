"""Between an engine and its clients where a network is in between: one relay on each side.

Clients and engine speak over Unix sockets as ever. Beside the clients `EngineRelay` stands at the
engine's address; beside the engine `ClientRelay` stands at that of each client.
"""

import threading
from collections.abc import Callable
from typing import Any

from penstock import log
from penstock.errors import BackendError
from penstock.ipc.address import address
from penstock.ipc.channel import Receiver, Sender
from penstock.ipc.link import Link
from penstock.ipc.messages import ClientLeft, Fatal, ForClient, Hello, Message, ToEngine

_LOOK_MS = 1000  # whether the client is still there
_log = log.get(__name__)


class EngineRelay:
    """Takes what clients send to an engine, wherever it is now; hands back what it answers."""

    def __init__(self, at: str) -> None:
        self._receiver = Receiver(at, ToEngine)
        self._link: Link | None = None
        self._clients: dict[int, tuple[Hello, Sender]] = {}
        self._failure: Fatal | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="engine relay", daemon=True).start()

    def connect(self, link: Link | None) -> None:
        """Where the engine is from now on; None: nowhere. Clients are introduced anew."""
        with self._lock:
            self._link = link
            for hello, _ in self._clients.values():
                self._pass_on(hello)

    def hand_back(self, message: ForClient) -> None:
        with self._lock:
            found = self._clients.get(message.client_id)
        if found is None:
            return
        try:
            found[1].send_encoded(message.payload, "a message of the engine")
        except BackendError:
            _log.error("client %d has stopped reading and is dropped", message.client_id)
            with self._lock:
                self._drop(message.client_id)
                self._pass_on(ClientLeft(client_id=message.client_id))

    def fail(self, reason: str) -> None:
        """No engine will come: tell whoever has asked, and whoever will."""
        with self._lock:
            self._failure = Fatal(message=reason)
            for _, sender in self._clients.values():
                sender.send(self._failure)

    def _run(self) -> None:
        while True:
            message: Any = self._receiver.receive(timeout_ms=-1)
            with self._lock:
                match message:
                    case Hello(client_id=client_id):
                        self._drop(client_id)
                        sender = Sender(message.address)
                        self._clients[client_id] = message, sender
                        if self._failure is not None:
                            sender.send(self._failure)
                    case ClientLeft(client_id=client_id):
                        self._drop(client_id)
                self._pass_on(message)

    def _drop(self, client_id: int) -> None:
        if client_id in self._clients:
            _, sender = self._clients.pop(client_id)
            sender.close()

    def _pass_on(self, message: Message) -> None:
        """Without an engine nothing waits: its clients are told, and submit their requests anew."""
        if self._link is None:
            return
        try:
            self._link.send(message)
        except BackendError as error:  # the end of the link will be noticed, too
            _log.warning("%s", error)
            self._link.close()


class ClientRelay:
    """Takes what an engine sends to a client, and hands it to `send`."""

    def __init__(self, folder: str, client_id: int, send: Callable[[ForClient], None]) -> None:
        self._client_id, self._send = client_id, send
        self._receiver = Receiver(address(folder, "client"), None)
        self.address = self._receiver.address
        self._is_gone = False
        threading.Thread(target=self._run, name=f"client {client_id}", daemon=True).start()

    def close(self) -> None:
        self._is_gone = True

    def _run(self) -> None:
        while not self._is_gone:
            if (payload := self._receiver.receive(_LOOK_MS)) is not None:
                self._send(ForClient(client_id=self._client_id, payload=payload))
        self._receiver.close()
