"""Links between ranks: who knows the secret, what is read, and how they end."""

import queue
import socket
import threading

import pytest
from waiting import LIMIT_S

from penstock.errors import BackendError
from penstock.ipc import link as links
from penstock.ipc.link import Link, LinkRefused
from penstock.ipc.messages import FromRank, RankFailed, RankRefused, ToRank

SECRET = b"a secret of sixteen"


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


def linked(ours: bytes = SECRET, theirs: bytes = SECRET) -> tuple[Link, Link, socket.socket]:
    """Rank 0's end, the worker's, and the worker's socket. A refusal closes the connection."""
    first, second = pair()
    made: queue.Queue[Link | Exception] = queue.Queue()

    def take() -> None:
        try:
            made.put(Link(first, ours, "rank 0", FromRank))
        except LinkRefused as error:
            first.close()
            made.put(error)

    threading.Thread(target=take, daemon=True).start()
    try:
        worker = Link(second, theirs, "worker", ToRank)
    except LinkRefused:
        raise made.get(timeout=LIMIT_S) from None  # type: ignore[misc]
    rank0 = made.get(timeout=LIMIT_S)
    assert isinstance(rank0, Link)
    return rank0, worker, second


def test_messages_arrive_in_order_and_the_end_is_told():
    rank0, worker, _ = linked()
    ended: queue.Queue[str] = queue.Queue()
    rank0.listen(ended.put)
    sent = [RankFailed(rank=1, message="x" * size) for size in (1, 3_000_000, 0)]
    for message in sent:
        worker.send(message)
    worker.close()
    assert [rank0.receive() for _ in sent] == sent
    assert ended.get(timeout=LIMIT_S) == ""
    rank0.send(RankRefused(message="the other way"))
    assert worker.receive_first(LIMIT_S) == RankRefused(message="the other way")


def test_who_does_not_know_the_secret_is_refused():
    with pytest.raises(LinkRefused, match="does not know the secret"):
        linked(theirs=b"another one")


def test_something_else_is_refused():
    first, second = pair()
    second.sendall(b"GET / HTTP/1.1\r\nHost: the-first-rank.example.org\r\n\r\n")
    with pytest.raises(LinkRefused, match="something that is no rank"):
        Link(first, SECRET, "rank 0", FromRank)


@pytest.mark.parametrize("change", ["again", "bits", "long"])
def test_a_frame_of_somebody_else_ends_the_link(monkeypatch, change):
    rank0, worker, wire = linked()
    ended: queue.Queue[str] = queue.Queue()
    frames: list[bytes] = []

    class Recorder:
        def sendall(self, frame: bytes) -> None:
            frames.append(frame)

    monkeypatch.setattr(worker, "_socket", Recorder())
    worker.send(RankFailed(rank=1, message="once"))
    [frame] = frames
    rank0.listen(ended.put)
    if change == "again":
        wire.sendall(frame + frame)
    elif change == "bits":
        wire.sendall(frame[:-1] + bytes([frame[-1] ^ 1]))
    else:
        wire.sendall((links.MAX_FRAME_BYTES + 1).to_bytes(4, "little") + frame[4:])
    says = "at most" if change == "long" else "the other side has not sent"
    assert says in ended.get(timeout=LIMIT_S)


def test_a_message_of_the_wrong_kind_ends_the_link():
    rank0, worker, _ = linked()
    ended: queue.Queue[str] = queue.Queue()
    rank0.listen(ended.put)
    worker.send(RankRefused(message="only rank 0 says so"))
    assert "RankRefused" in ended.get(timeout=LIMIT_S)


def test_what_is_too_large_is_not_sent(monkeypatch):
    _, worker, _ = linked()
    monkeypatch.setattr(links, "MAX_FRAME_BYTES", 100)
    with pytest.raises(BackendError, match="does not travel"):
        worker.send(RankFailed(rank=1, message="x" * 200))
