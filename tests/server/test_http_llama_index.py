"""The package `llama-index` against a real server: chats, streams, typed answers, tools."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field
from server_process import Server

openai_like = pytest.importorskip("llama_index.llms.openai_like")
core = pytest.importorskip("llama_index.core")


class Place(BaseModel):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99_999)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with Server("tiny") as server:
        yield openai_like.OpenAILike(
            model="tiny", api_base=f"{server.url}/v1", api_key="none", is_chat_model=True,
            is_function_calling_model=True, max_tokens=300, temperature=0, context_window=2048,
        )  # fmt: skip


def asked(text: str) -> list[Any]:
    return [core.llms.ChatMessage(role="user", content=text)]


def test_a_chat_is_answered_whole_and_streamed(llm):
    whole = llm.chat(asked("What is 2 plus 3?")).message.content
    assert "5" in whole
    assert "".join(one.delta or "" for one in llm.stream_chat(asked("What is 2 plus 3?"))) == whole


def test_answers_are_typed_and_tools_are_called(llm):
    place = llm.as_structured_llm(Place).chat(asked("Tell me about Athens.")).raw
    assert isinstance(place, Place)

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return city

    tool = core.tools.FunctionTool.from_defaults(get_weather)
    question = "What is the weather in Athens?"
    reply = llm.chat_with_tools([tool], user_msg=question, tool_required=True)
    [call] = llm.get_tool_calls_from_response(reply)
    assert call.tool_name == "get_weather" and call.tool_kwargs == {"city": "Athens"}
