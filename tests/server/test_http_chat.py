"""`/v1/chat/completions`: shapes, options that reach the template, log-probabilities, streams."""

import json
from collections.abc import Iterator

import httpx
import pytest
from http_fakes import OUTPUT, FakeGeneration, FakePipeline, running_server

from penstock.types.outputs import TextDelta, ToolCallDelta
from penstock.types.request import FinishReason

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with running_server(FakePipeline()) as running, httpx.Client(base_url=running.url) as client:
        client.pipeline = running.pipeline  # type: ignore[attr-defined]
        yield client


def chat(server: httpx.Client, **body: object) -> dict:
    body = {"model": "any/name", "messages": MESSAGES, **body}
    response = server.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: httpx.Client, **body: object) -> list[dict]:
    body = {"model": "any/name", "messages": MESSAGES, "stream": True, **body}
    events = server.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_keys_their_order_and_nulls_are_those_of_the_recipes(server):
    reply = chat(server, max_completion_tokens=4)
    assert list(reply) == [
        *("id", "object", "created", "model", "choices", "usage", "prompt_token_ids"),
    ]
    assert reply["id"].startswith("chatcmpl-") and len(reply["id"]) == len("chatcmpl-") + 32
    [choice] = reply["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": OUTPUT[:4],
            "reasoning_content": None,
            "tool_calls": [],
        },
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "mm_embedding_handle": None,
        "disaggregated_params": None,
        "avg_decoded_tokens_per_iter": 1.0,
    }
    assert list(choice)[-1] == "avg_decoded_tokens_per_iter"
    assert reply["usage"]["completion_tokens"] == 4


def test_options_reach_the_template(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat(
        server,
        tools=tools,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="high",
        documents=[{"title": "t", "text": "x"}],
    )
    asked = server.pipeline.asked[-1]
    assert asked.chat.tools == tuple(tools) and not asked.add_special_tokens
    assert asked.chat.template_kwargs == {"enable_thinking": False, "reasoning_effort": "high"}
    assert asked.chat.documents == ({"title": "t", "text": "x"},)
    chat(server, tools=tools, tool_choice="none")
    assert server.pipeline.asked[-1].chat.tools == ()


def test_prompt_token_ids_skip_the_template(server):
    reply = chat(server, prompt_token_ids=[1, 2, 3], max_tokens=1)
    assert reply["usage"]["prompt_tokens"] == 3
    assert server.pipeline.asked[-1].messages is None


def test_a_final_message_is_continued_and_echoed(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    reply = chat(server, messages=messages, continue_final_message=True, echo=True, max_tokens=4)
    assert reply["choices"][0]["message"]["content"] == "Well, " + OUTPUT[:4]
    assert server.pipeline.asked[-1].chat.add_generation_prompt is False


def test_content_may_come_in_text_parts(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    reply = chat(server, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert server.pipeline.asked[-1].messages[0]["content"] == parts


def test_the_assistants_reply_can_be_sent_back_as_it_came(server):
    message = chat(server)["choices"][0]["message"]
    chat(server, messages=[*MESSAGES, message, {"role": "user", "content": "More"}])
    assert server.pipeline.asked[-1].messages[-2]["content"] == message["content"]


def test_logprobs_name_token_bytes_and_alternatives(server):
    [choice] = chat(server, logprobs=True, top_logprobs=2, max_tokens=2)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(OUTPUT[:2])
    assert content[0]["bytes"] == list(OUTPUT[0].encode())
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert list(content[0]) == ["token", "logprob", "bytes", "top_logprobs"]


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(server):
    chunks = stream(server, n=2)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[0]["object"] == "chat.completion.chunk"
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == OUTPUT
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert all("logprobs" not in choice for choice in mine)
    assert all("usage" not in chunk for chunk in chunks)


def test_streamed_logprobs_cover_every_token(server):
    chunks = stream(server, logprobs=True)
    entries = [
        entry
        for chunk in chunks
        for entry in chunk["choices"][0].get("logprobs", {}).get("content", [])
    ]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == OUTPUT


def test_include_usage_and_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, max_tokens=2, stream_options=options)
    assert chunks[-1]["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 2, 2]  # role, two tokens, the end, the last chunk
    assert chunks[-1]["usage"]["prompt_tokens"] > 0


def test_prompt_logprobs_come_once(server):
    reply = chat(server, prompt_logprobs=0, max_tokens=1)
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    chunks = stream(server, prompt_logprobs=0, max_tokens=1)
    assert chunks[0]["prompt_logprobs"] == reply["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


class _CallingGeneration(FakeGeneration):
    """Thinks, says something and calls two tools, in few deltas with much in them."""

    async def __aiter__(self):
        first = ToolCallDelta(index=0, id="call_a", name="f", arguments='{"n": ')
        rest = ToolCallDelta(index=0, arguments="1}")
        second = ToolCallDelta(index=1, id="call_b", name="g", arguments="{}")
        yield TextDelta(index=0, token_ids=(1,), reasoning="hm", text="I", tool_calls=(first,))
        yield TextDelta(index=0, token_ids=(2,), reasoning="!", text=" look")
        yield TextDelta(
            index=0, token_ids=(3,), tool_calls=(rest, second), finish=FinishReason.STOP
        )
        self._done()


class _CallingPipeline(FakePipeline):
    async def generate(self, given, stream=True, on_first_token=lambda: None):
        ids, text = await self.tokenize(given)
        return _CallingGeneration(self, given, text, ids, on_first_token)


@pytest.fixture(scope="module")
def caller() -> Iterator[httpx.Client]:
    with running_server(_CallingPipeline()) as running:
        yield httpx.Client(base_url=running.url)


def test_calls_are_named_before_their_arguments_and_text_comes_before_calls(caller):
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(caller)]
    named = {"index": 0, "id": "call_a", "type": "function"}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "I", "reasoning_content": "hm"},
        {"tool_calls": [{**named, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"n": '}}]},
        {"reasoning_content": "!"},
        {"content": " look"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {
            "tool_calls": [
                {
                    **{"index": 1, "id": "call_b", "type": "function"},
                    "function": {"name": "g", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    [*_, last] = stream(caller)
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    message = chat(caller)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look", "hm!")
    assert message["tool_calls"] == [
        {
            "id": "call_a",
            "type": "function",
            "function": {"name": "f", "arguments": '{"n": 1}'},
        },
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_without_parallel_calls_only_the_first_is_told(caller):
    [choice] = chat(caller, parallel_tool_calls=False)["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call_a"]
    chunks = stream(caller, parallel_tool_calls=False)
    calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
