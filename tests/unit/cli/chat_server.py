"""A small chat server on loopback that keeps what it was asked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeServer(ThreadingHTTPServer):
    """Answers "echo: <last message>" word by word; keeps the bodies it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.refusal: tuple[int, dict] | None = None
        self.events: list[str] | None = None
        self.endless = False
        self.hung_up = threading.Event()
        self.streaming = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._json(200, {"data": [{"id": "first-model"}, {"id": "second"}]})

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.refusal:
            self._json(*self.server.refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.server.events is not None:
            for event in self.server.events:
                self.wfile.write(event.encode())
            return
        words = ["echo:", *body["messages"][-1]["content"].split()]
        try:
            while True:
                for i, word in enumerate(words):
                    self._event({"delta": {"content": (" " if i else "") + word}})
                self.server.streaming.set()
                if not self.server.endless:
                    break
        except OSError:
            self.server.hung_up.set()
            return
        self._event({"delta": {}, "finish_reason": "stop"})
        usage = {"choices": [], "usage": {"completion_tokens": len(words)}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def _event(self, choice: dict) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
