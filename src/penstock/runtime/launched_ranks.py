"""`LaunchedRanks`: the further ranks where a launcher has started them, with messages over TCP.

Rank 0 listens until all have come, at the address the launcher gave it; who does not know the
secret is turned away (`ipc.link`). A link that ends is a rank that has died, wherever it was.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.errors import BackendError, ConfigError
from penstock.ipc.interfaces import address_of, interface_of
from penstock.ipc.link import HANDSHAKE_S, Link
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    FromRank,
    RankFailed,
    RankJoined,
    RankRefused,
    RankTask,
    Stop,
)
from penstock.parallel.mesh import use_interface
from penstock.runtime.worker import WorkerTask

_MEET_S = 600.0
_STOP_S = 10.0
_MAX_STRANGERS = 64  # connections whose handshake has not ended
_MAX_WAITING = 10_000  # messages
_log = log.get(__name__)


class LaunchedRanks:
    """`on_death`: called in a thread with what has happened to a rank that ends unasked."""

    own_gpu = None

    def __init__(
        self,
        place: Place,
        secret: bytes,
        interface: str | None,
        on_death: Callable[[str], None],
    ) -> None:
        assert place.rank == 0, place
        self._place, self._secret, self._interface = place, secret, interface
        self._on_death = on_death
        self._inbox: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
        self._joined: dict[int, tuple[Link, str]] = {}  # by rank, with the name of its node
        self._reasons: dict[int, str] = {}  # why a rank says that it fails
        self._ended = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_stopping = False
        self.host = _own_address(place, interface)
        self._listener = listen(self.host, place.port)
        self.port: int = self._listener.getsockname()[1]
        self.address = place.host

    @property
    def peers(self) -> list[Link]:
        return [self._joined[rank][0] for rank in sorted(self._joined)]

    def start(self, tasks: Sequence[WorkerTask]) -> None:
        """Wait until every rank has come, and tell each what to do."""
        _log.info(
            "waiting at %s port %d for %d ranks that %s starts",
            *(self._place.host, self.port, len(tasks), self._place.launcher),
        )
        self._meet(len(tasks))
        self._listener.close()
        own = self._interface or self._interface_to_others()
        is_asked = self._interface is not None
        use_interface(own, is_asked)
        for task in tasks:
            link, _ = self._joined[task.rank]
            is_here = link.peer_address == link.local_address
            told = msgspec.structs.replace(
                task,
                interface=own if is_here or is_asked else None,
                is_interface_asked=is_asked,
            )
            link.send(RankTask(task=msgspec.json.encode(told)))

    def receive(self) -> Any:
        return self._inbox.get()

    def stop(self) -> None:
        self._is_stopping = True
        for peer in self.peers:
            peer.send(Stop())
        deadline = time.monotonic() + _STOP_S
        for _ in self._joined:
            self._ended.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _meet(self, num: int) -> None:
        deadline = time.monotonic() + _MEET_S
        strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._listener.settimeout(0.5)
        while len(self._joined) < num:
            if time.monotonic() > deadline:
                missing = [str(rank) for rank in range(1, num + 1) if rank not in self._joined]
                raise BackendError(
                    f"of {num + 1} ranks that {self._place.launcher} starts, {', '.join(missing)} "
                    f"did not come to {self._place.host} port {self.port} within "
                    f"{_MEET_S:.0f} s; their logs say why"
                )
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            if strangers.acquire(blocking=False):
                threading.Thread(
                    target=self._take, args=(connection, strangers), name="join", daemon=True
                ).start()
            else:
                connection.close()

    def _take(self, connection: socket.socket, strangers: threading.BoundedSemaphore) -> None:
        try:
            link = Link(connection, self._secret, "rank 0", FromRank)
            joined = link.receive_first(HANDSHAKE_S)
        except (BackendError, OSError, EOFError, msgspec.MsgspecError) as error:
            _log.warning("a connection to the ranks is refused: %s", error or "it has ended")
            connection.close()
            return
        finally:
            strangers.release()
        with self._lock:
            refusal = self._refusal(joined)
            if refusal is None:
                self._joined[joined.rank] = link, joined.node
        if refusal is not None:
            _log.warning("a rank at %s is refused: %s", link.peer_address, refusal)
            link.send(RankRefused(message=refusal))
            link.close()
            return
        _log.debug("rank %d has come from %s", joined.rank, joined.node)
        link.listen(
            on_end=partial(self._on_end, joined.rank),
            on_message=partial(self._on_message, joined.rank),
        )

    def _refusal(self, joined: object) -> str | None:
        if not isinstance(joined, RankJoined):
            return "it does not say which rank it is"
        size = self._place.size
        if joined.version != PROTOCOL_VERSION:
            return (
                f"it speaks protocol {joined.version}, rank 0 {PROTOCOL_VERSION}: use one version"
            )
        if joined.size != size or not 0 < joined.rank < size:
            return f"it is rank {joined.rank} of {joined.size}, rank 0 is of {size}"
        if joined.rank in self._joined:
            return f"rank {joined.rank} is here already, on node {self._joined[joined.rank][1]}"
        return None

    def _on_message(self, rank: int, message: Any) -> None:
        if isinstance(message, RankFailed):
            self._reasons[rank] = message.message
        self._inbox.put(message)

    def _on_end(self, rank: int, reason: str) -> None:
        self._ended.release()
        if self._is_stopping:
            return
        link, node = self._joined[rank]
        why = self._reasons.get(rank) or reason
        said = f": {why}" if why else ""
        self._on_death(f"rank {rank} on node {node} ({link.peer_address}) ended{said}")

    def _interface_to_others(self) -> str | None:
        """That of a rank on another node, if there is one."""
        links = sorted(self.peers, key=lambda link: link.peer_address == link.local_address)
        return interface_of(links[0].local_address)


def listen(host: str, port: int) -> socket.socket:
    """`host`: an address, or nothing for all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot wait for the others at {host or 'all addresses'} port {port}: "
            f"{error.strerror or error}; set MASTER_ADDR to an address of this machine, "
            "MASTER_PORT to another port (ranks meet at the one after it), or rank_interface"
        ) from None


def _own_address(place: Place, interface: str | None) -> str:
    """To listen at: nothing where all addresses are meant."""
    if interface is not None:
        return address_of(interface)
    try:
        found = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the host of rank 0, {place.host}, is not known here: {error.strerror or error}; set "
            "MASTER_ADDR to its address on all nodes"
        ) from None
    address = str(found[0][4][0])
    # /etc/hosts often says so of the machine's own name; others see another address.
    is_hidden = ip_address(address).is_loopback and address != place.host
    return "" if is_hidden and place.spans_nodes else address
