"""`Mailbox`: the engine's end of the channels to its clients (API servers, `LLM`)."""

from collections import deque

from penstock import log
from penstock.ipc import channel
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    ClientLeft,
    EngineInfo,
    Hello,
    Message,
    Ready,
    Submit,
    ToEngine,
)
from penstock.types.request import client_of

_log = log.get(__name__)


class Mailbox:
    """Greets clients, hands their requests to the loop, sends each its own deltas."""

    def __init__(self, address: str) -> None:
        self._receiver = channel.Receiver(address, ToEngine)
        self._clients: dict[int, channel.Sender] = {}
        self._addresses: dict[int, str] = {}
        self._gone: set[int] = set()
        self._found: deque[ClientLeft] = deque()  # who left, as we found out ourselves
        self._info: EngineInfo | None = None

    def open(self, info: EngineInfo) -> None:
        """The engine is built: tell whoever has asked, and whoever will."""
        self._info = info
        self.broadcast(Ready(info=info))

    def receive(self, timeout_ms: int) -> Message | None:
        while True:
            if self._found:
                return self._found.popleft()
            message: Message | None = self._receiver.receive(timeout_ms)
            match message:
                case Hello():
                    self._greet(message)
                case Submit(requests=requests) if client_of(requests[0].id) not in self._clients:
                    pass  # on its way when its client left
                case ClientLeft(client_id=client_id):
                    self._drop(client_id)
                case _:
                    return message
            timeout_ms = 0

    def _greet(self, hello: Hello) -> None:
        if hello.client_id in self._gone:
            return
        if hello.version != PROTOCOL_VERSION:
            _log.error("a client speaks protocol %d, not %d", hello.version, PROTOCOL_VERSION)
            return
        self._clients[hello.client_id] = channel.Sender(hello.address)
        self._addresses[hello.client_id] = hello.address
        if self._info is not None:
            self.send(hello.client_id, Ready(info=self._info))

    def send(self, client_id: int, message: Message) -> None:
        client = self._clients.get(client_id)
        if client is None:
            return
        try:
            client.send(message)
        except channel.ChannelFull:
            _log.error("client %d has stopped reading and is dropped", client_id)
            self._drop(client_id)

    def _drop(self, client_id: int) -> None:
        """Nobody reads the outputs of its requests, so the loop must end them."""
        if client_id in self._clients:
            self._clients.pop(client_id).close()
            del self._addresses[client_id]
        self._gone.add(client_id)
        self._found.append(ClientLeft(client_id=client_id))

    def broadcast(self, message: Message) -> None:
        for client_id in list(self._clients):
            self.send(client_id, message)

    def last_words(self, message: Message) -> None:
        """To all clients from any thread, while another one may hang: sockets of its own."""
        for address in list(self._addresses.values()):
            channel.Sender(address).send(message)
