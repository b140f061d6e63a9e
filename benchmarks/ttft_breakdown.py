"""Where the time to the first token goes, from socket to socket, without a model behind it.

    python benchmarks/ttft_breakdown.py
    python benchmarks/ttft_breakdown.py --against ../before/src --burst 256

Sends one request after the other on one connection to the real server with `scripted_engine.py`
behind it, and prints the time of every stage up to the first event (its median, or --percentile).
With `--against` a second server runs the package in another folder; the two take turns within one
run, so that the ratio means something on a machine that does other work too. `--burst` also sends
so many streams at once. The stages are methods that are wrapped here; the package knows nothing of
it.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_streams import HERE, spoken_ids, tokenizer_of, wait_until_ready
from sse_client import read_all, request_bytes
from ttft_trace import COLUMN, STAGES, Trace, nothing, wrap, wrap_async

_TOKENS_PER_S = 20000  # of the engine; its first step comes at once
_WORD = "Tell me how water drives the wheel of the old mill beside the river, and why. "


def serve_traced(settings: dict[str, Any], trace: Trace) -> int:
    """In the server process."""
    from penstock.config.schema import EngineConfig
    from penstock.frontend import engine_handle, pipeline
    from penstock.frontend.client import EngineClient
    from penstock.ipc.messages import Deltas
    from penstock.server.http import HttpProtocol
    from penstock.server.launch import serve
    from penstock.server.openai import chat, completions
    from penstock.server.pipe import SocketPipe

    def on_read(*_: Any) -> None:
        trace.next()
        trace.mark("read")

    def on_message(client: Any, link: Any, message: Any) -> None:
        if isinstance(message, Deltas):
            trace.mark("delivered")

    wrap(HttpProtocol, "data_received", on_read, nothing)
    for endpoint in (chat, completions):
        wrap_async(endpoint, "read_body", "routed", "parsed", trace)
    wrap_async(pipeline.GenerationPipeline, "_render", None, "rendered", trace)
    wrap(pipeline, "_encode", nothing, lambda *_: trace.mark("tokenized"))
    wrap(EngineClient, "submit", nothing, lambda *_: trace.mark("submitted"))
    wrap(EngineClient, "_handle", on_message, nothing)
    wrap(SocketPipe, "write", nothing, lambda *_: trace.mark("written"))
    engine_handle.ENGINE_MODULE = "ttft_trace"
    return serve(EngineConfig.model_validate(settings))


@dataclass
class Server:
    """One version under test, and what was seen of it by endpoint."""

    name: str
    port: int
    pid: int
    trace: Trace
    rows: dict[str, list[list[float]]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    bursts: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def cpu_now(self) -> float:
        """Of the API server and the process of its chat template."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        pids = [one for one in children if b"template" in Path(f"/proc/{one}/cmdline").read_bytes()]
        threads = [
            path for one in (self.pid, *pids) for path in Path(f"/proc/{one}/task").iterdir()
        ]
        return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9

    def ask(self, endpoint: str, request: bytes, count: int) -> None:
        before = self.cpu_now()
        for _ in range(count):
            self.trace.next()
            self.trace.mark("sent")
            self._socket.sendall(request)
            read = b""
            while b"data: [DONE]" not in read:
                read += self._socket.recv(1 << 16)
                assert read.startswith(b"HTTP/1.1 200"), read
                if b"\r\ndata: {" in read:
                    self.trace.mark("received")
            self.rows.setdefault(endpoint, []).append(self.trace.row())
        self.cpu_s[endpoint] = self.cpu_s.get(endpoint, 0.0) + self.cpu_now() - before

    def burst(self, endpoint: str, request: bytes, count: int, num_tokens: int) -> None:
        _, outcomes = read_all(self.port, [request] * count, num_tokens)
        problems = [one.problem for one in outcomes if one.problem is not None]
        assert not problems, problems[0]
        p50 = statistics.median(one.first_s for one in outcomes)
        self.bursts.setdefault(endpoint, []).append(p50)

    def stages(self, endpoint: str, percentile: int) -> dict[str, float]:
        """Microseconds of each stage, and of the way from the first to the last.

        Where the next process has a message before its sender returns from sending it, the rest
        of the sender's stage is the receiver's.
        """
        spans: dict[str, list[float]] = {}
        for row in self.rows[endpoint]:
            before, last = row[0], row[-1]
            for name, moment in zip(STAGES, row, strict=True):
                if moment and name != "sent":
                    moment = max(moment, before)
                    spans.setdefault(name, []).append(moment - before)
                    before = moment
            way_out = row[COLUMN["delivered"]]
            spans.setdefault("socket -> Submit", []).append(row[COLUMN["submitted"]] - row[1])
            spans.setdefault("Deltas -> socket", []).append(row[COLUMN["written"]] - way_out)
            spans.setdefault("in all", []).append(last - row[0])
        return {
            name: statistics.quantiles(times, n=100)[percentile - 1] * 1e6
            for name, times in spans.items()
        }


@contextmanager
def running(name: str, package: Path | None, model: str, folder: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, trace = folder / f"{name}.log", folder / f"{name}.trace"
    seen = Trace.create(trace)
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "max_queued_requests": 65536,
        "model_kwargs": {
            "tokens_per_s": _TOKENS_PER_S,
            "token_ids": spoken_ids(tokenizer_of(model)),
            "trace": str(trace),
        },
    }
    paths = [HERE, *([] if package is None else [package]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", json.dumps(settings)],
        stderr=log.open("wb"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths)},
    )
    try:
        wait_until_ready(port, process, log)
        yield Server(name, port, process.pid, seen)
    finally:
        process.terminate()
        process.wait(30)


def bodies(num_words: int) -> dict[str, dict[str, Any]]:
    text = (_WORD * (num_words // len(_WORD.split()) + 1)).strip()
    return {
        "completions": {"prompt": text},
        "chat/completions": {"messages": [{"role": "user", "content": text}]},
    }


def compare(servers: list[Server], args: argparse.Namespace) -> None:
    limits = {"model": "m", "max_tokens": 2, "ignore_eos": True}
    asked = {name: body | limits for name, body in bodies(args.words).items()}
    requests = {name: request_bytes(f"/v1/{name}", body) for name, body in asked.items()}
    for server in servers:
        for name, request in requests.items():
            server.ask(name, request, args.block)
        server.rows.clear()
        server.cpu_s.clear()
    for _ in range(max(1, args.requests // args.block)):
        for server in servers:
            for name, request in requests.items():
                server.ask(name, request, args.block)
    for _ in range(args.rounds if args.burst else 0):
        for server in servers:
            for name, request in requests.items():
                server.burst(name, request, args.burst, 2)


def report(servers: list[Server], args: argparse.Namespace) -> None:
    for endpoint in bodies(1):
        print(f"\n{endpoint}, us" + "".join(f" | {one.name}" for one in servers))
        tables = [one.stages(endpoint, args.percentile) for one in servers]
        for name in [*STAGES, "socket -> Submit", "Deltas -> socket", "in all"]:
            if name in tables[0]:
                _line(STAGES.get(name, name), [table[name] for table in tables])
        _line(
            "CPU of the front end per request",
            [one.cpu_s[endpoint] / len(one.rows[endpoint]) * 1e6 for one in servers],
        )
        if args.burst:
            bursts = [statistics.median(one.bursts[endpoint]) * 1e6 for one in servers]
            _line(f"burst of {args.burst}, first event p50", bursts)


def _line(name: str, figures: list[float]) -> None:
    ratio = f" | {figures[0] / figures[1]:.2f}" if len(figures) > 1 and figures[1] else ""
    print(f"{name:42}" + "".join(f" | {one:8.0f}" for one in figures) + ratio, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=400, help="of each endpoint")
    parser.add_argument("--block", type=int, default=20, help="until it is the other's turn")
    parser.add_argument("--words", type=int, default=96, help="of the prompt")
    parser.add_argument(
        "--percentile", type=int, default=50, help="of each stage; a low one where others disturb"
    )
    parser.add_argument("--burst", type=int, default=0, help="streams at once, after the others")
    parser.add_argument("--rounds", type=int, default=7, help="of bursts")
    parser.add_argument("--against", type=Path, help="another version's src, for a ratio")
    parser.add_argument("--model", default="tiny", help="whose tokenizer and template are used")
    args = parser.parse_args()
    if args.serve:
        settings = json.loads(args.serve)
        sys.exit(serve_traced(settings, Trace(Path(settings["model_kwargs"]["trace"]))))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [stack.enter_context(running("now", None, args.model, Path(folder)))]
        if args.against is not None:
            other = running("before", args.against.resolve(), args.model, Path(folder))
            servers.append(stack.enter_context(other))
        compare(servers, args)
        report(servers, args)


if __name__ == "__main__":
    main()
