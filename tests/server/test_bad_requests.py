"""Malformed requests: each gets its status and an answer that says what is wrong, then all is well.

`base_url` is where they are sent: here a server whose pipeline has no engine. A module that imports
the tests and defines its own `base_url` sends them elsewhere.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_fakes import FakePipeline, running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, **fields}


def chat(**fields: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", CHAT, {"messages": HI, "max_tokens": 1, **fields}


def message(value: Any) -> tuple[str, str, dict[str, Any]]:
    return chat(messages=[value])


def user(content: Any) -> tuple[str, str, dict[str, Any]]:
    return message({"role": "user", "content": content})


def raw(body: bytes, path: str = COMPLETIONS) -> tuple[str, str, bytes]:
    return "POST", path, body


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


# name: (request, status, part of the message)
CASES: dict[str, tuple[tuple[str, str, Any], int, str]] = {
    # the body itself
    "empty body": (raw(b""), 400, "empty"),
    "blank body": (raw(b" \n "), 400, "empty"),
    "cut JSON": (raw(b'{"prompt": "Hi"'), 400, "not valid JSON"),
    "text after JSON": (raw(b'{"prompt": "Hi"} x'), 400, "not valid JSON"),
    "not JSON": (raw(b"prompt=Hi"), 400, "not valid JSON"),
    "single quotes": (raw(b"{'prompt': 'Hi'}"), 400, "not valid JSON"),
    "NaN": (raw(b'{"prompt": "Hi", "temperature": NaN}'), 400, "not valid JSON"),
    "infinity": (raw(b'{"prompt": "Hi", "temperature": Infinity}'), 400, "not valid JSON"),
    "number out of range": (raw(b'{"prompt": "Hi", "temperature": 1e999}'), 400, "out of range"),
    "invalid UTF-8": (raw(b'{"prompt": "\xff\xfe"}'), 400, "not valid UTF-8"),
    "lone surrogate": (raw(b'{"prompt": "\\ud800"}'), 400, "not valid JSON: prompt holds half"),
    "lone surrogate in a message": (
        raw(b'{"messages": [{"role": "user", "content": "a\\udc00b"}]}', CHAT),
        400,
        "messages[0].content holds half of a surrogate pair",
    ),
    "lone surrogate in stop": (raw(b'{"prompt": "a", "stop": ["\\ud800"]}'), 400, "stop[0] holds"),
    "lone surrogate as model": (raw(b'{"prompt": "a", "model": "\\ud800"}'), 400, "model holds"),
    "lone surrogate in tools": (
        raw(b'{"messages": [], "tools": [{"function": {"name": "\\ud800"}}]}', CHAT),
        400,
        "tools[0].function.name holds",
    ),
    "lone surrogate as a name": (raw(b'{"\\ud800": 1}'), 400, "a name in it holds"),
    "array body": (raw(b"[1, 2]"), 400, "must be a JSON object"),
    "text body": (raw(b'"Hi"'), 400, "must be a JSON object"),
    "null body": (raw(b"null"), 400, "must be a JSON object"),
    "deep JSON": (completion(prompt=nested(200)), 400, "nested too deeply"),
    "very deep JSON": (raw(b"[" * 100_000), 400, "nested too deeply"),
    "deep template arguments": (chat(chat_template_kwargs={"a": nested(100)}), 400, "too deeply"),
    # unknown fields
    "typo": (completion(max_token=5), 400, "unknown field 'max_token'; did you mean 'max_tokens'?"),
    "unknown field": (completion(zzz=1), 400, "unknown field 'zzz'"),
    "unknown null field": (completion(zzz=None), 400, "unknown field 'zzz'"),
    "chat field in completions": (completion(messages=HI), 400, "unknown field 'messages'"),
    "completion field in chat": (chat(prompt="Hi"), 400, "unknown field 'prompt'"),
    "typo in stream_options": (
        completion(stream=True, stream_options={"include_usag": True}),
        400,
        "unknown field 'stream_options.include_usag'; did you mean 'include_usage'?",
    ),
    # prompts
    "no prompt": (raw(b"{}"), 400, "'prompt' is missing"),
    "null prompt": (completion(prompt=None), 400, "'prompt' is missing"),
    "number as prompt": (completion(prompt=5), 400, "prompt must be"),
    "object as prompt": (completion(prompt={"text": "Hi"}), 400, "prompt must be"),
    "empty prompt": (completion(prompt=""), 400, "empty"),
    "empty list": (completion(prompt=[]), 400, "it is empty"),
    "empty inner list": (completion(prompt=[[]]), 400, "prompt[0]"),
    "mixed ids": (completion(prompt=[1, "a"]), 400, "prompt[0]"),
    "boolean ids": (completion(prompt=[True, False]), 400, "prompt[0]"),
    "fractional ids": (completion(prompt=[1.5]), 400, "prompt[0]"),
    "negative id": (completion(prompt=[1, -2]), 400, "no token id"),
    "huge id": (completion(prompt=[10**30]), 400, "no token id"),
    "id outside the vocabulary": (completion(prompt=[2**31 - 1]), 400, "2147483647"),
    "too many prompts": (completion(prompt=["a"] * 1025), 400, "at most 1024"),
    "too long prompt": (completion(prompt=[1] * 1_000_000), 400, "1000000"),
    "too long text": (completion(prompt="a" * 8_000_000), 400, "8000000"),
    "too large body": (raw(b" " * (16 << 20)), 413, "max_body_bytes"),
    "too many values": (completion(prompt=[1] * 1_100_000), 400, "1100003 values"),
    "too many texts": (completion(prompt=["a"] * 300_000), 400, "at most 262144"),
    "too many lists": (completion(metadata={"a": [[]] * 70_000}), 400, "70003 lists and objects"),
    "commas in a text are no values": (completion(prompt=",[{" * 700_000), 400, "2100000 char"),
    "million stops": (completion(stop=["a"] * 200_000), 400, "stop is 200000"),
    "many stream_options": (
        completion(stream=True, stream_options={str(i): 1 for i in range(10_000)}),
        400,
        "stream_options is 10000",
    ),
    "many wrong ids": (completion(stop_token_ids=["a"] * 1000), 400, "stop_token_ids[0] is 'a'"),
    "long unknown field": (raw(b'{"' + b"k" * 3_000_000 + b'": 1}'), 400, "unknown field 'kkk"),
    "many unknown fields": (
        completion(**{f"x{i}": 1 for i in range(100_000)}),
        400,
        "unknown field 'x0'",
    ),
    # numbers
    "text as max_tokens": (completion(max_tokens="16"), 400, "max_tokens is '16'"),
    "boolean as max_tokens": (completion(max_tokens=True), 400, "max_tokens is True"),
    "fraction as max_tokens": (completion(max_tokens=1.5), 400, "max_tokens is 1.5"),
    "no max_tokens": (completion(max_tokens=0), 400, "max_tokens is 0"),
    "negative max_tokens": (completion(max_tokens=-1), 400, "max_tokens is -1"),
    "huge max_tokens": (completion(max_tokens=10**400), 400, "max_tokens is 1000"),
    "min_tokens over max_tokens": (completion(min_tokens=2), 400, "min_tokens is 2"),
    "negative temperature": (completion(temperature=-0.1), 400, "temperature is -0.1"),
    "hot": (completion(temperature=1000), 400, "between 0.0 and 100.0"),
    "huge integer temperature": (completion(temperature=10**400), 400, "temperature"),
    "text as temperature": (completion(temperature="0.5"), 400, "temperature is '0.5'"),
    "list as temperature": (completion(temperature=[0.5]), 400, "temperature is [0.5]"),
    "top_p over 1": (completion(top_p=1.01), 400, "top_p is 1.01"),
    "negative top_k": (completion(top_k=-2), 400, "top_k is -2"),
    "fractional top_k": (completion(top_k=0.5), 400, "top_k is 0.5"),
    "min_p over 1": (completion(min_p=2), 400, "min_p is 2"),
    "no repetition_penalty": (completion(repetition_penalty=0), 400, "repetition_penalty is 0"),
    "presence_penalty": (completion(presence_penalty=3), 400, "between -2.0 and 2.0"),
    "frequency_penalty": (completion(frequency_penalty=-3), 400, "between -2.0 and 2.0"),
    "seed": (completion(seed=2**64), 400, "seed is 18446744073709551616"),
    "n is 0": (completion(n=0), 400, "n is 0"),
    "huge n": (completion(n=10**6), 400, "n is 1000000"),
    "best_of under n": (completion(n=3, best_of=2), 400, "best_of is 2"),
    "best_of in a stream": (completion(best_of=2, stream=True), 400, "best_of is 2"),
    "many logprobs": (completion(logprobs=21), 400, "logprobs is 21"),
    "negative logprobs": (completion(logprobs=-1), 400, "logprobs is -1"),
    "boolean logprobs": (completion(logprobs=True), 400, "logprobs is True"),
    "many prompt_logprobs": (completion(prompt_logprobs=1000), 400, "prompt_logprobs is 1000"),
    "truncate to 0": (completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens is 0"),
    "fractional priority": (completion(priority=0.5), 400, "priority is 0.5"),
    # stop, bias, other shapes
    "number as stop": (completion(stop=5), 400, "stop is 5"),
    "numbers in stop": (completion(stop=["a", 5]), 400, "stop[1] is 5"),
    "empty stop": (completion(stop=""), 400, "stop"),
    "many stops": (completion(stop=["a"] * 65), 400, "stop is 65"),
    "text as stop_token_ids": (completion(stop_token_ids="5"), 400, "stop_token_ids is '5'"),
    "negative stop id": (completion(stop_token_ids=[-5]), 400, "stop_token_ids[0] is -5"),
    "list as logit_bias": (completion(logit_bias=[1]), 400, "logit_bias is [1]"),
    "word in logit_bias": (completion(logit_bias={"word": 1}), 400, "key 'word'"),
    "negative id in logit_bias": (completion(logit_bias={"-1": 1}), 400, "key '-1'"),
    "strong logit_bias": (completion(logit_bias={"5": 101}), 400, "logit_bias[5] is 101"),
    "text in logit_bias": (completion(logit_bias={"5": "x"}), 400, "logit_bias.5 is 'x'"),
    "text as stream": (completion(stream="yes"), 400, "stream is 'yes'"),
    "options without stream": (
        completion(stream_options={"include_usage": True}),
        400,
        "only allowed with stream",
    ),
    "text as stream_options": (completion(stream=True, stream_options="x"), 400, "stream_options"),
    "text as echo": (completion(echo="true"), 400, "echo is 'true'"),
    "number as model": (completion(model=5), 400, "model is 5"),
    "empty salt": (completion(cache_salt=""), 400, "cache_salt is ''"),
    "long salt": (completion(cache_salt="a" * 1000), 400, "cache_salt"),
    # known, not built
    "suffix as list": (completion(suffix=["end"]), 400, "suffix"),
    "beam search": (completion(use_beam_search=True, top_p=0.5), 400, "top_p does not work"),
    "adapter": (completion(lora_request={"lora_name": "a", "lora_int_id": 1}), 400, "adapters"),
    "adapter without a name": (completion(lora_request={}), 400, "lora_name"),
    "adapter's typo": (completion(lora_request={"lora_nam": "a"}), 400, "lora_nam"),
    "disaggregation": (
        completion(disaggregated_params={"request_type": "x"}),
        400,
        "not supported",
    ),
    "context logits": (completion(return_context_logits=True), 400, "prompt_logprobs"),
    "unknown format": (chat(response_format={"type": "yaml"}), 400, "response_format.type"),
    "schema as number": (completion(guided_json=5), 400, "guided_json"),
    "two grammars": (completion(guided_regex="a", guided_choice=["b"]), 400, "give one"),
    "no grammar": (completion(structured_outputs={}), 400, "exactly one"),
    "whitespace": (completion(structured_outputs={"whitespace_pattern": " "}), 400, "exactly one"),
    "response_format as text": (chat(response_format="json"), 400, "response_format is 'json'"),
    "required tool of none": (chat(tool_choice="required"), 400, "there are no tools"),
    "unknown choice of tools": (chat(tool_choice="all"), 400, "tool_choice is 'all'"),
    "named tool that is not there": (
        chat(
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice={"type": "function", "function": {"name": "g"}},
        ),
        400,
        "tool_choice names 'g'",
    ),
    "tool of another type": (chat(tools=[{"type": "web_search"}]), 400, "tools[0]"),
    "nameless tool": (chat(tools=[{"function": {}}]), 400, "tools[0].function.name"),
    "template as number": (chat(chat_template=1), 400, "chat_template"),
    "endless template": (chat(chat_template="a" * 200_000), 400, "chat_template"),
    "template without messages": (
        chat(chat_template="{{ 1 }}", prompt_token_ids=[1]),
        400,
        "chat_template is for rendering",
    ),
    "audio": (chat(modalities=["audio"]), 400, "modalities"),
    # messages
    "no messages": (raw(b"{}", CHAT), 400, "'messages' is missing"),
    "empty messages": (chat(messages=[]), 400, "at least one message"),
    "null messages": (chat(messages=None), 400, "'messages' is missing"),
    "text as messages": (chat(messages="Hi"), 400, "messages must be a list"),
    "text as message": (message("Hi"), 400, "messages[0] must be an object"),
    "no role": (message({"content": "Hi"}), 400, "messages[0].role is null"),
    "bad role": (message({"role": "robot", "content": "Hi"}), 400, "messages[0].role is 'robot'"),
    "list as role": (message({"role": [], "content": "Hi"}), 400, "messages[0].role is []"),
    "no content": (message({"role": "user"}), 400, "messages[0].content is missing"),
    "number as content": (user(5), 400, "messages[0].content must be"),
    "text as part": (user(["Hi"]), 400, "messages[0].content[0]"),
    "part without type": (user([{"text": "Hi"}]), 400, "messages[0].content[0]"),
    "part without text": (user([{"type": "text"}]), 400, "content[0].text must be a text"),
    "image part": (
        user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]),
        400,
        "only text parts",
    ),
    "tool_calls as text": (
        message({"role": "assistant", "tool_calls": "x"}),
        400,
        "messages[0].tool_calls",
    ),
    "too many messages": (chat(messages=HI * 5000), 400, "at most 4096"),
    "two limits": (chat(max_completion_tokens=2), 400, "they mean the same"),
    "top_logprobs alone": (chat(top_logprobs=2), 400, "needs logprobs"),
    "many top_logprobs": (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs is 21"),
    "no max_completion_tokens": (chat(max_completion_tokens=0), 400, "max_completion_tokens is 0:"),
    "number as logprobs": (chat(logprobs=2), 400, "logprobs is 2"),
    "nothing to continue": (
        chat(continue_final_message=True),
        400,
        "last message of the assistant",
    ),
    "tools as text": (chat(tools="x"), 400, "tools is 'x'"),
    "template arguments as list": (chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    "reserved template argument": (chat(chat_template_kwargs={"messages": []}), 400, "messages"),
    "empty prompt_token_ids": (chat(prompt_token_ids=[]), 400, "prompt_token_ids is []"),
    "verbosity of a template without it": (chat(verbosity="low"), 400, "no place for verbosity"),
    "verbosity without a template": (
        chat(verbosity="low", prompt_token_ids=[1]),
        400,
        "prompt_token_ids do without",
    ),
    "bad reasoning_effort": (chat(reasoning_effort="huge"), 400, "reasoning_effort is 'huge'"),
    # tokenizing
    "nothing to tokenize": (raw(b"{}", "/tokenize"), 400, "give one of prompt and messages"),
    "number to tokenize": (("POST", "/tokenize", {"prompt": 5}), 400, "prompt is 5"),
    "text to detokenize": (("POST", "/detokenize", {"tokens": "5"}), 400, "tokens is '5'"),
    "unknown token": (("POST", "/detokenize", {"tokens": [2**31 - 1]}), 400, "2147483647"),
    # routes
    "unknown route": (("POST", "/v1/images/generations", {}), 404, "Not Found"),
    "unknown route with a slash": (("POST", "/v1/images/generations/", {}), 404, "Not Found"),
    "trailing slash": (("POST", COMPLETIONS + "/", {}), 400, "'prompt' is missing"),
    "wrong method": (("GET", COMPLETIONS, None), 405, "Method Not Allowed"),
    "delete": (("DELETE", "/health", None), 405, "Method Not Allowed"),
}


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with running_server(FakePipeline()) as running:
        yield running.url


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=240) as client:
        yield client


def sent(client: httpx.Client, name: str) -> httpx.Response:
    (method, path, body), _, _ = CASES[name]
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    return client.request(method, path, content=content)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_request_is_refused_with_a_reason(client: httpx.Client, name: str) -> None:
    _, status, fragment = CASES[name]
    response = sent(client, name)
    assert response.status_code == status, response.text
    reply = response.json()
    assert fragment in reply["error"]["message"]
    assert reply["message"] == reply["error"]["message"] and reply["object"] == "error"
    assert reply["code"] == status and isinstance(reply["error"]["code"], str)
    assert "Traceback" not in response.text
    assert len(response.content) < 2000, "an answer must not repeat a huge request"


def test_the_server_still_answers_afterwards(client: httpx.Client) -> None:
    for method, path, body in [completion(), chat()]:
        response = client.request(method, path, json=body)
        assert response.status_code == 200, response.text
    assert client.get("/health").status_code == 200
