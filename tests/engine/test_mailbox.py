"""The engine's mail with several front ends: each gets its own, and one that left is forgotten."""

import pytest

from penstock.engine.mailbox import Mailbox
from penstock.ipc import channel
from penstock.ipc.address import address
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    ClientLeft,
    Deltas,
    Fatal,
    Hello,
    Submit,
    ToClient,
)
from penstock.types.outputs import TokenDelta
from penstock.types.request import Request, request_id
from penstock.types.sampling import SamplingParams


class Client:
    def __init__(self, number: int, folder: str, engine: str) -> None:
        self.number = number
        self.inbox = channel.Receiver(address(folder, "client"), ToClient)
        self.outbox = channel.Sender(engine)

    def hello(self) -> None:
        address = self.inbox.address
        self.outbox.send(Hello(version=PROTOCOL_VERSION, client_id=self.number, address=address))

    def submit(self) -> None:
        one = Request(
            id=request_id(self.number, 0), prompt_ids=(1,), sampling=SamplingParams(), max_tokens=1
        )
        self.outbox.send(Submit(requests=(one,)))


@pytest.fixture
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("s"))


@pytest.fixture
def mailbox(folder) -> Mailbox:
    return Mailbox(address(folder, "engine"))


@pytest.fixture
def clients(folder, mailbox) -> list[Client]:
    made = [Client(number, folder, mailbox._receiver.address) for number in (1, 2)]
    for one in made:
        one.hello()
        one.submit()
    return made


def received(mailbox: Mailbox, count: int) -> list[object]:
    return [mailbox.receive(60_000) for _ in range(count)]


def test_each_front_end_gets_its_own_and_all_get_what_is_for_all(mailbox, clients):
    assert all(isinstance(message, Submit) for message in received(mailbox, 2))
    for number in (2, 1):
        delta = TokenDelta(request_id=request_id(number, 0), token_ids=(number,))
        mailbox.send(number, Deltas(deltas=(delta,)))
    mailbox.broadcast(Fatal(message="end"))
    for one in clients:
        assert one.inbox.receive(60_000).deltas[0].token_ids == (one.number,)
        assert one.inbox.receive(60_000) == Fatal(message="end")


def test_a_front_end_that_left_is_reported_once_and_its_late_mail_dropped(mailbox, clients):
    received(mailbox, 2)
    clients[0].outbox.send(ClientLeft(client_id=2))
    assert mailbox.receive(60_000) == ClientLeft(client_id=2)
    clients[1].submit()
    clients[1].hello()
    clients[1].submit()
    assert mailbox.receive(200) is None
    mailbox.broadcast(Fatal(message="end"))
    assert clients[0].inbox.receive(60_000) == Fatal(message="end")
    assert clients[1].inbox.receive(200) is None


def test_a_front_end_that_does_not_read_is_dropped_and_its_requests_with_it(
    mailbox, clients, monkeypatch
):
    received(mailbox, 2)

    def full(message: object) -> None:
        raise channel.ChannelFull("not sent")

    monkeypatch.setattr(mailbox._clients[1], "send", full)
    mailbox.broadcast(Fatal(message="news"))
    assert mailbox.receive(0) == ClientLeft(client_id=1)
    assert clients[1].inbox.receive(60_000) == Fatal(message="news")
