"""Tool calls and reasoning of a real model, as programs with the `openai` package see them.

The built-in model calls tools as Hermes models do and thinks in <think> blocks; its `skills.jsonl`
says what it can be asked and what it must answer.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from server_process import Server

import penstock

SKILLS = Path(penstock.__file__).parent / "hub" / "tiny" / "skills.jsonl"
LINES = [json.loads(line) for line in SKILLS.read_text().splitlines()]
CALLS = [line for line in LINES if line["match"] == "tool_call"][:4]
REASONING = [line for line in LINES if line["match"] == "thought_answer"][:4]
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Server("tiny") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(line: dict) -> dict:
    body = {"model": "tiny", "messages": line["messages"], "temperature": 0, "max_tokens": 128}
    if "tools" in line:
        body["tools"] = line["tools"]
    return body | {"extra_body": {"chat_template_kwargs": line.get("chat_template_kwargs", {})}}


def streamed(client: openai.OpenAI, line: dict, **changes) -> list:
    with client.chat.completions.create(**asked(line) | changes, stream=True) as chunks:
        return [chunk.choices[0] for chunk in chunks if chunk.choices]


@pytest.mark.parametrize("line", CALLS, ids=range(len(CALLS)))
def test_a_tool_is_called_whole_and_streamed(client, line):
    expected = json.loads(line["expected"])
    [choice] = client.chat.completions.create(**asked(line)).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == expected["name"]
    assert json.loads(call.function.arguments) == expected["arguments"]

    choices = streamed(client, line)
    pieces = [piece for one in choices for piece in one.delta.tool_calls or ()]
    first, *rest = pieces
    assert (first.index, first.type, first.function.name) == (0, "function", expected["name"])
    assert first.id.startswith("call_") and first.function.arguments == ""
    assert len(rest) > 1, "arguments come as they are written"
    assert {(one.index, one.id, one.function.name) for one in rest} == {(0, None, None)}
    assert "".join(one.function.arguments for one in rest) == call.function.arguments
    assert not any(one.delta.content for one in choices)
    assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]


def test_a_call_and_its_result_can_be_sent_back(client):
    line = next(line for line in CALLS if "get_weather" in line["expected"])
    message = client.chat.completions.create(**asked(line)).choices[0].message
    city = json.loads(message.tool_calls[0].function.arguments)["city"]
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"degrees": 86}',
    }
    tools = [tool for tool in line["tools"] if tool["function"]["name"] == "get_weather"]
    history = [*line["messages"], message.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(**asked(line) | {"messages": history, "tools": tools})
    assert reply.choices[0].message.content == f"It is 86 degrees in {city}."
    assert reply.choices[0].finish_reason == "stop" and not reply.choices[0].message.tool_calls


@pytest.mark.parametrize("line", REASONING, ids=range(len(REASONING)))
def test_reasoning_is_apart_from_the_content_whole_and_streamed(client, line):
    reply = client.chat.completions.create(**asked(line))
    message = reply.choices[0].message
    assert message.reasoning_content and message.content.endswith(f"Answer: {line['expected']}")
    assert not any(tag in message.reasoning_content + message.content for tag in TAGS)
    assert reply.choices[0].finish_reason == "stop"

    choices = streamed(client, line)
    reasoning = [getattr(one.delta, "reasoning_content", None) or "" for one in choices]
    said = [one.delta.content or "" for one in choices]
    assert ("".join(reasoning), "".join(said)) == (message.reasoning_content, message.content)
    assert max(i for i, text in enumerate(reasoning) if text) < min(
        i for i, text in enumerate(said) if text
    )


def test_every_token_is_counted_whatever_it_became(client):
    line = REASONING[0]
    bare = client.chat.completions.create(**asked(line), logprobs=True)
    assert bare.usage.completion_tokens == len(bare.choices[0].logprobs.content) + 1  # the stop
    written = "".join(entry.token for entry in bare.choices[0].logprobs.content)
    assert written.startswith("<think>") and "</think>" in written


@pytest.mark.parametrize("budget", [0, 1, 5, 100])
def test_a_thinking_budget_closes_the_reasoning(client, budget):
    """The tokens are those of thinking freely up to there, then the closing tag, then an answer."""
    line = REASONING[0]
    free = client.chat.completions.create(**asked(line), logprobs=True).choices[0]
    free_tokens = [entry.token for entry in free.logprobs.content]
    num_free = free_tokens.index("</think>") - 1
    assert 5 < num_free < 100
    body = asked(line)
    body["extra_body"] = body["extra_body"] | {"thinking_token_budget": budget}
    choice = client.chat.completions.create(**body, logprobs=True).choices[0]
    tokens = [entry.token for entry in choice.logprobs.content]
    most = min(budget, num_free)
    assert tokens[: most + 2] == [*free_tokens[: most + 1], "</think>"]
    assert choice.message.content
    assert (choice.message.reasoning_content or "") == "".join(tokens[1 : most + 1]).strip()
    with client.chat.completions.create(**body, stream=True) as chunks:
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(one.content or "" for one in deltas) == choice.message.content
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    both = client.chat.completions.create(**body, response_format=form, logprobs=True).choices[0]
    tokens = [entry.token for entry in both.logprobs.content]
    assert tokens.index("</think>") == most + 1
    assert both.finish_reason == "length" or json.loads(both.message.content) is not None

    more = {"chat_template_kwargs": line.get("chat_template_kwargs", {}), "temperature": 0}
    if budget:
        url = str(client.base_url).removesuffix("/v1/")
        thinking = {"type": "enabled", "budget_tokens": budget}
        claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        answer = claude.messages.create(
            model="tiny", messages=line["messages"], max_tokens=128, thinking=thinking,
            extra_body=more,
        )  # fmt: skip
        said = {block.type: block for block in answer.content}
        assert said["text"].text == choice.message.content
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids may forbid"):
        extra = body["extra_body"] | {"allowed_token_ids": [5, 6]}
        client.chat.completions.create(**body | {"extra_body": extra})


def test_reasoning_that_is_cut_off_is_no_content(client):
    [choice] = client.chat.completions.create(**asked(REASONING[0]) | {"max_tokens": 6}).choices
    assert choice.message.reasoning_content and choice.message.content == ""
    assert choice.finish_reason == "length"


def test_without_tools_nothing_is_looked_for(client):
    line = {key: value for key, value in CALLS[0].items() if key != "tools"}
    [choice] = client.chat.completions.create(**asked(line)).choices
    assert choice.finish_reason == "stop" and not choice.message.tool_calls


@pytest.mark.parametrize("line", [CALLS[0], REASONING[0]], ids=["call", "reasoning"])
def test_the_responses_and_messages_apis_tell_the_same(client, line):
    message = client.chat.completions.create(**asked(line)).choices[0].message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    tools = [tool["function"] for tool in line.get("tools", ())]
    more: dict = {"temperature": 0, "chat_template_kwargs": line.get("chat_template_kwargs", {})}

    functions = [{"type": "function", "strict": False, **tool} for tool in tools]
    body = {"model": "tiny", "input": line["messages"], "tools": functions, "extra_body": more}
    with client.responses.stream(**body, max_output_tokens=131072) as stream:
        response = stream.get_final_response()
    by_kind = {item.type: item for item in response.output}
    told = [item for item in response.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in told] == calls
    assert response.output_text == (message.content or "") and response.status == "completed"
    reasoning = by_kind["reasoning"].content[0].text if "reasoning" in by_kind else None
    assert reasoning == message.reasoning_content

    schemas = [
        {"name": tool["name"], "input_schema": tool["parameters"]}
        | {"description": tool["description"]}
        for tool in tools
    ]
    url = str(client.base_url).removesuffix("/v1/")
    answer = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages.create(
        model="tiny", messages=line["messages"], max_tokens=128, tools=schemas, extra_body=more
    )
    said = {block.type: block for block in answer.content}
    used = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert used == [(name, json.loads(arguments)) for name, arguments in calls]
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    if message.reasoning_content:
        assert said["thinking"].thinking == message.reasoning_content
        assert said["text"].text == message.content


def test_what_was_marked_for_the_cache_is_found_there(client):
    url = str(client.base_url).removesuffix("/v1/")
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    words = "The swan lived near a river and walked along it every day. " * 8
    read = []
    for question in ("Where?", "When?"):
        usage = claude.messages.create(
            model="tiny",
            system=[{"type": "text", "text": words, **mark}],
            messages=[{"role": "user", "content": question}],
            max_tokens=1,
        ).usage
        assert usage.cache_creation_input_tokens == 0
        read.append((usage.cache_read_input_tokens, usage.input_tokens))
    (_, first), (found, rest) = read
    assert found >= 64 and rest < first - 64


def test_drafts_change_no_streamed_reply(client):
    """Tools called freely and by a grammar, reasoning freely and within a budget."""

    def said(client, line, **changes) -> tuple:
        choices = streamed(client, line, **changes)
        deltas = [one.delta for one in choices]
        calls = [piece.function for delta in deltas for piece in delta.tool_calls or ()]
        return (
            [call.name for call in calls if call.name],
            "".join(call.arguments or "" for call in calls),
            "".join(delta.content or "" for delta in deltas),
            "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
            choices[-1].finish_reason,
        )

    budget = {"extra_body": asked(REASONING[0])["extra_body"] | {"thinking_token_budget": 9}}
    free = [(line, {}) for line in (*CALLS[:2], *REASONING[:2])]
    by_grammar = [(line, {"tool_choice": "required"}) for line in CALLS]
    by_grammar.append((CALLS[0], {"tool_choice": "required", "temperature": 0.8, "seed": 3}))
    drafting, accepted = {"decoding_type": "NGram", "adaptive_draft_len": False}, 0.0
    with Server("tiny", speculative_config=drafting) as server:
        drafted = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for kind in (free, by_grammar, [(REASONING[0], budget)]):
            for line, changes in kind:
                assert said(drafted, line, **changes) == said(client, line, **changes)
            before, accepted = accepted, server.counters()["accepted_tokens"]
            assert accepted > before


def test_the_parsers_can_be_switched_off_and_requests_be_trusted_with_templates():
    flags = ("--reasoning_parser", "none", "--tool_parser", "none", "--trust_request_chat_template")
    with Server("tiny", *flags) as server:
        words = server.post("/tokenize", prompt="<Once>", add_special_tokens=False)["tokens"]
        asked_so = {
            "messages": [{"role": "user", "content": "Once"}],
            "chat_template": "<{{ messages[0].content }}>",
        }
        assert server.post("/tokenize", **asked_so)["tokens"] == words
        reply = server.post("/v1/chat/completions", **asked_so, max_tokens=1, return_token_ids=True)
        assert reply["prompt_token_ids"] == words
        for line, tag in ((CALLS[0], "<tool_call>"), (REASONING[0], "</think>")):
            body = {key: value for key, value in asked(line).items() if key != "extra_body"}
            body |= line.get("chat_template_kwargs", {}) and {
                "chat_template_kwargs": line["chat_template_kwargs"]
            }
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            message = reply["choices"][0]["message"]
            assert tag in message["content"] and message["reasoning_content"] is None
            assert message["tool_calls"] == [] and reply["choices"][0]["finish_reason"] == "stop"
