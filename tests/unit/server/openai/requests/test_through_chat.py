"""Bodies of the Responses and Messages APIs become chat requests, or are refused; none is a bug."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.server.anthropic.requests import CountTokensRequest, MessagesRequest
from penstock.server.openai.requests.responses import ResponsesRequest
from penstock.server.openai.requests.schema import parse
from penstock.server.openai.requests.through_chat import told_as
from penstock.server.openai.responses.conversation import kept_items

WORDS = st.sampled_from(
    [
        *("type", "role", "content", "text", "input", "output", "name", "arguments", "call_id"),
        *("user", "assistant", "system", "message", "function_call", "function_call_output"),
        *("reasoning", "summary", "reasoning_text", "input_text", "output_text", "function", "id"),
        *("tool_use", "tool_result", "tool_use_id", "thinking", "enabled", "custom", "auto", "any"),
        *("input_schema", "json_schema", "schema", "x", ""),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(WORDS, one, max_size=4)
)
ITEMS = st.lists(st.dictionaries(WORDS, VALUES, max_size=5) | VALUES, max_size=3)


def read_response(body: dict[str, Any]) -> None:
    asked = parse(ResponsesRequest, {"input": "Hi", **body})
    asked.chat_request([]).chat_input({})
    msgspec.json.encode(kept_items(asked.input))


def read_message(body: dict[str, Any]) -> None:
    one = {"messages": [{"role": "user", "content": "Hi"}], **body}
    for schema, more in ((MessagesRequest, {"max_tokens": 9}), (CountTokensRequest, {})):
        if not body.keys() - schema.model_fields.keys():
            parse(schema, {**more, **one}).chat_request().chat_input({})


@pytest.mark.parametrize(
    "read, schema, items",
    [(read_response, ResponsesRequest, "input"), (read_message, MessagesRequest, "messages")],
    ids=["responses", "messages"],
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_a_body_holds_it_is_read_or_refused(read, schema, items, data):
    name = data.draw(st.sampled_from([*sorted(schema.model_fields), items, items]))
    value = data.draw(ITEMS if name in (items, "tools") else VALUES)
    try:
        read({name: value})
    except RequestError as error:
        assert error.message


def test_a_history_counts_before_the_input():
    asked = parse(ResponsesRequest, {"input": [{"role": "user"}]})
    with pytest.raises(RequestError, match=r"^input\[0\]\.content must be"):
        asked.chat_request([{"role": "user", "content": "Hi"}])


def test_an_error_of_chat_has_the_name_of_the_field_it_came_from():
    names = {
        "messages": "input",
        "stop": "stop_sequences",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    def told(message: str, param: str | None) -> tuple[str, str | None]:
        with pytest.raises(RequestError) as caught, told_as(names):
            raise RequestError("invalid_value", message, param)
        return caught.value.message, caught.value.param

    assert told("the template refuses these messages", "messages") == (
        "the template refuses these messages",
        "input",
    )
    assert told("stop is 9 long, use response_format", "stop[0]") == (
        "stop_sequences is 9 long, use text.format",
        "stop_sequences[0]",
    )
    assert told(
        "response_format.json_schema.schema.items is wrong", "response_format.json_schema.schema"
    ) == ("text.format.schema.items is wrong", "text.format.schema")
    assert told("a stop string has 9 characters", None) == ("a stop string has 9 characters", None)
