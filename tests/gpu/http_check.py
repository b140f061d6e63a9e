"""`penstock serve` on a GPU over HTTP: start-up, one stream, 256 streams at once.

    PYTHONPATH=src python tests/gpu/http_check.py

The Llama-3.1-8B shape with random weights, prompts of 1024 random ids, 1024 tokens out, streamed.
Fails when a stream does not end or has another length.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT / "benchmarks")]

from server_process import Server  # noqa: E402
from shapes import LLAMA_3_1_8B  # noqa: E402

NUM_STREAMS = 256


async def stream(session: aiohttp.ClientSession, url: str, seed: int, num_tokens: int):
    rng = random.Random(seed)
    body = {
        "model": "m", "prompt": [rng.randrange(128256) for _ in range(1024)],
        "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    started, first, usage, num_chunks = time.perf_counter(), None, None, 0
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            if first is None:
                first = time.perf_counter()
            num_chunks += 1
            if b'"choices":[]' in line:
                usage = json.loads(line[6:])["usage"]
    assert usage is not None and usage["completion_tokens"] == num_tokens, usage
    assert num_chunks >= num_tokens, f"{num_tokens} tokens came in {num_chunks} chunks"
    return first - started, (time.perf_counter() - first) / max(1, num_tokens - 1)


async def measure(url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await stream(session, url, 0, 8)
        ttft, tpot = await stream(session, url, 1, 257)
        print(f"one stream: TTFT {ttft * 1e3:.1f} ms, TPOT {tpot * 1e3:.2f} ms")
        for count in (32, NUM_STREAMS):
            started = time.perf_counter()
            rows = await asyncio.gather(*(stream(session, url, i + 2, 1024) for i in range(count)))
            seconds = time.perf_counter() - started
            print(
                f"{count} streams: {count * 1024 / seconds:.0f} tok/s, "
                f"TTFT p50 {statistics.median(r[0] for r in rows):.2f} s, "
                f"TPOT p50 {statistics.median(r[1] for r in rows) * 1e3:.1f} ms",
                flush=True,
            )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_1_8B))
        started = time.perf_counter()
        with Server(
            folder, load_format="dummy", skip_tokenizer_init=True, max_seq_len=2048,
            max_batch_size=NUM_STREAMS, kv_cache_config={"enable_block_reuse": False},
        ) as server:  # fmt: skip
            print(f"ready after {time.perf_counter() - started:.1f} s")
            print(server.log.read_text())
            asyncio.run(measure(server.url))
            counters = server.counters()
            print({k: counters[k] for k in ("steps", "graph_replays", "preemptions")})
            assert counters["used_blocks"] == 0


if __name__ == "__main__":
    main()
