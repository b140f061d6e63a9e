"""A server among clients that misbehave: does it answer, let go of everything, and stay as it was?

    python benchmarks/adversary.py --requests 100000

Starts `penstock serve` on loopback and sends it a mixture of good requests, malformed ones,
trailers, requests ahead, half-sent heads and bodies, and clients that leave at random moments; the
kinds are the `KINDS` below. Prints what became of each kind and fails when a request is answered
with a 5xx (other than 503, which is announced) or in another way than it should be, when one hangs,
when memory or open files have grown since the warm-up, when a generation is left running, or when
the server's log has a stack trace. `--seed` makes the same choices again.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml

LATE_S = 2.0  # the server's bounds on half-sent requests, so that there is no need to wait long
HANG_S = 60.0
TELL_S = 15.0
_SHOWN_CHARS = 2000
LEFT, CLOSED, CUT = "left", "closed", "cut"  # by us; by the server; by it, within an answer
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD_BODIES = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1.5}', b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "max_tokens": "x"}', b'{"prompt": "a", "nonsense": 1}', b"[" * 5000,
    b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": [-1]}', b'{"prompt": [999999999]}',
)  # fmt: skip
BAD_HEADS = (
    b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    CHUNKED + b"zz\r\n",
)  # fmt: skip


def post(body: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def completion(chance: random.Random, stream: bool, max_tokens: int = 4) -> bytes:
    prompt = "".join(chance.choice("abc \n") for _ in range(chance.randint(1, 40)))
    asked: dict[str, Any] = {"prompt": prompt, "stream": stream}
    return post(json.dumps(asked | {"max_tokens": chance.randint(1, max_tokens)}).encode())


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self) -> str:
        """One answer: its status, or `CLOSED`; a stream without its end is `CUT`."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return CLOSED
        try:
            body = await self._read_body(head.lower())
        except (asyncio.IncompleteReadError, ConnectionError):
            return CUT
        is_cut = b"text/event-stream" in head and not body.endswith(b"data: [DONE]\n\n")
        return CUT if is_cut else head.split()[1].decode()

    async def _read_body(self, head: bytes) -> bytes:
        if (length := re.search(rb"content-length: (\d+)", head)) is not None:
            return await self._reader.readexactly(int(length[1]))
        body = b""
        while size := int(await self._reader.readline() or b"", 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return body

    async def flood(self, piece: bytes, num_bytes: int) -> None:
        try:
            for _ in range(num_bytes // len(piece)):
                self._writer.write(piece)
                await self._writer.drain()
        except ConnectionError:
            pass

    def leave(self, abruptly: bool = False) -> str:
        if abruptly:
            self._writer.transport.abort()
        else:
            self._writer.close()
        return LEFT


Act = Callable[[random.Random, Client], Awaitable[Sequence[str]]]


async def send_whole(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(completion(chance, stream=False))
    return [await client.read()]


async def send_stream(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(completion(chance, stream=True, max_tokens=16))
    return [await client.read()]


async def send_turns(chance: random.Random, client: Client) -> Sequence[str]:
    became = []
    for _ in range(chance.randint(2, 4)):
        client.send(completion(chance, stream=chance.random() < 0.5))
        became.append(await client.read())
        await asyncio.sleep(chance.uniform(0, 0.05))
    return became


async def send_bad_body(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(post(chance.choice(BAD_BODIES)))
    return [await client.read()]


async def send_bad_head(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(chance.choice(BAD_HEADS))
    return [await client.read()]


async def send_trailers(chance: random.Random, client: Client) -> Sequence[str]:
    body = b'{"prompt": "a", "max_tokens": 2}'
    trailers = b"T: x\r\n" * chance.randint(1, 100)
    client.send(CHUNKED + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers))
    return [await client.read()]


async def send_endless_trailers(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(CHUNKED + b"2\r\n{}\r\n0\r\n")
    await client.flood(chance.choice((b"T: x\r\n" * 1000, b"x" * 6000)), 1 << 20)
    return [await client.read()]


async def send_ahead(chance: random.Random, client: Client) -> Sequence[str]:
    num_requests = chance.randint(2, 6)
    for _ in range(num_requests):
        good = completion(chance, stream=chance.random() < 0.5)
        client.send(chance.choice((HEALTH, good)))
    return [await client.read() for _ in range(num_requests)]


async def send_ahead_and_leave(chance: random.Random, client: Client) -> Sequence[str]:
    client.send(completion(chance, chance.random() < 0.5, max_tokens=200) + HEALTH)
    if chance.random() < 0.5:
        await asyncio.sleep(chance.uniform(0, 0.1))
    return [client.leave(chance.random() < 0.5)] * 2


async def leave_sometime(chance: random.Random, client: Client) -> Sequence[str]:
    request = completion(chance, chance.random() < 0.5, max_tokens=200)
    client.send(request[: chance.choice((len(request), chance.randrange(len(request))))])
    await asyncio.sleep(chance.uniform(0, 0.2))
    return [client.leave(chance.random() < 0.5)]


async def send_half(chance: random.Random, client: Client) -> Sequence[str]:
    """And wait to be told so."""
    request = completion(chance, stream=False)
    client.send(request[: chance.randrange(1, len(request))])
    return [await client.read()]


@dataclass(frozen=True, slots=True)
class Kind:
    act: Act
    share: float
    allowed: frozenset[str]


def kind(act: Act, share: float, *allowed: str) -> Kind:
    # Too much at once may be refused by design.
    return Kind(act, share, frozenset((*allowed, "429", "503")))


KINDS = (
    kind(send_whole, 0.2, "200"),
    kind(send_stream, 0.2, "200"),
    kind(send_turns, 0.1, "200"),
    kind(send_bad_body, 0.15, "400"),
    kind(send_bad_head, 0.08, "400", CLOSED),
    kind(send_trailers, 0.05, "200"),
    kind(send_endless_trailers, 0.01, "400", CLOSED),
    kind(send_ahead, 0.05, "200"),
    kind(send_ahead_and_leave, 0.05, LEFT),
    kind(leave_sometime, 0.09, LEFT),
    kind(send_half, 0.02, "408"),
)


@dataclass
class Tally:
    became: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_done: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, one: Kind, became: Sequence[str]) -> None:
        name = one.act.__name__
        for outcome in became:
            self.num_done += 1
            self.became[name, outcome] += 1
            if outcome not in one.allowed:
                self.problems.append(f"{name}: {outcome}")


async def send_all(port: int, num_requests: int, args: argparse.Namespace, tally: Tally) -> None:
    chance = random.Random(args.seed + tally.num_done)
    last = tally.num_done + num_requests
    deadline = time.monotonic() + args.seconds

    async def work() -> None:
        while tally.num_done < last and time.monotonic() < deadline:
            [one] = chance.choices(KINDS, [one.share for one in KINDS])
            client = await Client.connect(port)
            try:
                async with asyncio.timeout(HANG_S):
                    tally.add(one, await one.act(random.Random(chance.random()), client))
            except TimeoutError:
                tally.add(one, ["hangs"])
            finally:
                client.leave()

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    if tally.num_done < last:
        tally.problems.append(f"{tally.num_done} requests in {args.seconds} s, {last} were wanted")


class Server:
    """`penstock serve` on a free port."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        bounds = {"head_timeout": LATE_S, "body_timeout": LATE_S}
        settings = {
            "num_postprocess_workers": args.frontends,
            "http_config": bounds,
            # What the engine keeps by number of sequences, and its cache, is all in use after the
            # warm-up: otherwise it would look like growth.
            "max_batch_size": 8,
            "kv_cache_config": {"max_tokens": 8192},
        }
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        self.log = folder / "log"
        command = [sys.executable, "-m", "penstock", "serve", args.model, "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--config", str(config)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        for _ in range(1200):
            assert self.process.poll() is None, self.log.read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(self.log.read_text())

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Memory (bytes) and open files, by process."""
        first = psutil.Process(self.process.pid)
        named = {"HTTP": first}
        for number, child in enumerate(first.children()):
            module = child.cmdline()[-1].rpartition(".")[2]  # python -m penstock.ipc.child MODULE
            named[f"{module} {number}"] = child
        return {name: (one.memory_info().rss, one.num_fds()) for name, one in named.items()}

    async def num_running(self) -> int:
        """Generations that run or wait, as the engine counts them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        path = b"/prometheus/metrics"
        writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
        text = (await reader.read()).decode()
        writer.close()
        gauges = re.findall(r"^penstock_(?:running|waiting){[^}]*} (\S+)$", text, re.MULTILINE)
        assert len(gauges) == 2, text[:1000]
        return int(sum(map(float, gauges)))

    async def wait_until_quiet(self) -> int:
        """What is left running after a while: nothing, if all is well."""
        for _ in range(100):
            await asyncio.sleep(0.3)
            if not (left := await self.num_running()):
                return 0
        return left


async def tell(server: Server, tally: Tally) -> None:
    """How far it is, now and then."""
    while True:
        await asyncio.sleep(TELL_S)
        sizes = [f"{name} {rss / 2**20:.0f} MiB" for name, (rss, _) in server.sizes().items()]
        num_problems = len(tally.problems)
        print(f"{tally.num_done} requests, {num_problems} problems, {', '.join(sizes)}", flush=True)


async def attack(server: Server, args: argparse.Namespace) -> Tally:
    tally = Tally()
    telling = asyncio.create_task(tell(server, tally))
    await send_all(server.port, max(1000, args.requests // 10), args, tally)  # warms up
    await server.wait_until_quiet()
    before = server.sizes()
    num_before, began = tally.num_done, time.monotonic()
    await send_all(server.port, args.requests, args, tally)
    seconds = time.monotonic() - began
    left = await server.wait_until_quiet()
    await asyncio.sleep(LATE_S)
    for name, (rss, num_files) in server.sizes().items():
        rss_before, files_before = before[name]
        growth_mib = (rss - rss_before) / 2**20
        print(
            f"{name:24} {rss_before / 2**20:8.1f} MiB -> {rss / 2**20:8.1f} MiB, "
            f"{files_before} -> {num_files} open files"
        )
        if growth_mib > args.max_growth:
            tally.problems.append(f"{name} has grown by {growth_mib:.1f} MiB")
        if num_files > files_before + 8:
            tally.problems.append(f"{name} has {num_files - files_before} more open files")
    if left:
        tally.problems.append(f"{left} generations are left running")
    if server.process.poll() is not None:
        tally.problems.append(f"the server ended with code {server.process.returncode}")
    telling.cancel()
    num_sent = tally.num_done - num_before
    print(
        f"{num_sent} requests in {seconds:.1f} s: {num_sent / seconds:.0f}/s; {left} left running"
    )
    return tally


def show(tally: Tally) -> None:
    for one in KINDS:
        name = one.act.__name__
        outcomes = {what: n for (who, what), n in sorted(tally.became.items()) if who == name}
        print(f"{name:24} {', '.join(f'{what}: {n}' for what, n in outcomes.items())}")
    for problem, count in Counter(tally.problems).items():
        print(f"PROBLEM {problem} ({count} times)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="after those that warm it up")
    parser.add_argument("--concurrency", type=int, default=64, help="clients at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="most time to send them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--max-growth", type=float, default=32.0, help="MiB of each process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), args)
        try:
            server.wait_until_ready()
            tally = uvloop.run(attack(server, args))
        finally:
            server.process.terminate()
            code = server.process.wait(60)
        if (start := (text := server.log.read_text()).find("Traceback")) >= 0:
            shown = text[start : start + _SHOWN_CHARS]
            tally.problems.append(f"{text.count('Traceback')} stack traces in the log: {shown}")
        if code:
            tally.problems.append(f"the server left with code {code}")
    show(tally)
    sys.exit(1 if tally.problems else 0)


if __name__ == "__main__":
    main()
