"""`/v1/responses` by the `openai` package, on a scripted model: what users' programs see."""

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from http_fakes import OUTPUT, FakePipeline, running_server
from scripted_pipeline import ScriptedPipeline
from waiting import until

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]


def script(prompt: str) -> str:
    last = prompt.rpartition("user: ")[2]
    if "tool: " in last:
        return "<think>\nIt is warm.\n</think>\n\nIt is 21 degrees in Paris."
    if "weather" in last and "tools: " in prompt:
        cities = ("Paris", "Rome")
        calls = [json.dumps({"name": "get_weather", "arguments": {"city": c}}) for c in cities]
        tagged = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return f"<think>\nI must look.\n</think>\n\nLet me look.\n{tagged}"
    return "Hello, dear user."


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(ScriptedPipeline(script), api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: SimpleNamespace) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def without_ids(value: Any) -> Any:
    """Nor what the package adds."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    left_out = ("id", "call_id", "parsed", "parsed_arguments")
    return {key: without_ids(one) for key, one in value.items() if key not in left_out}


def output_of(response: Any) -> Any:
    return without_ids(response.to_dict()["output"])


def test_a_text_is_answered_and_what_was_asked_is_said_again(client, server):
    response = client.responses.create(
        model="m",
        input="Hi",
        instructions="Be kind.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "auto"},
        user="me",
        extra_body={"top_k": 3, "seed": 7},
    )
    assert response.output_text == "Hello, dear user." and response.status == "completed"
    assert response.model == "org/model" and response.object == "response"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 100)
    assert response.instructions == "Be kind." and response.metadata == {"a": "b"}
    assert response.reasoning.effort == "low" and response.store is True
    usage = response.usage
    assert usage.output_tokens == len("Hello, dear user.")
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "system: Be kind." in server.pipeline.prompts[-1]
    assert "effort: low" in server.pipeline.prompts[-1]
    sampling = server.pipeline.asked[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (3, 7, 100)


def test_items_are_a_conversation(client, server):
    client.responses.create(
        model="m",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {"role": "user", "content": "Three"},
        ],
    )  # fmt: skip
    messages = server.pipeline.asked[-1].messages
    assert [one["role"] for one in messages] == ["developer", "user", "assistant", "tool", "user"]
    assert messages[2]["content"] == "Two" and messages[2]["reasoning_content"] == "Hm"
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def test_a_stream_is_the_whole_response(client):
    asked: dict[str, Any] = {"model": "m", "input": "weather?", "tools": TOOLS}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert whole.output[0].content[0].text == "I must look."
    assert whole.usage.output_tokens_details.reasoning_tokens == len("I must look.")
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 4
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"{kind}.delta" in kinds and f"{kind}.done" in kinds
    assert output_of(final) == output_of(whole)
    assert final.usage == whole.usage
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == "Let me look."


def test_a_tools_result_is_sent_back_by_the_responses_id(client, server):
    asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "parallel_tool_calls": False}
    first = client.responses.create(input="weather?", **asked)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"} and first.parallel_tool_calls is False
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    second = client.responses.create(previous_response_id=first.id, input=[result], **asked)
    assert second.output_text == "It is 21 degrees in Paris."
    assert second.previous_response_id == first.id
    by_id = server.pipeline.asked[-1].messages
    assert [one["role"] for one in by_id] == ["user", "assistant", "tool"]
    assert by_id[1]["reasoning_content"] == "I must look."

    items = [{"role": "user", "content": "weather?"}, *(one.to_dict() for one in first.output)]
    again = client.responses.create(input=[*items, result], **asked)  # by the items themselves
    assert again.output_text == second.output_text
    assert server.pipeline.asked[-1].messages == by_id

    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == [
        *("message", "reasoning", "message", "function_call", "function_call_output")
    ]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].type == "function_call_output" and newest.has_more


def test_a_stored_response_is_asked_for_and_deleted(client):
    response = client.responses.create(model="m", input="Hi")
    assert client.responses.retrieve(response.id) == response
    with client.responses.stream(model="m", input="Hi") as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    client.responses.delete(response.id)
    for ask in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.input_items.list(response.id),
    ):
        with pytest.raises(openai.NotFoundError, match=response.id):
            ask()
    with pytest.raises(openai.BadRequestError, match=response.id) as caught:
        client.responses.create(model="m", input="Hi", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    kept = client.responses.create(model="m", input="Hi", store=False)
    assert kept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(streamed.id)


def poll(client: openai.OpenAI, response_id: str) -> Any:
    is_open = ("queued", "in_progress")
    until(lambda: client.responses.retrieve(response_id).status not in is_open)
    return client.responses.retrieve(response_id)


def test_a_response_runs_in_the_background(client):
    begun = client.responses.create(model="m", input="Hi", background=True)
    assert begun.status == "queued" and begun.background and begun.output == []
    ended = poll(client, begun.id)
    assert ended.status == "completed" and ended.output_text == "Hello, dear user."
    assert client.responses.cancel(begun.id) == ended, "what has ended stays as it is"
    follow = client.responses.create(model="m", input="And?", previous_response_id=begun.id)
    assert follow.status == "completed"


def test_a_response_in_the_background_is_cancelled(client, server):
    begun = client.responses.create(model="m", input="SLOW", background=True)
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        client.responses.create(model="m", input="Hi", previous_response_id=begun.id)
    until(lambda: server.pipeline.num_open == 1)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    until(lambda: server.pipeline.num_open == 0)
    assert "SLOW" in server.pipeline.aborted[-1]

    gone = client.responses.create(model="m", input="SLOW", background=True)
    client.responses.delete(gone.id)
    until(lambda: server.pipeline.num_open == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


def test_an_output_that_is_cut_is_incomplete(client):
    response = client.responses.create(model="m", input="Hi", max_output_tokens=5)
    assert response.status == "incomplete" and response.output_text == "Hello"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    events = list(client.responses.create(model="m", input="Hi", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    "body, param, said",
    [
        ({"imput": "Hi"}, "imput", "did you mean 'input'"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]",
         "only text"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "must be a text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only tools of type function"),
        ({"tools": [{"type": "function", "name": "f", "paramters": {"a": 1}}]},
         "tools[0].paramters", "did you mean 'parameters'"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "tool_choice is 'sometimes'"),
        ({"text": {"format": {"type": "verse"}}}, "text.format", "text.format"),
        ({"text": {"formt": {}}}, "text.formt", "did you mean 'format'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort is 'huge'"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"include": ["file_search_call.results"]}, "include", "known are"),
        ({"background": True, "stream": True}, "background", "not streamed"),
        ({"background": True, "store": False}, "store", "leave out store"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_name(server, body, param, said):
    answer = httpx.post(
        f"{server.url}/v1/responses",
        json={"input": "Hi"} | body,
        headers={"authorization": "Bearer secret"},
        timeout=60,
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param), error
    assert said in error["message"]


def test_log_probabilities_come_with_the_text():
    with running_server(FakePipeline()) as running:
        plain = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {
            "model": "m",
            "input": "Hi",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        [message] = plain.responses.create(**asked).output
        entries = message.content[0].logprobs
        assert "".join(one.token for one in entries if len(one.token) == 1)[:4] == OUTPUT[:4]
        assert len(entries) == len(OUTPUT.encode()) and len(entries[0].top_logprobs) == 2
        events = list(plain.responses.create(**asked, stream=True))
        told = [one for event in events if event.type == "response.output_text.delta"
                for one in event.logprobs]  # fmt: skip
        assert [one.token for one in told] == [one.token for one in entries]


def test_the_oldest_turns_make_room(client, server):
    turns: list[dict[str, str]] = [{"role": "system", "content": "Stay."}]
    for number in range(8):
        turns += [{"role": "user", "content": f"question {number} " + "x" * 1000}]
        turns += [{"role": "assistant", "content": f"answer {number}"}]
    turns += [{"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input=turns)
    assert caught.value.code == "context_length_exceeded"
    client.responses.create(model="m", input=turns, truncation="auto", max_output_tokens=50)
    prompt = server.pipeline.prompts[-1]
    assert prompt.startswith("system: Stay.") and "user: last" in prompt
    assert "question 7" in prompt and "question 0" not in prompt
    assert len(prompt) > 3000, "no more is left out than must be"


def test_a_stream_that_fails_ends_with_an_event_that_says_so():
    with running_server(FakePipeline()) as running:
        plain = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        events = list(plain.responses.create(model="m", input="FAIL", stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.message == "the engine failed"
        with pytest.raises(openai.InternalServerError):
            plain.responses.create(model="m", input="FAIL")
        begun = plain.responses.create(model="m", input="FAIL", background=True)
        assert poll(plain, begun.id).error.message == "the engine failed"


def test_a_stream_that_runs_at_the_servers_end_is_told():
    body = {"input": "SLOW", "stream": True}
    with (
        running_server(ScriptedPipeline(script), http_config={"shutdown_timeout": 0}) as running,
        httpx.stream("POST", f"{running.url}/v1/responses", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "event: response.created"
        running.server.leave()
        names = [line for line in lines if line.startswith("event: ")]
    assert names[-1] == "event: response.failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_leaves_frees_its_request(path, stream):
    words = [{"role": "user", "content": "SLOW"}]
    body = {"input": words} if path == "/v1/responses" else {"messages": words, "max_tokens": 99}
    data = json.dumps({**body, "stream": stream}).encode()
    with running_server(ScriptedPipeline(script)) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=240) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            until(lambda: running.pipeline.prompts and running.pipeline.num_open == 1)
            if stream:
                assert client.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: running.pipeline.num_open == 0)
        assert "SLOW" in running.pipeline.aborted[-1]


def test_a_server_that_stores_nothing_says_so():
    with running_server(
        ScriptedPipeline(script), http_config={"max_stored_responses": 0}
    ) as running:
        plain = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        response = plain.responses.create(model="m", input="Hi")
        assert response.store is False and response.output_text
        for asked in ({"store": True}, {"background": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.BadRequestError, match="max_stored_responses is 0"):
                plain.responses.create(model="m", input="Hi", **asked)
        with pytest.raises(openai.NotFoundError, match="max_stored_responses"):
            plain.responses.retrieve(response.id)


def test_another_key_knows_nothing_of_it(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: sk-alice-0123456789\nbob: sk-bob-0123456789ab\n")
    keys.chmod(0o600)
    access = {"api_keys_file": str(keys)}
    with running_server(ScriptedPipeline(script), access_config=access) as running:
        alice, bob = (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
            for key in ("sk-alice-0123456789", "sk-bob-0123456789ab")
        )
        response = alice.responses.create(model="m", input="Hi")
        assert alice.responses.retrieve(response.id).id == response.id
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            bob.responses.create(model="m", input="Hi", previous_response_id=response.id)
