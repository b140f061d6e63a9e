"""What structured output costs over HTTP: throughput, first tokens, streams beside new schemas.

    python benchmarks/structured.py --tokenizer FOLDER [--rows 8b-bf16] [--output FILE]
    python benchmarks/structured.py --tokenizer FOLDER --rows tiny --concurrency 4 --tokens 24

Random weights; `--tokenizer` is a folder with the tokenizer.json of a model with the row's
vocabulary (8b-bf16: Llama 3). Prompts of `--prompt` random ids, prefix reuse off, greedy.

throughput: so many requests at once, each of `--tokens` tokens: plain with EOS ignored, and with a
schema of 40 fields that is longer than that. The best of `--runs`; the goal is 0.97 of plain. How
many of the tokens were forced by the grammar, and so not drawn, is printed beside it.
first token: one request at a time, plain and with that schema, which is cached by then; the goal
is 15 ms more.
beside: 32 plain streams, to which `--arriving` requests come at once: plain ones, then as many with
a different schema each. The 99th percentile of the gaps of the 32, from then until the last of
those has ended; the goal is 1.3 times that of plain ones.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop
from shapes import ROWS, Row, prompts
from table_server import serving

from penstock.bench.http import HttpClient
from penstock.bench.openai import AnswerReader
from penstock.bench.records import Response

NUM_FIELDS, NUM_STREAMS = 40, 32
MIN_SHARE, MAX_MORE_MS, MAX_GAP_RATIO = 0.97, 15.0, 1.3


def schema(serial: int) -> dict[str, Any]:
    """An object of 40 fields, of numbers, texts, choices and lists."""
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 99999999},
        {"type": "string", "minLength": 8, "maxLength": 24},
        {"enum": ["north", "north east", "south", "south west", "unknown"]},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    ]
    names = [f"field_{serial}_{number}" for number in range(NUM_FIELDS)]
    return {
        "type": "object",
        "properties": {name: kinds[at % len(kinds)] for at, name in enumerate(names)},
        "required": names,
    }


class Load:
    def __init__(self, url: str, row: Row, args: argparse.Namespace) -> None:
        self._client = HttpClient(url, {})
        self._url, self._row, self._args, self._seed = url, row, args, 0

    def _request(self, num_tokens: int, schema: dict[str, Any] | None) -> bytes:
        self._seed += 1
        [prompt] = prompts(1, self._args.prompt, self._row.config["vocab_size"], self._seed)
        asked: dict[str, Any] = {"ignore_eos": True}
        if schema is not None:
            asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}
            asked["response_format"]["json_schema"]["schema"] = schema
        body = {
            "model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return self._client.post_request("/v1/completions", json.dumps(body | asked).encode())

    async def _exchange(self, request: bytes) -> Response:
        reader = AnswerReader(is_stream=True)
        await self._client.exchange(request, reader)
        reader.end()
        response = reader.response
        assert response.status == 200 and response.error is None, response.error
        return response

    async def all_at_once(self, count: int, schemas: Sequence[dict[str, Any] | None]) -> float:
        """Tokens per second."""
        num_tokens = self._args.tokens
        requests = [self._request(num_tokens, schemas[i % len(schemas)]) for i in range(count)]
        started = time.perf_counter()
        responses = await asyncio.gather(*(self._exchange(one) for one in requests))
        seconds = time.perf_counter() - started
        assert all(one.num_output == num_tokens for one in responses), "an output ended early"
        return count * num_tokens / seconds

    async def first_token_ms(self, schema: dict[str, Any] | None, count: int) -> float:
        responses = [await self._exchange(self._request(2, schema)) for _ in range(count)]
        return statistics.median(one.ttft_s for one in responses) * 1e3

    async def gaps_ms(self, schemas: Sequence[dict[str, Any] | None]) -> list[float]:
        """Of the streams that run, while so many requests come and are answered."""
        long = [self._request(self._args.stream_tokens, None) for _ in range(NUM_STREAMS)]
        running = [asyncio.create_task(self._exchange(one)) for one in long]
        await asyncio.sleep(self._args.settle_s)
        requests = [self._request(16, one) for one in schemas]
        begin = time.perf_counter()
        await asyncio.gather(*(self._exchange(one) for one in requests))
        end = time.perf_counter()
        gaps = []
        for response in await asyncio.gather(*running):
            at = response.first_at
            for gap in response.gaps_s:
                at += gap
                if begin <= at <= end:
                    gaps.append(gap * 1e3)
        assert gaps, "the streams had ended before: raise --stream_tokens"
        return gaps

    def num_known(self) -> int:
        """Tokens so far that a grammar has forced."""
        for line in httpx.get(f"{self._url}/prometheus/metrics").text.splitlines():
            if line.startswith("penstock_known_tokens"):
                return int(float(line.split()[-1]))
        return 0

    async def measure(self) -> dict[str, float]:
        args, fixed, figures = self._args, schema(0), {}
        for count in args.concurrency:
            plain = guided = 0.0
            await self.all_at_once(count, [None])
            await self.all_at_once(1, [fixed])
            for _ in range(args.runs):
                plain = max(plain, await self.all_at_once(count, [None]))
                known = self.num_known()
                guided = max(guided, await self.all_at_once(count, [fixed]))
                known = self.num_known() - known
            share = guided / plain
            figures[f"c{count}_plain_tok_s"], figures[f"c{count}_schema_tok_s"] = plain, guided
            tell(
                f"{count} at once: plain {plain:.0f} tok/s, schema {guided:.0f}: {share:.3f}",
                f"{MIN_SHARE}",
                share >= MIN_SHARE,
                f"; {known / (count * args.tokens):.0%} of its tokens forced",
            )
        plain = await self.first_token_ms(None, 15)
        guided = await self.first_token_ms(fixed, 15)
        figures["ttft_plain_ms"], figures["ttft_schema_ms"] = plain, guided
        tell(
            f"first token: plain {plain:.1f} ms, schema {guided:.1f} ms",
            f"{MAX_MORE_MS:g} ms more",
            guided - plain <= MAX_MORE_MS,
        )
        await self.gaps_ms([None] * args.arriving)
        gaps = await self.gaps_ms([None] * args.arriving)
        beside = await self.gaps_ms([schema(1 + number) for number in range(args.arriving)])
        plain, guided = p99(gaps), p99(beside)
        figures["itl_p99_beside_plain_ms"], figures["itl_p99_beside_schemas_ms"] = plain, guided
        tell(
            f"ITL p99 of {NUM_STREAMS} streams beside {args.arriving} requests at once: plain "
            f"{plain:.1f} ms, different schemas {guided:.1f} ms: {guided / plain:.2f}",
            f"{MAX_GAP_RATIO}",
            guided / plain <= MAX_GAP_RATIO,
            f"; largest gap {max(gaps):.0f} and {max(beside):.0f} ms",
        )
        return figures


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def tell(found: str, goal: str, is_met: bool, more: str = "") -> None:
    print(f"  {found} (goal {goal}: {'met' if is_met else 'MISSED'}){more}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=["8b-bf16"], choices=list(ROWS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--stream_tokens", type=int, default=400)
    parser.add_argument("--settle_s", type=float, default=0.5)
    parser.add_argument("--arriving", type=int, default=100)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for name in args.rows:
        row = ROWS[name]
        print(f"{name}: schema of {NUM_FIELDS} fields, prompts of {args.prompt}", flush=True)
        longest = args.prompt + max(args.tokens, args.stream_tokens)
        most = max(*args.concurrency, NUM_STREAMS + args.arriving)
        settings = row.engine_settings(longest, most) | {"skip_tokenizer_init": False}
        with (
            tempfile.TemporaryDirectory() as home,
            serving(row, settings, Path(home), args.tokenizer) as (url, _),
        ):
            found[name] = uvloop.run(measure(url, row, args))
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


async def measure(url: str, row: Row, args: argparse.Namespace) -> dict[str, float]:
    return await Load(url, row, args).measure()


if __name__ == "__main__":
    sys.exit(main())
