"""Clients that keep connections: no turn of theirs is lost, whatever the moment they choose."""

import asyncio
import random
import socket
import threading
import time

import aiohttp
from http_fakes import FakePipeline, running_server

from penstock.config.http import HttpConfig

NUM_CONVERSATIONS = 100


async def converse(
    session: aiohttp.ClientSession, url: str, seed: int, pause_s: float
) -> tuple[int, int]:
    """Turns that were answered, and all of them."""
    chance = random.Random(seed)
    num_turns = chance.randint(1, 4)
    num_answered = 0
    for turn in range(num_turns):
        if turn:
            await asyncio.sleep(pause_s * chance.uniform(0.5, 1.5))
        body = {"prompt": "a", "max_tokens": 4, "stream": chance.random() < 0.5}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                text = await answer.text()
                num_answered += answer.status == 200 and ("[DONE]" in text or "usage" in text)
        except aiohttp.ClientError:
            pass
    return num_answered, num_turns


async def converse_all(url: str, pause_s: float) -> tuple[int, int]:
    connector = aiohttp.TCPConnector(limit=NUM_CONVERSATIONS, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector) as session:
        done = await asyncio.gather(
            *(converse(session, url, seed, pause_s) for seed in range(NUM_CONVERSATIONS))
        )
    return sum(one for one, _ in done), sum(all_of_them for _, all_of_them in done)


def test_a_pool_of_conversations_loses_no_turn():
    """All in a tenth of the time: they pause about as long as the server once waited (5 s)."""
    settings = {"keep_alive_timeout": HttpConfig().keep_alive_timeout / 10}
    with running_server(FakePipeline(), http_config=settings) as server:
        num_answered, num_turns = asyncio.run(converse_all(server.url, pause_s=0.5))
    assert num_answered == num_turns > NUM_CONVERSATIONS * 2


def test_by_default_connections_outlive_those_of_a_usual_balancer():
    assert HttpConfig().keep_alive_timeout == 75  # 60 s is what most of them keep theirs


def test_bytes_that_have_arrived_keep_a_connection_open():
    """The event loop is busy when the time is over, and the next request already there."""
    with running_server(FakePipeline(), http_config={"keep_alive_timeout": 1.5}) as server:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", server.port), timeout=240)
        client.sendall(request)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
        [loop] = [one.loop for one in server.server.connections._open]
        is_busy = threading.Event()
        loop.call_soon_threadsafe(is_busy.set)
        loop.call_soon_threadsafe(time.sleep, 2.5)  # and the look at connections comes first after
        assert is_busy.wait(240)
        client.sendall(request)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
