"""How many streams and tokens per second the benchmark's own client can read in one process.

    python benchmarks/bench_client.py --streams 4096 --tokens 256 [--rate 60000] [--per_chunk 1]

A trivial server, in a process of its own, writes ready-made events to all streams in turn: `--rate`
tokens per second over all of them, 0 as fast as they are taken. What the client then sees is
compared with what the server wrote; with `--rate` the client keeps up if it is done when the server
is. Fails when an answer is cut or miscounted.
"""

import argparse
import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from penstock.bench.http import HttpClient
from penstock.bench.load import Outcome, send_all

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"connection: keep-alive\r\n\r\n"
)


def event(choices: list[dict[str, object]], usage: dict[str, int] | None = None) -> bytes:
    """One chunk, in the shape and size of a real server's."""
    chunk = {
        "id": "cmpl-3a2bfcd14c3f4c0f8d5f1f2c8b6a7e90",
        "object": "text_completion",
        "created": 1794721635,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }
    return framed(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(slots=True)
class Stream:
    connection: socket.socket
    received: bytes = b""
    left: int = 0

    @property
    def has_asked(self) -> bool:
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return False
        return len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])


def serve(pipe: Connection, num_streams: int, num_chunks: int, per_chunk: int, rate: int) -> None:
    """Waits until all have asked, then writes; tells the seconds it wrote for."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pipe.send(listener.getsockname()[1])
    choice: dict[str, object] = {"index": 0, "text": " water" * per_chunk, "logprobs": None}
    one = event([choice | {"finish_reason": None}])
    usage = {"prompt_tokens": 1, "completion_tokens": num_chunks * per_chunk}
    last = event([choice | {"finish_reason": "length"}]) + event([], usage)
    last += framed(b"data: [DONE]\n\n") + framed(b"")
    streams = gather(listener, num_streams)
    for stream in streams:
        stream.connection.setblocking(True)
        stream.connection.sendall(_HEAD)
    begun = time.perf_counter()
    for step in range(num_chunks):
        data = one if step < num_chunks - 1 else last
        for stream in streams:
            stream.connection.sendall(data)
        if rate:
            due = begun + (step + 1) * num_streams * per_chunk / rate
            time.sleep(max(0.0, due - time.perf_counter()))
    pipe.send(time.perf_counter() - begun)
    pipe.recv()


def gather(listener: socket.socket, num_streams: int) -> list[Stream]:
    """Accept them and read their requests."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    streams: list[Stream] = []
    while len(streams) < num_streams:
        for key, _ in selector.select():
            if key.data is None:
                stream = Stream(listener.accept()[0])
                selector.register(stream.connection, selectors.EVENT_READ, stream)
                continue
            stream = key.data
            stream.received += stream.connection.recv(1 << 16)
            if stream.received.startswith(b"GET "):  # the client opens connections ahead
                stream.received = b""
                stream.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            elif stream.has_asked:
                selector.unregister(stream.connection)
                streams.append(stream)
    return streams


async def read(port: int, num_streams: int) -> Outcome:
    client = HttpClient(f"http://127.0.0.1:{port}", {})
    request = client.post_request("/v1/completions", b'{"stream": true}')
    try:
        return await send_all(client, [request] * num_streams, [0.0] * num_streams)
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256, help="per stream")
    parser.add_argument("--per_chunk", type=int, default=1, help="tokens in one event")
    parser.add_argument("--rate", type=int, default=0, help="tokens per second; 0: no pause")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    num_chunks = args.tokens // args.per_chunk
    arguments = (theirs, args.streams, num_chunks, args.per_chunk, args.rate)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    server.start()
    outcome = uvloop.run(read(ours.recv(), args.streams))
    written_s = ours.recv()
    ours.send(None)
    server.join()

    responses = outcome.responses
    wrong = [one.error for one in responses if one.error or one.num_output != args.tokens]
    first = min(one.first_at for one in responses)
    seconds = max(one.last_at for one in responses) - first
    total = args.streams * num_chunks * args.per_chunk
    gaps = sorted(gap for one in responses for gap in one.gaps_s)
    print(
        f"{args.streams} streams of {args.tokens} tokens, {args.per_chunk} per event: written at "
        f"{total / written_s:.0f} tokens/s, read at {total / seconds:.0f} tokens/s "
        f"({total / args.per_chunk / seconds:.0f} events/s), one process, "
        f"{outcome.client_cpu_share:.0%} of a core busy over {outcome.duration_s:.1f} s, "
        f"{outcome.client_lag_s * 1e3:.0f} ms late; gaps p50 "
        f"{statistics.median(gaps) * 1e3:.1f} ms, p99 {gaps[len(gaps) * 99 // 100] * 1e3:.1f} ms; "
        f"{len(wrong)} errors"
    )
    if wrong:
        sys.exit(f"wrong: {wrong[:3]}")


if __name__ == "__main__":
    main()
