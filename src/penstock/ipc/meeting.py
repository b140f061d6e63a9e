"""Where processes that a launcher has started find rank 0: `Meeting` takes them, `join` is theirs.

Rank 0 listens at the address the launcher gave it; who does not know the secret is turned away
(`link`), and so is a process of another version, or one that is not missing.
"""

import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import msgspec

from penstock import log
from penstock.config.launch import Place
from penstock.errors import BackendError, ConfigError
from penstock.ipc.interfaces import address_of
from penstock.ipc.link import HANDSHAKE_S, Link, LinkRefused
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    FromLaunched,
    RankJoined,
    RankRefused,
    ToLaunched,
)

MEET_S = 600.0  # until all should have come
_JOIN_S = 7200.0  # rank 0 may fetch a model first
_RETRY_S = 0.5
_ACCEPT_S = 0.5
_MAX_REFUSALS = 5
_MAX_STRANGERS = 64  # connections whose handshake has not ended
_log = log.get(__name__)


class Meeting:
    """`take`: given each process that belongs here, in a thread of its own; why it is refused all
    the same, if it is."""

    def __init__(
        self,
        place: Place,
        secret: bytes,
        interface: str | None,
        take: Callable[[Link, RankJoined], str | None],
    ) -> None:
        self._place, self._secret, self._take = place, secret, take
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self.host = _own_address(place, interface)
        self._listener = listen(self.host, place.port)
        self._listener.settimeout(_ACCEPT_S)
        self.port: int = self._listener.getsockname()[1]

    def accept(self) -> None:
        """One more, if it comes soon."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        if self._strangers.acquire(blocking=False):
            threading.Thread(
                target=self._greet, args=(connection,), name="join", daemon=True
            ).start()
        else:
            connection.close()

    def close(self) -> None:
        self._listener.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            link = Link(connection, self._secret, "rank 0", FromLaunched)
            joined = link.receive_first(HANDSHAKE_S)
        except (BackendError, OSError, EOFError, msgspec.MsgspecError) as error:
            _log.warning("a connection to the ranks is refused: %s", error or "it has ended")
            connection.close()
            return
        finally:
            self._strangers.release()
        refusal = self._refusal(joined) or self._take(link, joined)
        if refusal is not None:
            _log.warning("a rank at %s is refused: %s", link.peer_address, refusal)
            link.send(RankRefused(message=refusal))
            link.close()
            return
        _log.debug("rank %d has come from %s", joined.rank, joined.node)

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
        return None


def join(place: Place, secret: bytes, interface: str | None) -> tuple[Link, Any]:
    """(a way to rank 0, what it says first); waits until rank 0 is there."""
    link = _connect(place, secret, interface)
    link.send(
        RankJoined(version=PROTOCOL_VERSION, rank=place.rank, size=place.size, node=place.node)
    )
    try:
        told = link.receive_first(None)
    except (OSError, EOFError):
        raise BackendError(f"rank 0 at {place.host} has left") from None
    if isinstance(told, RankRefused):
        raise ConfigError(f"rank 0 at {place.host} refuses this rank: {told.message}")
    return link, told


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


def _connect(place: Place, secret: bytes, interface: str | None) -> Link:
    deadline, num_refusals, is_told = time.monotonic() + _JOIN_S, 0, False
    source = None if interface is None else (address_of(interface), 0)
    while True:
        try:
            connection = socket.create_connection(
                (place.host, place.port), timeout=HANDSHAKE_S, source_address=source
            )
            return Link(connection, secret, "worker", ToLaunched)
        except LinkRefused as error:
            num_refusals += 1
            if num_refusals == _MAX_REFUSALS:
                raise ConfigError(
                    f"what listens at {place.host} port {place.port} does not take this rank: "
                    f"{error}; is PENSTOCK_RANK_SECRET the same on all nodes?"
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"no rank 0 at {place.host} port {place.port} within {_JOIN_S:.0f} s: {error}"
                ) from None
        if not is_told:
            _log.info("waiting for rank 0 at %s port %d", place.host, place.port)
            is_told = True
        time.sleep(_RETRY_S)


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
