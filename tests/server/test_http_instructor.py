"""instructor drives the server: typed objects by tools, by JSON Schema and by JSON in the text.

The model is a script; the server, its schemas and its parsers are real.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import openai
import pytest
from http_fakes import running_server
from pydantic import BaseModel
from scripted_pipeline import ScriptedPipeline

instructor = pytest.importorskip("instructor", reason="instructor is not installed")

OBJECT = {"name": "Paris", "people": 2}


class City(BaseModel):
    name: str
    people: int


def script(prompt: str) -> str:
    if "tools:" in prompt:
        call = json.dumps({"name": "City", "arguments": OBJECT})
        return f"<tool_call>\n{call}\n</tool_call>"
    return json.dumps(OBJECT)


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(ScriptedPipeline(script)) as running:
        yield running


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON", "MD_JSON"])
def test_a_typed_object_comes_back(server, mode):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        typed = instructor.from_openai(client, mode=instructor.Mode[mode])
        found = typed.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Tell me about Paris."}],
            response_model=City,
            max_retries=0,
        )
    assert found.model_dump() == OBJECT
    asked = server.pipeline.asked[-1]
    if mode == "TOOLS":
        assert asked.tool_rule is not None and asked.tool_rule.names == ("City",)
    elif mode == "JSON_SCHEMA":
        assert json.loads(asked.sampling.guided_decoding.json)["properties"].keys() == OBJECT.keys()
    elif mode == "JSON":
        assert asked.sampling.guided_decoding.json_object
    else:
        assert asked.sampling.guided_decoding is None


def test_an_object_grows_while_it_is_streamed(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        typed = instructor.from_openai(client)
        *_, last = typed.chat.completions.create_partial(
            model="tiny",
            messages=[{"role": "user", "content": "Tell me about Paris."}],
            response_model=City,
        )
    assert (last.name, last.people) == ("Paris", 2)
