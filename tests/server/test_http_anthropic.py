"""`/v1/messages` by the `anthropic` package, on a scripted model: what users' programs see."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest
from http_fakes import FakePipeline, running_server
from scripted_pipeline import ScriptedPipeline

USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def script(prompt: str) -> str:
    last = prompt.rpartition("user: ")[2]
    if "tool: " in last:
        return "It is 21 degrees in Paris."
    if "weather" in last and "tools: " in prompt:
        calls = [json.dumps({"name": "get_weather", "arguments": {"city": c}}) for c in ("P€", "R")]
        tagged = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return f"<think>\nI must look.\n</think>\n\nLet me look.\n{tagged}"
    if "thinking: True" in prompt:
        return "<think>\nHm.\n</think>\n\nHello, dear user."
    return "Hello, dear user."


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(ScriptedPipeline(script), api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: SimpleNamespace) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 500, "messages": [USER]} | changes


def without_ids(message: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.to_dict().items() if k != "id"} for one in message.content]


def test_a_message_is_answered(client, server):
    message = client.messages.create(**ask(system="Be kind.", extra_body={"top_k": 3}))
    assert message.content[0].text == "Hello, dear user." and message.role == "assistant"
    assert message.stop_reason == "end_turn" and message.model == "org/model"
    prompt = server.pipeline.prompts[-1]
    assert prompt.startswith("system: Be kind.") and server.pipeline.asked[-1].sampling.top_k == 3
    usage = message.usage
    assert usage.output_tokens == len("Hello, dear user.") and usage.cache_read_input_tokens == 4
    assert usage.input_tokens + 4 == len(prompt.encode())


def test_blocks_of_text_are_a_text_and_what_is_marked_for_a_cache_is_read(client, server):
    mark = {"cache_control": {"type": "ephemeral"}}
    client.messages.create(
        **ask(
            system=[{"type": "text", "text": "One", **mark}, {"type": "text", "text": "Two"}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", **mark}]}],
        )
    )
    asked = server.pipeline.asked[-1].messages
    assert asked == (
        {"role": "system", "content": "One\nTwo"},
        {"role": "user", "content": "Hi"},
    )


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ({"type": "forever"}, "cache_control.type is 'forever', it must be ephemeral"),
        ({"type": "ephemeral", "ttl": "1d"}, "ttl is '1d', it must be 5m or 1h"),
        ({"type": "ephemeral", "tll": "1h"}, "did you mean 'ttl'"),
        ("ephemeral", "must be an object|valid dictionary"),
    ],
)
def test_a_mark_for_a_cache_that_says_something_else_is_refused(client, mark, said):
    text = {"type": "text", "text": "Hi", "cache_control": mark}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text]}
    tool = {"name": "f", "input_schema": {}, "cache_control": mark}
    for place in (
        {"cache_control": mark},
        {"system": [text]},
        {"messages": [{"role": "user", "content": [text]}]},
        {"messages": [{"role": "user", "content": [result]}]},
        {"tools": [tool]},
    ):
        with pytest.raises(anthropic.BadRequestError, match=said):
            client.messages.create(**ask(**place))


def test_a_stream_is_the_whole_message(client):
    asked = ask(messages=[{"role": "user", "content": "weather?"}], tools=TOOLS)
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "I must look." and whole.content[1].text == "Let me look."
    assert whole.content[2].input == {"city": "P€"} and whole.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert without_ids(final) == without_ids(whole)
    assert (final.usage, final.stop_reason) == (whole.usage, whole.stop_reason)
    raw = list(client.messages.create(**asked, stream=True))
    kinds = [event.type for event in raw]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event.index for event in raw if event.type == "content_block_start"]
    stops = [event.index for event in raw if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    deltas = {event.delta.type for event in raw if event.type == "content_block_delta"}
    assert deltas == {"thinking_delta", "text_delta", "input_json_delta"}
    assert "".join(event.text for event in events if event.type == "text") == "Let me look."


def test_a_tools_result_is_sent_back(client, server):
    question = {"role": "user", "content": "weather?"}
    single = {"type": "auto", "disable_parallel_tool_use": True}
    asked = ask(messages=[question], tools=TOOLS, tool_choice=single)
    first = client.messages.create(**asked)
    [use] = [block for block in first.content if block.type == "tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "21"}],
    }
    history = [
        question,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**asked | {"messages": history})
    assert second.content[0].text == "It is 21 degrees in Paris."
    _, assistant, tool = server.pipeline.asked[-1].messages
    assert assistant["reasoning_content"] == "I must look."
    assert assistant["content"] == "Let me look."
    [call] = assistant["tool_calls"]
    assert call["id"] == use.id == tool["tool_call_id"] and tool["content"] == "21"
    assert json.loads(call["function"]["arguments"]) == {"city": "P€"}


def test_thinking_is_switched_and_left_out(client, server):
    on = client.messages.create(**ask(thinking={"type": "enabled", "budget_tokens": 100}))
    assert [block.type for block in on.content] == ["thinking", "text"]
    assert on.content[0].thinking == "Hm." and on.content[0].signature == ""
    off = client.messages.create(**ask(thinking={"type": "disabled"}))
    assert [block.type for block in off.content] == ["text"]
    assert "thinking: False" in server.pipeline.prompts[-1]
    hidden = client.messages.create(
        **ask(
            messages=[{"role": "user", "content": "weather?"}],
            tools=TOOLS,
            thinking={"type": "disabled"},
        )
    )
    assert hidden.content[0].type == "text", "though this model thinks"
    with pytest.raises(anthropic.BadRequestError, match="raise max_tokens"):
        client.messages.create(**ask(thinking={"type": "enabled", "budget_tokens": 500}))


def test_an_output_ends_at_its_length_and_at_stop_sequences(client):
    cut = client.messages.create(**ask(max_tokens=5))
    assert cut.content[0].text == "Hello" and cut.stop_reason == "max_tokens"
    stopped = client.messages.create(**ask(stop_sequences=["dear"]))
    assert stopped.content[0].text == "Hello, " and stopped.stop_sequence == "dear"
    assert stopped.stop_reason == "stop_sequence"


def test_words_of_the_assistant_at_the_end_are_gone_on_with(client, server):
    client.messages.create(**ask(messages=[USER, {"role": "assistant", "content": "Well"}]))
    chat = server.pipeline.asked[-1].chat
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert server.pipeline.prompts[-1].endswith("assistant: Well")


def test_tokens_are_counted_as_they_would_be_read(client, server):
    asked = {"model": "m", "messages": [USER], "tools": TOOLS, "system": "Be kind."}
    counted = client.messages.count_tokens(**asked)
    message = client.messages.create(**ask(**asked))
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 100


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
         "leave it out"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of type custom"),
        ({"tools": [{"name": "f", "input_schem": {}}]}, "did you mean 'input_schema'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "'any', 'tool' or 'none'"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "nam": "x"}}, "did you mean 'name'"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences is 99 long"),
        ({"thinking": {"type": "enabled", "budget": 3}}, "did you mean 'budget_tokens'"),
        ({"output_config": {"format": {"type": "verse"}}}, "output_config.format"),
        ({"temperature": -1}, "temperature"),
        ({"context_management": {"edits": []}}, "not edited"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_as_anthropics_clients_read_it(server, changes, said):
    body = {key: value for key, value in ask(**changes).items() if value is not None}
    headers = {"x-api-key": "secret"}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=60)
    told = answer.json()
    assert answer.status_code == 400 and told["type"] == "error", told
    assert told["error"]["type"] == "invalid_request_error" and said in told["error"]["message"]


def test_a_key_comes_in_either_header(server):
    def status(**headers: str) -> int:
        body = ask(max_tokens=5)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=named, timeout=60)
        return answer.status_code

    assert status(x_api_key="secret") == status(authorization="Bearer secret") == 200
    assert status(x_api_key="secret", authorization="Bearer secret") == 200
    assert status(x_api_key="secret", authorization="Bearer wrong") == 401
    assert status(x_api_key="wrong") == status() == status(authorization="secret") == 401
    bearer = anthropic.Anthropic(base_url=server.url, auth_token="secret", max_retries=0)
    assert bearer.messages.create(**ask(max_tokens=5)).stop_reason == "max_tokens"
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        wrong.messages.create(**ask())


def test_failures_are_those_of_the_package():
    def messages(words: str) -> dict[str, Any]:
        return ask(messages=[{"role": "user", "content": words}])

    with running_server(FakePipeline()) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
            client.messages.create(**messages("REFUSE"))
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            client.messages.create(**messages("FAIL"))
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            list(client.messages.create(**messages("FAIL"), stream=True))
        with pytest.raises(anthropic.NotFoundError):
            client.get("/v1/messages/batches", cast_to=object)


def test_a_stream_that_runs_at_the_servers_end_is_told():
    body = ask(messages=[{"role": "user", "content": "SLOW"}], stream=True)
    with (
        running_server(ScriptedPipeline(script), http_config={"shutdown_timeout": 0}) as running,
        httpx.stream("POST", f"{running.url}/v1/messages", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "event: message_start"
        running.server.leave()
        told = [line for line in lines if line]
    assert told[-2] == "event: error" and json.loads(told[-1].removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the server is shutting down"},
    }
