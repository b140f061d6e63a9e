"""litellm drives the server: chats, streams, tools, structured output, embeddings, reranking.

The model is a script; the server, its schemas and its parsers are real.
"""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_fakes import running_server
from msgspec.structs import replace
from pydantic import BaseModel
from scripted_pipeline import ScriptedPipeline

from penstock.types.pooling import Task

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network while it is imported
litellm = pytest.importorskip("litellm", reason="litellm is not installed")

QUESTION, ANSWER = "Is it warm in Paris?", "It is 21 degrees in Paris."
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class City(BaseModel):
    name: str


def script(prompt: str) -> str:
    if "JSON" in prompt:
        return '{"name": "Paris"}'
    if "tools:" in prompt and "tool: 21" not in prompt:
        call = json.dumps({"name": "temperature", "arguments": {"city": "Paris"}})
        return f"<tool_call>\n{call}\n</tool_call>"
    return ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(ScriptedPipeline(script)) as running:
        yield running


@pytest.fixture
def where(server) -> dict[str, Any]:
    return {"model": "hosted_vllm/tiny", "api_base": f"{server.url}/v1", "api_key": "none"}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_streamed(where):
    asked = {"messages": user(QUESTION), "temperature": 0.5, "max_tokens": 64, "top_p": 0.9}
    reply = litellm.completion(**where, **asked)
    assert reply.choices[0].message.content == ANSWER and reply.usage.completion_tokens > 0
    chunks = litellm.completion(
        **where, **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    reply = litellm.text_completion(**where, prompt=QUESTION, max_tokens=64)
    assert reply.choices[0].text == ANSWER


def test_a_tool_goes_round(where):
    messages: list[Any] = user(QUESTION)
    said = litellm.completion(**where, messages=messages, tools=[TOOL]).choices[0].message
    [call] = said.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    reply = litellm.completion(**where, messages=messages, tools=[TOOL])
    assert reply.choices[0].message.content == ANSWER


def test_a_model_of_pydantic_becomes_a_grammar(where, server):
    reply = litellm.completion(**where, messages=user("JSON of Paris"), response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content) == City(name="Paris")
    guided = server.pipeline.asked[-1].sampling.guided_decoding
    assert json.loads(guided.json)["properties"]["name"]["type"] == "string"


def test_embeddings_and_reranking(where, server):
    client = server.pipeline.client
    info = client.info
    client.info = replace(info, task=Task.EMBED, hidden_size=4)
    try:
        reply = litellm.embedding(**where, input=["A", "B"])
        assert [one["embedding"] for one in reply.data] == [pytest.approx([0.6, 0.8, 0, 0])] * 2
        ranked = litellm.rerank(**where, query="A", documents=["A", "B"], top_n=1)
        assert ranked.results[0]["relevance_score"] == pytest.approx(1.0)
    finally:
        client.info = info


def test_a_refusal_arrives_as_one(where):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**where, messages=user(QUESTION), temperature=1000)
