"""How fast the HTTP side turns tokens into server-sent events, without a model behind it.

    python benchmarks/http_streams.py --streams 256 --tokens 400 --rate 20000 --frontends 1 2
    python benchmarks/http_streams.py --stages

The first runs the real server against `scripted_engine.py`, which makes one token for every stream
per step at `--rate` tokens per second, and prints the rate the clients saw, what share of the
engine's own that is, and the CPU time of the API servers per event; 1e6 / that is what one process
can do. It fails when a stream is refused, cut or miscounted. The second times the way of one token
through an API server, stage by stage.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop
from sse_client import read_all, request_bytes

from penstock.config.schema import EngineConfig
from penstock.frontend import engine_handle
from penstock.frontend.generation import Generation
from penstock.frontend.sample import Sample
from penstock.hub.folder import local_folder
from penstock.ipc import messages
from penstock.metrics.collect import Metrics
from penstock.server.generations import Generations, Write
from penstock.server.launch import serve
from penstock.server.openai.chat import ChatResponder
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.sse import EventStream
from penstock.text.tokenizer import Tokenizer
from penstock.types.outputs import TokenDelta
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters

HERE = Path(__file__).resolve().parent
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


def cpu_seconds(pid: int) -> tuple[float, float]:
    """In the process's own code, and in the kernel on its behalf."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    tick = os.sysconf("SC_CLK_TCK")
    return int(user) / tick, int(system) / tick


def api_servers(server_pid: int) -> list[int]:
    """The serving process and those of its children that are no engine."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    command = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [server_pid, *(pid for pid, line in command.items() if b"scripted_engine" not in line)]


def measure(port: int, pid: int, log: Path, endpoint: str, args: argparse.Namespace) -> None:
    body = BODIES[endpoint] | {"model": "m", "max_tokens": args.tokens, "ignore_eos": True}
    requests = [request_bytes(f"/v1/{endpoint}", body)] * args.streams
    before = {one: cpu_seconds(one) for one in api_servers(pid)}
    seconds, outcomes = read_all(port, requests, args.tokens)
    after = {one: cpu_seconds(one) for one in before}
    total = args.streams * args.tokens
    own_us, kernel_us = (
        sum(after[one][kind] - before[one][kind] for one in before) / total * 1e6 for kind in (0, 1)
    )
    shares = [sum(after[one]) - sum(before[one]) for one in before]
    time.sleep(0.2)
    said = re.findall(r"scripted engine: (\d+) tokens in (\S+) s", log.read_text())[-1]
    engine_rate = int(said[0]) / float(said[1])
    first_s = [one.first_s for one in outcomes]
    problems = [one.problem for one in outcomes if one.problem is not None]
    print(
        f"{args.streams} streams of {args.tokens} tokens, {endpoint}, {len(before)} API servers: "
        f"{total / seconds:.0f} events/s, {total / seconds / engine_rate:.1%} of the engine's "
        f"{engine_rate:.0f}; CPU per event {own_us:.1f} us + {kernel_us:.1f} us in the kernel "
        f"({' + '.join(f'{one:.1f} s' for one in shares)}); first event p50 "
        f"{statistics.median(first_s) * 1e3:.0f} ms, last {max(first_s) * 1e3:.0f} ms; "
        f"{len(problems)} errors",
        flush=True,
    )
    for line in problems[:5]:
        print(f"  {line}")
    if problems:
        sys.exit(1)


def serve_scripted(settings: dict[str, object]) -> int:
    """In the server process."""
    engine_handle.ENGINE_MODULE = "scripted_engine"
    return serve(EngineConfig.model_validate(settings))


def tokenizer_of(model: str) -> Tokenizer:
    return Tokenizer.from_folder(local_folder(model, weights=False))


def spoken_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that each stand for some text, so that every one makes an event."""
    ids = tokenizer.encode("A pipe brings water to the wheel.\n", add_special_tokens=False)
    pieces = {one: tokenizer.token_bytes(one) for one in ids}
    # A blank at the beginning of a chat's answer is left out where a model may think first.
    return [one for one in ids if pieces[one].isascii() and pieces[one].strip()]


def run(num_api_servers: int, args: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ids = spoken_ids(tokenizer_of(args.model))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        settings = {
            "model": args.model,
            "host": "127.0.0.1",
            "port": port,
            "max_queued_requests": 65536,
            "num_postprocess_workers": num_api_servers,
            "model_kwargs": {"tokens_per_s": args.rate, "token_ids": ids},
        }
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(settings)],
            stderr=log.open("wb"),
            env=os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
        )
        try:
            wait_until_ready(port, server, log)
            for endpoint in args.endpoints:
                measure(port, server.pid, log, endpoint, args)
        finally:
            server.terminate()
            server.wait(30)


def wait_until_ready(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            time.sleep(2.0)  # the scripted engine is up at once, further API servers are not
            return
    raise TimeoutError(log.read_text())


def _nothing(*_: object) -> None:
    pass


async def show_stages(model: str) -> None:
    """Each line is what the way costs up to there; sockets are this process's own, and read."""
    tokenizer = tokenizer_of(model)
    delta = TokenDelta(request_id=1, token_ids=(spoken_ids(tokenizer)[-2],))
    step = messages.encode(messages.Deltas(deltas=(delta,) * 256))
    decoder = messages.decoder(messages.ToClient)
    metrics = Metrics("m", EngineCounters, list)
    sampling = SamplingParams()
    request = Request(id=1, prompt_ids=np.ones(1, np.int32), sampling=sampling, max_tokens=1 << 30)
    client: Any = SimpleNamespace(submit=lambda *_: None, abort=lambda _: None)

    def generation() -> Generation:
        return Generation(
            client, [request], [Sample(0, sampling, tokenizer, 1)], sampling, "", _nothing
        )

    def best_us(act: Callable[[], object], per: int = 1) -> float:
        times = []
        for _ in range(9):
            started = time.perf_counter()
            for _ in range(20_000 // per):
                act()
            times.append((time.perf_counter() - started) / (20_000 // per) / per)
        return min(times) * 1e6

    print(f"{best_us(lambda: decoder.decode(step), per=256):6.2f} us  message -> token delta")
    texts = generation()
    texts.subscribe(0, _nothing, _nothing)
    print(f"{best_us(lambda: texts.on_tokens(delta)):6.2f} us  token delta -> text delta")
    measured = generation()
    streams = [subscribed(Generations([measured], metrics.observe, 0.0, True), _nothing)]
    await asyncio.sleep(0)
    print(f"{best_us(lambda: measured.on_tokens(delta)):6.2f} us  ... measured")
    written = generation()
    generations = Generations([written], metrics.observe, 0.0, True)
    state: Any = SimpleNamespace(
        names=None, model_name="m", pipeline=SimpleNamespace(tokenizer=tokenizer)
    )
    asked = parse(ChatRequest, BODIES["chat/completions"] | {"stream": True})
    responder = ChatResponder(asked, state, generations)
    events: list[bytes] = []
    stream = EventStream(generations, responder)
    stream._pipe = SimpleNamespace(write=events.append)
    streams.append(subscribed(generations, stream.write_event))
    await asyncio.sleep(0)
    print(f"{best_us(lambda: written.on_tokens(delta)):6.2f} us  ... as an event")
    print(f"{await time_writes(events[-1]):6.2f} us  event -> socket")
    for one in streams:
        one.cancel()


def subscribed(generations: Generations, write: Write) -> "asyncio.Task[Exception | None]":
    return asyncio.create_task(generations.stream_to(write))


async def time_writes(data: bytes) -> float:
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()
    pairs = []
    for _ in range(64):
        reader = socket.create_connection(listener.getsockname())
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=listener.accept()[0])
        pairs.append((transport, reader))
    times = []
    for _ in range(300):
        started = time.perf_counter()
        for transport, _ in pairs:
            transport.write(data)
        await asyncio.sleep(0)
        times.append((time.perf_counter() - started) / len(pairs))
        for _, reader in pairs:
            reader.recv(1 << 16)
    return min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--stages", action="store_true", help="time the stages of one token")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--rate", type=int, default=20000, help="engine's tokens/s; 0: no pause")
    parser.add_argument("--frontends", type=int, nargs="+", default=[1])
    parser.add_argument("--endpoints", nargs="+", default=sorted(BODIES), choices=sorted(BODIES))
    parser.add_argument("--model", default="tiny", help="whose tokenizer is used")
    args = parser.parse_args()
    if args.serve:
        sys.exit(serve_scripted(json.loads(args.serve)))
    if args.stages:
        uvloop.run(show_stages(args.model))
        return
    for num_api_servers in args.frontends:
        run(num_api_servers, args)


if __name__ == "__main__":
    main()
