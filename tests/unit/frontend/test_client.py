"""Every request gets its deltas and exactly one terminal one, whatever the engine does."""

import asyncio
import itertools
import threading
import time
from array import array

import pytest
from fake_engine import FakeEngine, make_info, say

from penstock.errors import BackendError, CapacityError, WorkerDied
from penstock.frontend.capacity import Capacity, Holdings
from penstock.frontend.client import EngineClient
from penstock.ipc.address import address
from penstock.ipc.channel import Receiver, Sender
from penstock.ipc.messages import Deltas, Fatal, Stats, ToEngine
from penstock.types.outputs import TokenDelta
from penstock.types.request import FinishReason, Request, client_of
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters, IterationStats

ENDLESS = say(itertools.repeat(5))


def request(client, num_tokens=3):
    return Request(
        id=client.new_id(), prompt_ids=(1, 2), sampling=SamplingParams(), max_tokens=num_tokens
    )


class Stream:
    """The deltas of one submit, until each of its requests had a terminal one."""

    def __init__(self, client, requests):
        self._num_open = len(requests)
        self._queue = asyncio.Queue()
        client.submit(requests, self._queue.put_nowait)

    async def receive(self):
        delta = await self._queue.get()
        self._num_open -= delta.finish is not None
        return delta


async def all_of(stream):
    deltas = []
    while stream._num_open:
        deltas.append(await stream.receive())
    assert stream._queue.empty()
    return deltas


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def iteration(number):
    names = IterationStats.__dataclass_fields__
    return IterationStats(**{**dict.fromkeys(names, 0), "iter": number, "kind": "", "ran_as": ""})


def test_deltas_arrive_in_order_and_end_with_one_terminal(connect, run):
    async def scenario():
        async with connect() as (client, _):
            deltas = await all_of(Stream(client, [request(client)]))
            assert [delta.token_ids for delta in deltas] == [(1,), (2,), (1,)]
            assert [delta.finish for delta in deltas] == [None, None, FinishReason.LENGTH]
            assert client.num_open == 0

    run(scenario())


def test_one_submit_merges_its_requests_into_one_stream(connect, run):
    async def scenario():
        async with connect() as (client, _):
            requests = [request(client, 2), request(client, 4)]
            deltas = await all_of(Stream(client, requests))
            ends = [delta.request_id for delta in deltas if delta.finish]
            assert ends == [requests[0].id, requests[1].id]
            assert len(deltas) == 6

    run(scenario())


def test_five_hundred_streams_at_once(connect, run):
    async def scenario():
        async with connect() as (client, _):
            streams = [Stream(client, [request(client, 20)]) for _ in range(500)]
            for deltas in await asyncio.gather(*map(all_of, streams)):
                assert len(deltas) == 20
                assert [delta.finish is not None for delta in deltas] == [False] * 19 + [True]

    run(scenario())


def test_ids_carry_the_client(connect, run):
    async def scenario():
        async with connect(client_id=7) as (client, _):
            assert client_of(client.new_id()) == 7
            assert client.new_id() != client.new_id()

    run(scenario())


def test_abort_ends_the_stream_at_once_and_is_idempotent(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, [engine]):
            one = request(client, 10**6)
            stream = Stream(client, [one])
            await stream.receive()
            client.abort([one.id])
            client.abort([one.id, 12345])
            deltas = await all_of(stream)
            assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.ABORT]
            await until(lambda: one.id in engine.aborted())
            # the engine's late deltas and its own terminal one go nowhere
            again = await all_of(Stream(client, [request(client, 1)]))
            assert len(again) == 1

    run(scenario())


def test_requests_over_capacity_are_refused_until_one_ends(connect, run):
    async def scenario():
        async with connect(ENDLESS, info=make_info(max_queued=2)) as (client, _):
            open_requests = [request(client, 10**6) for _ in range(2)]
            Stream(client, open_requests)
            with pytest.raises(CapacityError, match=r"2 requests are open.*at most 2"):
                Stream(client, [request(client)])
            client.abort([open_requests[0].id])
            Stream(client, [request(client)])

    run(scenario())


def test_the_bound_on_open_requests_is_shared_with_other_front_ends(connect, run):
    async def scenario():
        rows = [array("d", [0] * Holdings.num_cells(1)) for _ in range(2)]
        ours, theirs = (Holdings(1, rows, own) for own in range(2))
        theirs.change(0, 2, 30)
        async with connect(
            ENDLESS, info=make_info(max_queued=4), capacity=Capacity(holdings=ours)
        ) as (client, _):
            first = request(client, 10**6)
            Stream(client, [first, request(client, 10**6)])
            with pytest.raises(CapacityError, match=r"4 requests are open.*at most 4"):
                Stream(client, [request(client)])
            assert theirs.total()[0].tolist() == [4, 34]
            theirs.change(0, -1, -20)
            await all_of(Stream(client, [request(client, 2)]))
            client.abort([first.id])
            assert theirs.total()[0].tolist() == [2, 12]  # one of ours, one of theirs

    run(scenario())


def test_engine_death_ends_every_open_request_once(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, [engine]):
            streams = [Stream(client, [request(client, 10**6)]) for _ in range(3)]
            for stream in streams:
                await stream.receive()
            engine.going.clear()
            died = threading.Thread(target=client.engine_died, args=(0, "killed by signal 9"))
            died.start()
            for stream in streams:
                ends = [delta for delta in await all_of(stream) if delta.finish]
                assert [end.finish for end in ends] == [FinishReason.ERROR]
                assert ends[0].error == "killed by signal 9"
            assert not client.is_healthy()
            with pytest.raises(WorkerDied, match="signal 9"):
                Stream(client, [request(client)])

    run(scenario())


def test_what_the_engine_said_before_it_died_still_arrives(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, [engine]):
            engine.going.clear()
            one = request(client)
            stream = Stream(client, [one])
            engine.send(Deltas(deltas=(TokenDelta(request_id=one.id, token_ids=(9,)),)))
            engine.send(Fatal(message="CUDA out of memory"))
            while engine._outbox:
                time.sleep(0.001)  # nothing is read meanwhile
            engine.stop()
            client.engine_died(0, "ended with code 1")
            deltas = await all_of(stream)
            assert deltas[0].token_ids == (9,)
            assert [delta.error for delta in deltas if delta.finish] == ["CUDA out of memory"]

    run(scenario())


def test_fatal_ends_open_requests(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, [engine]):
            stream = Stream(client, [request(client, 10**6)])
            engine.send(Fatal(message="a kernel failed"))
            [end] = [delta for delta in await all_of(stream) if delta.finish]
            assert (end.finish, end.error) == (FinishReason.ERROR, "a kernel failed")

    run(scenario())


def test_closing_ends_open_requests(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, _):
            stream = Stream(client, [request(client, 10**6)])
        [end] = [delta for delta in await all_of(stream) if delta.finish]
        assert end.finish is FinishReason.ERROR

    run(scenario())


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda client, _: client.engine_died(0, "ended with code 1"), WorkerDied),
        (lambda _, engine: engine.send(Fatal(message="ended with code 1")), BackendError),
    ],
    ids=["death", "fatal"],
)
def test_start_fails_when_the_engine_cannot_be_built(act, expected, run, tmp_path_factory):
    async def scenario():
        folder = str(tmp_path_factory.mktemp("s"))
        inbox = Receiver(address(folder, "engine"), ToEngine)
        client = EngineClient([inbox.address], folder)
        starting = asyncio.create_task(client.start())
        hello = await asyncio.to_thread(inbox.receive, 60_000)
        sender = Sender(hello.address)
        act(client, sender)
        with pytest.raises(expected, match="ended with code 1"):
            await starting
        await client.close()
        sender.close()
        inbox.close()

    run(scenario())


def test_unreadable_messages_end_open_requests(connect, run):
    async def scenario():
        async with connect(ENDLESS) as (client, [engine]):
            stream = Stream(client, [request(client, 10**6)])
            await stream.receive()
            engine.send(Deltas(deltas=("nonsense",)))
            [end] = [delta for delta in await all_of(stream) if delta.finish]
            assert end.finish is FinishReason.ERROR

    run(scenario())


def test_silence_is_unhealthy_only_while_requests_are_open(connect, run):
    async def scenario():
        now = 1000.0
        async with connect(ENDLESS, clock=lambda: now, silence_limit_s=5) as (client, [engine]):
            now += 1000
            assert client.is_healthy()  # idle
            engine.going.clear()
            Stream(client, [request(client, 10**6)])
            assert client.is_healthy()  # just asked
            now += 6
            assert not client.is_healthy()
            engine.send(Stats(counters=EngineCounters(steps=4), iterations=()))
            await until(client.is_healthy)
            assert client.counters.steps == 4

    run(scenario())


def test_iterations_are_bounded_and_drained(connect, run):
    async def scenario():
        async with connect(max_stats_len=3) as (client, [engine]):
            for start in (0, 2):
                pair = (iteration(start), iteration(start + 1))
                engine.send(Stats(counters=EngineCounters(steps=start + 2), iterations=pair))
            await until(lambda: client.counters.steps == 4)
            assert [one.iter for one in client.drain_iterations()] == [1, 2, 3]
            assert client.drain_iterations() == []

    run(scenario())


def test_submits_go_to_the_engine_with_the_fewest_open_requests(connect, run):
    async def scenario():
        async with connect(ENDLESS, num_engines=2) as (client, engines):
            for _ in range(4):
                Stream(client, [request(client, 10**6)])
            await until(lambda: all(len(engine.submitted()) == 2 for engine in engines))
            client.engine_died(0, "gone")
            await until(lambda: client.num_up == 1)
            assert client.is_healthy()
            Stream(client, [request(client, 10**6)])  # the other one serves on
            await until(lambda: len(engines[1].submitted()) == 3)

    run(scenario())


def test_an_engine_that_is_started_again_takes_requests_again(connect, run):
    async def scenario():
        async with connect(ENDLESS, num_engines=2) as (client, engines):
            streams = [Stream(client, [request(client, 10**6)]) for _ in range(2)]
            await until(lambda: all(engine.submitted() for engine in engines))
            await streams[0].receive()
            engines[0].going.clear()  # it would say other figures of its own
            engines[0].send(Stats(counters=EngineCounters(finished=5, waiting=3), iterations=()))
            await until(lambda: client.counters.finished == 5)
            engines[0].stop()
            client.engine_died(0, "killed by signal 9", restarts=True)
            end = (await all_of(streams[0]))[-1]
            assert end.finish is FinishReason.ERROR and "signal 9" in end.error
            await streams[1].receive()  # goes on
            assert client.num_up == 1 and client.is_healthy()
            again = FakeEngine(engines[0]._address, ENDLESS).start()
            try:
                await until(lambda: client.num_up == 2)
                assert client.counters.finished == 5  # totals never fall
                for _ in range(3):
                    Stream(client, [request(client, 10**6)])
                await until(lambda: len(again.submitted()) == 2)
            finally:
                again.stop()

    run(scenario())


def test_requests_without_a_token_go_to_another_engine_once(connect, run):
    async def scenario():
        async with connect(ENDLESS, num_engines=3) as (client, engines):
            for engine in engines:
                engine.going.clear()
            streams = [Stream(client, [request(client, 10**6)]) for _ in range(3)]
            await until(lambda: all(len(engine.submitted()) == 1 for engine in engines))
            engines[0].stop()
            client.engine_died(0, "killed by signal 9", restarts=True)
            await until(lambda: sum(len(engine.submitted()) for engine in engines[1:]) == 3)
            second = max((1, 2), key=lambda i: len(engines[i].submitted()))
            moved, own = engines[0].submitted()[0].id, engines[second].submitted()[0].id
            assert client.num_open == client.capacity.holdings.total()[:, 0].sum() == 3
            engines[second].send(Fatal(message="out of memory"))
            [end] = await all_of(streams[0])  # it has moved before
            assert (end.request_id, end.finish) == (moved, FinishReason.ERROR)
            assert "out of memory" in end.error
            last = engines[3 - second]
            await until(lambda: own in {one.id for one in last.submitted()})
            last.going.set()
            for stream in streams[1:]:
                assert (await stream.receive()).token_ids

    run(scenario())


@pytest.mark.parametrize("num_engines", [1, 2])
def test_where_no_engine_is_left_requests_fail_with_the_reason(connect, run, num_engines):
    async def scenario():
        async with connect(ENDLESS, num_engines=num_engines) as (client, engines):
            for engine in engines:
                engine.going.clear()
            stream = Stream(client, [request(client, 10**6)])
            await until(lambda: any(engine.submitted() for engine in engines))
            for engine in engines:
                engine.send(Fatal(message="out of memory"))
            [end] = await all_of(stream)
            assert end.finish is FinishReason.ERROR and "out of memory" in end.error
            assert client.num_open == 0

    run(scenario())
