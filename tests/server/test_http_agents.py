"""`/v1/responses` by the `openai-agents` package: runs with a function tool, whole and streamed."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from http_fakes import running_server
from scripted_pipeline import ScriptedPipeline

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

QUESTION, ANSWER = "Is it warm in Paris?", "It is 21 degrees in Paris."


def script(prompt: str) -> str:
    last = prompt.rpartition("user: ")[2]
    if "tool: 21" in last:
        return f"<think>\nWarm.\n</think>\n\n{ANSWER}"
    if "Paris" in last:
        call = json.dumps({"name": "temperature", "arguments": {"city": "Paris"}})
        return f"<think>\nLook.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    return "You asked about Paris." if ANSWER in prompt else "About what?"


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    agents.set_tracing_disabled(True)
    with running_server(ScriptedPipeline(script)) as running:
        yield running


def make_agent(server: SimpleNamespace, asked_for: list[str]) -> Any:
    @agents.function_tool
    def temperature(city: str) -> int:
        """The temperature of a city."""
        asked_for.append(city)
        return 21

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return agents.Agent(
        name="weather",
        instructions="Answer with the tools.",
        model=agents.OpenAIResponsesModel(model="m", openai_client=client),
        model_settings=agents.ModelSettings(temperature=0.0, max_tokens=200),
        tools=[temperature],
    )


def test_an_agent_calls_its_tool_and_answers(server):
    asked_for: list[str] = []
    result = asyncio.run(agents.Runner.run(make_agent(server, asked_for), QUESTION))
    assert result.final_output == ANSWER and asked_for == ["Paris"]
    kinds = [item.type for item in result.new_items]
    assert kinds == [
        *("reasoning_item", "tool_call_item", "tool_call_output_item"),
        *("reasoning_item", "message_output_item"),
    ]
    assert result.context_wrapper.usage.requests == 2
    assert result.context_wrapper.usage.output_tokens > len(ANSWER)
    assert "system: Answer with the tools." in server.pipeline.prompts[-1]


def test_an_agents_run_is_streamed(server):
    asked_for: list[str] = []

    async def run() -> tuple[str, Any]:
        streamed = agents.Runner.run_streamed(make_agent(server, asked_for), QUESTION)
        text = ""
        async for event in streamed.stream_events():
            raw = event.data if event.type == "raw_response_event" else None
            if raw is not None and raw.type == "response.output_text.delta":
                text += raw.delta
        return text, streamed.final_output

    assert asyncio.run(run()) == (ANSWER, ANSWER) and asked_for == ["Paris"]


def test_an_agent_goes_on_from_a_stored_response(server):
    async def run() -> str:
        agent = make_agent(server, [])
        first = await agents.Runner.run(agent, QUESTION)
        second = await agents.Runner.run(
            agent, "About what did I ask?", previous_response_id=first.last_response_id
        )
        return str(second.final_output)

    assert asyncio.run(run()) == "You asked about Paris."
