"""Many clients, clients that leave, an engine that dies: every request ends."""

import asyncio
import os
import signal
from collections.abc import Callable

import httpx
import openai
import psutil
import pytest
from server_process import Server
from waiting import until


@pytest.fixture(scope="module")
def server():
    with Server("tiny", max_batch_size=32) as server:
        yield server


def test_two_hundred_streaming_clients_are_all_answered_and_the_pool_is_empty_afterwards(server):
    async def one(client: openai.AsyncOpenAI, i: int) -> int:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Tell me about the number {i}."}],
            max_tokens=16 + i % 17,
            temperature=i % 2,
            seed=i,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage, finish = None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].finish_reason:
                finish = chunk.choices[0].finish_reason
        assert finish == "length"
        assert usage.completion_tokens == 16 + i % 17
        return usage.completion_tokens

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=256)
        http = httpx.AsyncClient(limits=limits, timeout=240)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    before = server.counters()
    counts = asyncio.run(run())
    after = server.counters()
    assert len(counts) == 200
    assert after["generated_tokens"] - before["generated_tokens"] == sum(counts)
    assert after["finished"] - before["finished"] == 200
    assert after["used_blocks"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server, stream):
    body = {
        "model": "tiny", "prompt": "A long story", "max_tokens": 7000, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    aborted = server.counters()["aborted"]

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(_read(client, f"{server.url}/v1/completions", body))
            await _once(lambda: server.counters_now()["running"] == 1)
            request.cancel()

    asyncio.run(leave())
    until(lambda: server.counters()["aborted"] == aborted + 1)  # not run to its end, that is
    assert server.counters()["used_blocks"] == 0


async def _read(client: httpx.AsyncClient, url: str, body: dict) -> None:
    async with client.stream("POST", url, json=body) as reply:
        async for _ in reply.aiter_raw():
            pass


async def _once(is_so: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, is_so)


def test_equal_seeds_give_equal_text_alone_and_in_a_crowd(server):
    def ask(seed: int) -> str:
        reply = server.post(
            "/v1/completions", model="tiny", prompt="The river", max_tokens=24, seed=seed,
            temperature=1.0, ignore_eos=True,
        )  # fmt: skip
        return reply["choices"][0]["text"]

    alone = ask(11)
    reply = server.post(
        "/v1/completions", model="tiny", prompt=["The river"] * 9 + ["A valve"], max_tokens=24,
        seed=11, temperature=1.0, ignore_eos=True, n=2,
    )  # fmt: skip
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts[0] == alone
    assert ask(12) != alone


def test_samples_of_one_prompt_share_its_cache_and_differ(server):
    before = server.counters()
    reply = server.post(
        "/v1/completions", model="tiny", prompt="A sentence of some length. " * 20, max_tokens=24,
        n=4, temperature=1.0, ignore_eos=True, seed=3,
    )  # fmt: skip
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in reply["choices"]}) > 1
    hits = server.counters()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert hits >= 3 * 64


def test_a_killed_engine_ends_its_requests_and_the_server():
    with Server("tiny") as server:
        [engine] = server.children("penstock.engine_process")

        async def run() -> str:
            async with httpx.AsyncClient() as client:
                body = {"model": "m", "prompt": "x", "max_tokens": 7000, "ignore_eos": True}
                request = asyncio.create_task(
                    client.post(f"{server.url}/v1/completions", json=body)
                )
                await _once(lambda: server.counters_now()["running"] == 1)
                os.kill(engine.pid, signal.SIGKILL)
                try:
                    return str((await request).status_code)
                except httpx.HTTPError as error:
                    return type(error).__name__

        assert asyncio.run(run()) in ("500", "503")
        assert server.process.wait(240) != 0, "a supervisor must see that it failed"


def test_a_killed_front_end_frees_its_requests_and_the_others_go_on():
    with Server("tiny", num_postprocess_workers=2) as server:
        [other] = server.children("penstock.server.api_server_process")
        body = {
            "model": "m", "prompt": "A story", "max_tokens": 7000, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip

        async def run() -> None:
            async with httpx.AsyncClient() as client:
                psutil.Process(server.process.pid).suspend()  # the other one accepts these
                lost = [
                    asyncio.create_task(_read(client, f"{server.url}/v1/completions", body))
                    for _ in range(3)
                ]
                await _once(lambda: server.counters_now()["running"] == 3)
                psutil.Process(server.process.pid).resume()
                other.kill()
                ends = await asyncio.gather(*lost, return_exceptions=True)
                assert all(isinstance(end, httpx.HTTPError) for end in ends), ends

        asyncio.run(run())
        until(lambda: server.counters()["aborted"] == 3)  # one that is new has to hear of it first
        assert server.counters()["used_blocks"] == 0
        reply = server.post("/v1/completions", model="m", prompt="x", max_tokens=4)
        assert reply["usage"]["completion_tokens"] <= 4


def test_an_interrupted_server_leaves_no_process_behind():
    with Server("tiny", "--tp_size", "2", device="cpu") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 3  # two ranks and a chat template
        assert server.stop() == 0
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not alive


def test_a_killed_http_process_takes_its_engine_along():
    with Server("tiny") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=240)
        assert not alive
