"""Outputs that must match something, from a real server, as the official packages ask for them."""

import json
import re
from collections.abc import Iterator
from enum import Enum

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from server_process import Server


class Kind(Enum):
    CITY = "city"
    RIVER = "river"


class Place(BaseModel):
    name: str = Field(max_length=12)
    kind: Kind
    inhabitants: int = Field(ge=0, le=99_999)


class Places(BaseModel):
    best: Place
    others: list[Place] = Field(max_length=2)
    note: str | None = Field(max_length=8)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me about Athens."}]}
TOOL_CALL_ID = 12  # of <tool_call>, which opens a call
LIMIT = {"max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # xgrammar is what the recipes of TensorRT-LLM name; it is served all the same, with a warning
    with Server("tiny", guided_decoding_backend="xgrammar") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_parse_gives_pydantic_models(server, client):
    for model in (Place, Places):
        reply = client.chat.completions.parse(**ASK, **LIMIT, response_format=model)
        assert reply.choices[0].finish_reason == "stop"
        assert isinstance(reply.choices[0].message.parsed, model)
    assert "guided_decoding_backend" in server.log.read_text()


def test_streams_and_samples_match_too(client):
    asked = ASK | LIMIT | {"temperature": 1.0, "n": 3, "seed": 5, "logprobs": True}
    with client.chat.completions.stream(**asked, response_format=Place) as stream:
        choices = stream.get_final_completion().choices
    assert [choice.finish_reason for choice in choices] == ["stop"] * 3
    assert len({choice.message.content for choice in choices}) > 1
    for choice in choices:
        assert isinstance(choice.message.parsed, Place)
        written = "".join(entry.token for entry in choice.logprobs.content)
        assert written == choice.message.content


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": {"type": "regex", "regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"response_format": {"type": "ebnf", "ebnf": 'root ::= "x" [0-9]{2}'}}, "x[0-9]{2}"),
        ({"response_format": {"type": "json", "schema": {"const": [1, 2]}}}, r"\[1,\s*2\s*\]"),
        ({"guided_regex": "(ab){2,3}"}, "(ab){2,3}"),
        ({"guided_choice": ["yes", "no/never"]}, "yes|no/never"),
        ({"guided_grammar": 'start: "left" | "right"'}, "left|right"),
        ({"guided_json": {"enum": ["a", "b"]}}, '"a"|"b"'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_every_way_to_ask(server, asked, pattern):
    body = {"prompt": "Say", "max_tokens": 40, "temperature": 1.0, "seed": 3} | asked
    [choice] = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert re.fullmatch(pattern, choice["text"]), choice
    assert choice["finish_reason"] == "stop"


def test_an_output_that_is_cut_says_so_and_stop_strings_still_stop(server):
    body = ASK | {"temperature": 0, "response_format": {"type": "json_object"}}
    [cut] = server.http.post("/v1/chat/completions", json=body | {"max_tokens": 5}).json()[
        "choices"
    ]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("{")
    asked = {"prompt": "Say", "guided_regex": "(abc){5}", "stop": ["bcab"], "max_tokens": 90}
    [stopped] = server.http.post("/v1/completions", json=asked).json()["choices"]
    assert stopped["text"] == "a" and stopped["stop_reason"] == "bcab"


def test_min_tokens_hold_off_the_end_as_long_as_the_grammar_goes_on(server):
    """`a*` could end at once; a choice must end after its word."""
    asked = {"prompt": "Say", "max_tokens": 60, "min_tokens": 20, "guided_regex": "(a|b)*"}
    reply = server.http.post("/v1/completions", json=asked).raise_for_status().json()
    assert reply["usage"]["completion_tokens"] >= 20
    asked = asked | {"guided_regex": None, "guided_choice": ["yes"]}
    reply = server.http.post("/v1/completions", json=asked).raise_for_status().json()
    assert reply["choices"][0]["text"] == "yes"


def test_reasoning_comes_before_and_is_free(client):
    question = "What is 5 plus 3? Think first."
    body = ASK | {"messages": [{"role": "user", "content": question}], "max_tokens": 400}
    reply = client.chat.completions.parse(**body, temperature=0, response_format=Place)
    assert reply.choices[0].message.parsed is not None
    prefilled = {"role": "assistant", "content": "<think>Athens."}
    body |= {"messages": [*body["messages"], prefilled]}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    reply = client.chat.completions.create(
        **body,
        temperature=0,
        extra_body=extra,
        response_format={"type": "json_schema", "json_schema": {"schema": {"enum": ["x", "y"]}}},
    )
    message = reply.choices[0].message
    if reply.choices[0].finish_reason == "stop":
        assert json.loads(message.content) in ("x", "y")
    else:  # it thinks on to the end of its tokens
        assert message.content == ""


def test_whitespace_is_what_is_asked_for(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [[2]]}}}
    schema["required"] = ["a", "b"]
    old = {"guided_json": schema, "guided_decoding_backend": "xgrammar"}
    for asked, text in (
        (old | {"guided_whitespace_pattern": ""}, '{"a":1,"b":[2]}'),
        (old | {"guided_whitespace_pattern": r"\s{1}"}, None),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, None),
    ):
        body = {"model": "tiny", "prompt": "Say", "temperature": 0, "max_tokens": 60, **asked}
        reply = server.http.post("/v1/completions", json=body).raise_for_status().json()
        said = reply["choices"][0]["text"]
        assert json.loads(said) == {"a": 1, "b": [2]}
        most = 1 if asked.get("guided_whitespace_pattern") else 0
        assert max(map(len, re.findall(r"\s+", said)), default=0) <= most
        assert text in (None, said)
    for wrong in ({"guided_whitespace_pattern": "x*"}, {"guided_decoding_backend": "outlines"}):
        body = {"model": "tiny", "prompt": "Say", "guided_json": schema, **wrong}
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 400 and next(iter(wrong))[7:] in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_must_be_called(client, stream):
    asked = ASK | LIMIT | {"tools": [WEATHER, CLOCK]}
    clock = {"type": "function", "function": {"name": "get_time"}}
    for choice, names in (("required", {"get_weather", "get_time"}), (clock, {"get_time"})):
        if stream:
            with client.chat.completions.stream(**asked, tool_choice=choice) as events:
                [found] = events.get_final_completion().choices
        else:
            [found] = client.chat.completions.create(**asked, tool_choice=choice).choices
        assert found.finish_reason == "tool_calls" and not found.message.content
        for call in found.message.tool_calls:
            assert call.function.name in names
            tool = WEATHER if call.function.name == "get_weather" else CLOCK
            parameters = tool["function"]["parameters"]
            jsonschema.validate(json.loads(call.function.arguments), parameters)
        if choice is clock:
            assert len(found.message.tool_calls) == 1


def test_strict_tools_of_auto_are_called_by_their_schemas_or_not_at_all(client):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    asked = ASK | LIMIT | {"tools": [strict], "parallel_tool_calls": False}
    tag = str(TOOL_CALL_ID)
    for bias, num_calls in ({tag: 100}, 1), ({tag: -100}, 0):  # it calls one, and none
        [choice] = client.chat.completions.create(**asked, logit_bias=bias).choices
        assert len(choice.message.tool_calls or ()) == num_calls
        for call in choice.message.tool_calls or ():
            assert call.function.name == "get_weather"
            jsonschema.validate(
                json.loads(call.function.arguments), WEATHER["function"]["parameters"]
            )


def test_langchain(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=400
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Place, method=method).invoke("Tell me about Athens.")
        assert isinstance(found, Place)
    bound = model.bind_tools([WEATHER], tool_choice="get_weather").invoke("What now?")
    assert [call["name"] for call in bound.tool_calls] == ["get_weather"]


def test_the_other_apis_go_the_same_way(server, client):
    asked = {"model": "tiny", "max_output_tokens": 400, "temperature": 0}
    reply = client.responses.parse(**asked, input="Tell me about Athens.", text_format=Place)
    assert isinstance(reply.output_parsed, Place)
    anthropic = pytest.importorskip("anthropic")
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    function = WEATHER["function"]
    tool = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    reply = other.messages.create(
        model="tiny",
        max_tokens=400,
        extra_body={"temperature": 0},
        messages=ASK["messages"],
        tools=[tool],
        tool_choice={"type": "any"},
    )
    assert reply.stop_reason == "tool_use"
    for call in reply.content:
        jsonschema.validate(call.input, function["parameters"])


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"properties": {"a": {"uniqueItems": True}}}},
            },
            "response_format.json_schema.schema.properties.a",
            "at #/properties/a",
        ),
        ({"type": "json_schema"}, "response_format.json_schema", "missing"),
        ({"type": "yaml"}, "response_format.type", "json_object"),
        ({"type": "regex", "regex": "(a"}, "response_format.regex", "unclosed group"),
        ({"type": "ebnf", "ebnf": "root ::= x"}, "response_format.ebnf", "x"),
        ({"type": "structural_tag", "format": {}}, "response_format", "structures"),
        ({"type": "json", "schema": {"const": "a" * 300_000}}, "response_format.schema", "262144"),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)
def test_what_cannot_be_a_grammar_is_refused_with_its_path(server, asked, param, said):
    reply = server.http.post("/v1/chat/completions", json=ASK | {"response_format": asked})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and said in error["message"]


def test_two_ways_at_once_and_endless_outputs_are_refused(server):
    body = {"prompt": "Say", "guided_regex": "a", "response_format": {"type": "json_object"}}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and "give one" in reply.text
    body = {"prompt": "Say", "guided_regex": "a", "ignore_eos": True}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "ignore_eos"


def test_without_a_tokenizer_grammars_are_refused():
    with Server("tiny", skip_tokenizer_init=True) as server:
        body = {"prompt": [5, 6], "max_tokens": 4, "guided_regex": "a"}
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
        assert reply.status_code == 400 and "tokenizer" in reply.json()["error"]["message"]
