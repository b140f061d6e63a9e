"""`penstock serve` on a GPU over HTTP: start-up, one stream, many at once against the engine's own.

    PYTHONPATH=src python tests/gpu/http_check.py --concurrency 32 256 --frontends 4
    PYTHONPATH=src python tests/gpu/http_check.py --concurrency 4096 --tokens 128 --prompt 64

Random weights, prompts of random ids, one event per token. The engine's own speed is measured in
the same server by the same prompts in requests that are not streamed, which come back as a few
messages. Fails when a stream is refused, cut or miscounted, or when streaming 256 or fewer reaches
less than `--min_share` of the engine's own.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT / "benchmarks")]

from server_process import Server  # noqa: E402
from shapes import SHAPES  # noqa: E402
from sse_client import Outcome, read_all, request_bytes  # noqa: E402

MAX_PROMPTS = 1024  # of one request


def prompts(count: int, num_ids: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(num_ids)] for _ in range(count)]


def body(prompt: list[int] | list[list[int]], num_tokens: int) -> dict:
    return {
        "model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def whole_seconds(url: str, asked: list[list[int]], num_tokens: int) -> float:
    """All prompts at once, none streamed."""
    batches = [asked[i : i + MAX_PROMPTS] for i in range(0, len(asked), MAX_PROMPTS)]

    def ask(batch: list[list[int]]) -> int:
        reply = httpx.post(f"{url}/v1/completions", json=body(batch, num_tokens), timeout=500)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["completion_tokens"]

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(batches)) as pool:
        total = sum(pool.map(ask, batches))
    seconds = time.perf_counter() - started
    assert total == len(asked) * num_tokens
    return seconds


def streamed(server: Server, asked: list[list[int]], num_tokens: int) -> tuple[float, list]:
    requests = [request_bytes("/v1/completions", body(one, num_tokens)) for one in asked]
    seconds, outcomes = read_all(server.port, requests, num_tokens)
    problems = [one.problem for one in outcomes if one.problem is not None]
    assert not problems, f"{len(problems)} streams failed, such as: {problems[:3]}"
    return seconds, outcomes


def tpot_ms(outcomes: list[Outcome], num_tokens: int) -> float:
    return statistics.median(one.rest_s for one in outcomes) / (num_tokens - 1) * 1e3


def check(server: Server, args: argparse.Namespace) -> bool:
    vocab_size = SHAPES[args.shape]["vocab_size"]
    streamed(server, prompts(2, args.prompt, vocab_size, 0), 8)
    _, [one] = streamed(server, prompts(1, args.prompt, vocab_size, 1), 257)
    print(f"one stream: TTFT {one.first_s * 1e3:.1f} ms, TPOT {tpot_ms([one], 257):.2f} ms")
    is_good = True
    for count in args.concurrency:
        asked = prompts(count, args.prompt, vocab_size, count)
        total = count * args.tokens
        seconds, outcomes = streamed(server, asked, args.tokens)
        own_s = whole_seconds(server.url, asked, args.tokens)
        share = own_s / seconds
        first_s = statistics.median(one.first_s for one in outcomes)
        print(
            f"{count} streams: {total / seconds:.0f} tok/s, {share:.1%} of the engine's "
            f"{total / own_s:.0f}, TTFT p50 {first_s:.2f} s, "
            f"TPOT p50 {tpot_ms(outcomes, args.tokens):.1f} ms",
            flush=True,
        )
        is_good &= count > 256 or share >= args.min_share
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="ids of each prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--frontends", type=int, help="default: what serve chooses")
    parser.add_argument("--min_share", type=float, default=0.97)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        started = time.perf_counter()
        with Server(
            folder, load_format="dummy", skip_tokenizer_init=True,
            max_seq_len=max(args.prompt + args.tokens, args.prompt + 257),
            max_batch_size=min(2048, max(args.concurrency)),
            kv_cache_config={"enable_block_reuse": False}, num_postprocess_workers=args.frontends,
        ) as server:  # fmt: skip
            print(f"ready after {time.perf_counter() - started:.1f} s")
            print(server.log.read_text())
            is_good = check(server, args)
            counters = server.counters()
            print({k: counters[k] for k in ("steps", "graph_replays", "preemptions")})
            assert counters["used_blocks"] == 0
    sys.exit(0 if is_good else f"streaming reached less than {args.min_share:.0%}")


if __name__ == "__main__":
    main()
