"""What is no `Exception`, and what is no text: an answer in JSON, of that request alone."""

import json

import httpx
import pytest
import tokenizers
from http_fakes import FakePipeline, make_tokenizer, running_server

from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def panicking(encoding: bool) -> Tokenizer:
    """As a broken tokenizer.json makes it: the library panics in Rust."""
    tokenizer = make_tokenizer()
    if encoding:
        tokenizer._backend.pre_tokenizer = tokenizers.pre_tokenizers.FixedLength(0)
    else:
        tokenizer._backend.decoder = tokenizers.decoders.Strip("!", 0, 5)
    return tokenizer


@pytest.mark.parametrize(
    ("encoding", "path", "body"),
    [
        (True, COMPLETIONS, {"prompt": "hello"}),
        (True, CHAT, {"messages": [{"role": "user", "content": "hello"}]}),
        (True, "/tokenize", {"prompt": "hello"}),
        (False, "/detokenize", {"tokens": [0, 0]}),
        (False, "/detokenize", {"tokens": [0] * 5000}),
    ],
)
def test_a_panic_of_the_tokenizer_is_an_error_in_json(encoding, path, body):
    with running_server(FakePipeline(panicking(encoding))) as server:
        for _ in range(2):
            answer = httpx.post(server.url + path, json=body)
            assert answer.status_code == 500
            assert answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
            assert error["code"] == "tokenizer_failed" and "broke down" in error["message"]
        assert httpx.get(server.url + "/health").status_code == 200


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [Panic("secret"), RuntimeError("secret")])
def test_whatever_a_request_raises_is_an_error_in_json(error):
    pipeline = FakePipeline()

    async def tokenize(given):
        raise error

    pipeline.tokenize = tokenize
    with running_server(pipeline) as server:
        answer = httpx.post(server.url + "/tokenize", json={"prompt": "a"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("[" * 1000, id="brackets"),
        pytest.param('{"a": ' * 500, id="objects"),
        pytest.param("[" * 1_000_000, id="many brackets"),
        pytest.param('"\\ud800"', id="surrogate"),
        pytest.param('{"a": "\\ud800"}', id="surrogate inside"),
        pytest.param('{"\\udc00": 1}', id="surrogate in a name"),
    ],
)
def test_odd_arguments_of_a_tool_call_are_never_a_bug_of_ours(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson | length }}"
    pipeline = FakePipeline()
    pipeline.renderer = ChatTemplate({"default": template}, {})
    with running_server(pipeline) as server:
        body = {"messages": messages, "max_tokens": 1}
        answer = httpx.post(server.url + CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert httpx.post(server.url + "/tokenize", json={"messages": messages}).status_code == 200
        assert json.loads(answer.text)["usage"]["prompt_tokens"] > 0
