"""How examples reach an engine and a server, and what comes back; both without a model."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_engine
import pytest
import tiny_tokenizers

from penstock.config.schema import EngineConfig
from penstock.eval.ask import Endpoint, Engine, ServerError
from penstock.eval.task import Example, Response
from penstock.frontend import engine_handle as engine_module

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
TEMPLATE = (
    "{{ mood or '-' }}/{{ tools[0].function.name if tools else '-' }}/{{ messages[-1].content }}"
)


def make_example(text: str, **fields) -> Example:
    message = {"role": "user", "content": text}
    return Example(group="g", messages=(message,), expected="", rule="exact", **fields)


def test_the_engine_gets_every_example_with_its_own_tools_and_template_arguments(
    tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text("{}")
    tiny_tokenizers.write_folder(tmp_path, tiny_tokenizers.byte_level(), chat_template=TEMPLATE)
    monkeypatch.setattr(engine_module, "ENGINE_MODULE", "fake_engine")  # says the prompt again
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent))
    examples = [
        make_example("ab"),
        make_example("cd", tools=(TOOL,)),
        make_example("efgh", template_kwargs={"mood": "dry"}),
    ]
    with Engine(EngineConfig(model=str(tmp_path))) as engine:
        responses = engine.ask(examples, max_tokens=6)
    assert responses == [Response("-/-/ab"), Response("-/look"), Response("dry/-/")]


class FakeServer(ThreadingHTTPServer):
    """Says the last message again; remembers what it was sent and how many came at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.replies: dict[str, tuple[int, object]] = {}
        self.meeting: threading.Barrier | None = None


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        self._send(*self.server.replies.get(self.path, (200, {"data": [{"id": "first"}]})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.meeting is not None:
            self.server.meeting.wait(240)
        text = body["messages"][-1]["content"]
        said = {"choices": [{"message": {"role": "assistant", "content": f"echo {text}"}}]}
        self._send(*self.server.replies.get(self.path, (200, said)))

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_gets_greedy_chat_completions_with_tools_and_template_arguments(server):
    endpoint = Endpoint(server.url + "/v1/", None, "secret", concurrency=1)
    assert endpoint.model == "first"
    examples = [
        make_example("a", tools=(TOOL,), template_kwargs={"enable_thinking": False}),
        make_example("b"),
    ]
    assert endpoint.ask(examples, max_tokens=7) == [Response("echo a"), Response("echo b")]
    first, second = server.bodies
    assert first == {
        "model": "first",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0.0,
        "max_tokens": 7,
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert second.keys() == {"model", "messages", "temperature", "max_tokens"}
    assert server.keys == {"Bearer secret"}


def test_requests_run_at_once_and_answers_keep_their_order(server):
    server.meeting = threading.Barrier(4)  # nobody is answered before four have asked
    endpoint = Endpoint(server.url, "m", None, concurrency=4)
    responses = endpoint.ask([make_example(str(i)) for i in range(8)], max_tokens=1)
    assert [response.content for response in responses] == [f"echo {i}" for i in range(8)]


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ((429, {"error": {"message": "too many"}}), "answers 429: .*too many"),
        ((200, {"choices": []}), "a reply without a message"),
        ((200, {"choices": [{"message": None}]}), "a reply without a message"),
    ],
)
def test_a_refusal_or_a_strange_reply_ends_the_run(server, reply, complaint):
    server.replies["/v1/chat/completions"] = reply
    endpoint = Endpoint(server.url, "m", None, concurrency=2)
    with pytest.raises(ServerError, match=complaint):
        endpoint.ask([make_example("x")] * 20, max_tokens=1)
    assert len(server.bodies) < 20


def test_a_server_that_lists_no_model_or_is_not_there_is_named(server):
    server.replies["/v1/models"] = (200, {"data": []})
    with pytest.raises(ServerError, match="lists no model; name one with --model"):
        Endpoint(server.url, None, None, concurrency=1)
    with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:1:"):
        Endpoint("127.0.0.1:1", None, None, concurrency=1)
