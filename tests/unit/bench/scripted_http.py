"""A server that answers each request with the bytes it was told, piece by piece, on loopback."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

Script = Callable[[str, dict[str, Any]], Sequence[bytes | None]]  # None: close the connection


def http(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(*events: str) -> list[bytes]:
    """A stream: the head, each event in a piece of its own, the end."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    data = [event.encode() for event in events]
    return [head, *(b"%x\r\n%s\r\n" % (len(one), one) for one in data), b"0\r\n\r\n"]


def completion(num_tokens: int, text: str = "a") -> list[bytes]:
    """A streamed completion of so many tokens, one to an event."""
    chunks: list[dict[str, Any]] = [{"choices": [{"text": text}]} for _ in range(num_tokens)]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}})
    return chunked(*(f"data: {json.dumps(one)}\n\n" for one in chunks), "data: [DONE]\n\n")


class ScriptedHttp:
    """Use as a context manager; `bodies` are the requests, `num_connections` how they came."""

    def __init__(self, script: Script, pause_s: float = 0.0) -> None:
        self._script, self._pause_s = script, pause_s
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "ScriptedHttp":
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
        if head.startswith("GET /health "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return True
        body = json.loads(await reader.readexactly(int(length))) if length else {}
        self.heads.append(head)
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for piece in self._script(head.split()[1], body):
                await asyncio.sleep(self._pause_s)  # none behind the last: the client goes on then
                if piece is None:
                    return False
                writer.write(piece)
                await writer.drain()
        finally:
            self.num_open -= 1
        return True
