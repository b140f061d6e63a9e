"""Message pipes: in order, typed, and bounded: who does not read slows nobody down."""

import asyncio
import os

import msgspec
import pytest
import uvloop

from penstock.ipc.address import address
from penstock.ipc.channel import (
    MAX_QUEUED_MESSAGES,
    AsyncReceiver,
    ChannelFull,
    Receiver,
    Sender,
)
from penstock.ipc.messages import Abort, ClientLeft, Fatal, ToClient, ToEngine


@pytest.fixture
def bound(tmp_path):
    return address(str(tmp_path), "engine")


def test_messages_of_several_kinds_arrive_in_order(bound):
    receiver, sender = Receiver(bound, ToEngine), Sender(bound)
    sent = [Abort(request_ids=(1, 2)), ClientLeft(client_id=7), Abort(request_ids=())]
    for message in sent:
        sender.send(message)
    assert [receiver.receive(60_000) for _ in sent] == sent
    assert receiver.receive(0) is None
    sender.close()
    receiver.close()


def test_a_receiver_in_an_event_loop_waits_for_what_comes(bound):
    async def wait():
        receiver = AsyncReceiver(bound, ToClient)
        sender = Sender(bound)
        asyncio.get_running_loop().call_later(0.02, sender.send, Fatal(message="out of luck"))
        got = await asyncio.wait_for(receiver.receive(), 60)
        sender.close()
        receiver.close()
        return got

    assert asyncio.run(wait()) == Fatal(message="out of luck")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_receiver_in_an_event_loop_misses_nothing_and_keeps_the_order(bound, run):
    """In bursts with pauses: the socket signals once for all that comes while it is not empty."""
    num_bursts, num_each = 30, 40

    async def wait():
        receiver, sender = AsyncReceiver(bound, ToClient), Sender(bound)

        async def send():
            for burst in range(num_bursts):
                for one in range(num_each):
                    sender.send(Fatal(message=f"{burst * num_each + one}"))
                await asyncio.sleep(0.001 if burst % 2 else 0)

        sending = asyncio.create_task(send())
        got = [
            (await asyncio.wait_for(receiver.receive(), 60)).message
            for _ in range(num_bursts * num_each)
        ]
        await sending
        sender.close()
        receiver.close()
        return got

    assert run(wait()) == [str(one) for one in range(num_bursts * num_each)]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_message_that_nobody_reads_does_not_keep_the_event_loop_busy(bound, run):
    async def wait():
        receiver, sender = AsyncReceiver(bound, ToClient), Sender(bound)
        num_signals, on_signal = 0, receiver._on_signal

        def count():
            nonlocal num_signals
            num_signals += 1
            on_signal()

        receiver._on_signal = count
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.receive(), 0.01)
        sender.send(Fatal(message="later"))
        for _ in range(100):  # connecting signals a few times
            before = num_signals
            await asyncio.sleep(0.1)
            if (seen := num_signals - before) == 0:
                break
        got = await asyncio.wait_for(receiver.receive(), 60)
        sender.close()
        receiver.close()
        return seen, got

    seen, got = run(wait())
    assert seen == 0 and got == Fatal(message="later")


def test_what_is_not_of_the_union_is_not_read(bound):
    receiver, sender = Receiver(bound, ToEngine), Sender(bound)
    sender.send(Fatal(message="not for an engine"))
    with pytest.raises(msgspec.ValidationError):
        receiver.receive(60_000)
    sender.close()
    receiver.close()


def test_a_sender_whose_peer_has_stopped_reading_is_told_and_does_not_wait(bound):
    receiver, sender = Receiver(bound, ToEngine), Sender(bound)
    message = ClientLeft(client_id=7)
    with pytest.raises(ChannelFull, match="ClientLeft not sent: the peer has stopped reading"):
        for _ in range(4 * MAX_QUEUED_MESSAGES):
            sender.send(message)
    assert receiver.receive(60_000) == message, "what was sent before is not lost"
    sender.close()
    receiver.close()


def test_what_a_process_has_sent_arrives_though_it_ends_at_once(bound):
    receiver = Receiver(bound, ToEngine)
    if (pid := os.fork()) == 0:
        Sender(bound).send(ClientLeft(client_id=7))
        os._exit(0)
    os.waitpid(pid, 0)
    assert receiver.receive(0) == ClientLeft(client_id=7)
    receiver.close()


def test_what_the_socket_does_not_take_at_once_arrives_whole_and_in_order(bound):
    sender = Sender(bound)  # before anybody listens
    sent = [Abort(request_ids=tuple(range(many))) for many in (3, 2_000_000, 0, 500_000, 1)]
    sender.send(sent[0])
    receiver = Receiver(bound, ToEngine)
    for message in sent[1:]:
        sender.send(message)
    assert [receiver.receive(60_000) for _ in sent] == sent
    sender.close()
    receiver.close()


def test_a_receiver_that_is_started_again_gets_whole_messages(bound):
    """The one before it ended in the middle of a large one."""
    first, sender = Receiver(bound, ToEngine), Sender(bound)
    large = Abort(request_ids=tuple(range(2_000_000)))
    sender.send(large)
    while not first._selector.select(1):
        pass
    first._accept()
    first.close()
    again = Receiver(bound, ToEngine)
    sender.send(ClientLeft(client_id=7))
    assert [again.receive(60_000) for _ in range(2)] == [large, ClientLeft(client_id=7)]
    sender.close()
    again.close()


def test_two_senders_do_not_mix(bound):
    receiver, senders = Receiver(bound, ToEngine), [Sender(bound) for _ in range(2)]
    for number in range(200):
        for client_id, sender in enumerate(senders):
            ids = (client_id, number, *range(300))
            sender.send(Abort(request_ids=ids))
    got = [receiver.receive(60_000).request_ids[:2] for _ in range(400)]
    for client_id, sender in enumerate(senders):
        assert [number for of, number in got if of == client_id] == list(range(200))
        sender.close()
    receiver.close()
