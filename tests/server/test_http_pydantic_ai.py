"""pydantic-ai drives the server: agents with tools, typed output by a tool and by JSON Schema.

The model is a script; the server, its schemas and its parsers are real.
"""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_fakes import running_server
from pydantic import BaseModel
from scripted_pipeline import ScriptedPipeline

pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")
pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai-slim lacks its openai extra")
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ANSWER = "It is 21 degrees in Paris."


class City(BaseModel):
    name: str


def call(tool: str, **arguments: Any) -> str:
    text = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def script(prompt: str) -> str:
    if "temperature" in prompt and "tool: 21" not in prompt:
        return call("temperature", city="Paris")
    if "final_result" in prompt:
        return call("final_result", name="Paris")
    return '{"name": "Paris"}' if "JSON" in prompt else ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with running_server(ScriptedPipeline(script)) as running:
        yield running


def agent(server: SimpleNamespace, kind: type = OpenAIChatModel, **options: Any) -> Agent:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    return Agent(kind("tiny", provider=provider), retries=0, **options)


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_an_agent_calls_its_tool_and_answers(server, kind):
    asked_for: list[str] = []
    worker = agent(server, kind, instructions="Use the tools.")

    @worker.tool_plain
    def temperature(city: str) -> int:
        """The temperature of a city."""
        asked_for.append(city)
        return 21

    result = asyncio.run(worker.run("Is it warm in Paris?"))
    assert (result.output, asked_for) == (ANSWER, ["Paris"])


def test_typed_output_by_a_tool(server):
    result = asyncio.run(agent(server, output_type=City).run("Which city?"))
    assert result.output == City(name="Paris")
    assert server.pipeline.asked[-1].tool_rule is not None  # it must be called


def test_typed_output_by_a_json_schema(server):
    result = asyncio.run(agent(server, output_type=NativeOutput(City)).run("JSON of a city"))
    assert result.output == City(name="Paris")
    guided = server.pipeline.asked[-1].sampling.guided_decoding
    assert json.loads(guided.json)["properties"]["name"]["type"] == "string"


def test_text_is_streamed(server):
    async def run() -> str:
        async with agent(server).run_stream("Say it.") as result:
            return [text async for text in result.stream_text()][-1]

    assert asyncio.run(run()) == ANSWER
