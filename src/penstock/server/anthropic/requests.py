"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and the chat request that each
stands for."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from penstock.errors import RequestError
from penstock.server.anthropic.conversation import (
    chat_messages,
    chat_tool,
    check_cache_control,
    check_tools,
)
from penstock.server.openai.requests.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from penstock.server.openai.requests.schema import (
    Count,
    Int32,
    Strict,
    Texts,
    at_most,
    shown_as,
)
from penstock.server.openai.requests.through_chat import parse_chat, refuse_unsupported
from penstock.types.sampling import MAX_STOP_STRINGS

# Chat's name of a field -> its name here, in errors.
NAMES = {
    "prompt": "messages",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
_BLOCKS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"type": "string"}},
        "required": ["type"],
    },
}
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, _BLOCKS]}
_SHOWN_MESSAGES = WithJsonSchema(
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": _TEXT_OR_BLOCKS,
            },
            "required": ["role", "content"],
        },
    }
)
_SHOWN_TOOLS = WithJsonSchema(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        },
    }
)
Messages = Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES), _SHOWN_MESSAGES]
Tools = Annotated[
    list[dict[str, Any]], BeforeValidator(check_tools), Field(max_length=MAX_TOOLS), _SHOWN_TOOLS
]
StopSequences = Annotated[
    Texts,
    at_most("stop_sequences", MAX_STOP_STRINGS),
    shown_as(Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]),
]
System = Annotated[str | list[Any], WithJsonSchema(_TEXT_OR_BLOCKS)]


class ThinkingOptions(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    display: Literal["summarized"] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            if self.name is None:
                raise RequestError(
                    "missing_field", "tool_choice.name is missing", "tool_choice.name"
                )
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputConfig(Strict):
    effort: str | None = None
    format: dict[str, Any] | None = None


class PromptFields(Strict):
    """What messages and the number of their tokens depend on."""

    NESTED: ClassVar[Mapping[str, type[Strict]]] = {
        "thinking": ThinkingOptions,
        "tool_choice": ToolChoice,
        "output_config": OutputConfig,
    }
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "context_management": "a context is not edited; send the messages that should be read",
        "mcp_servers": "the server runs no tools",
        "speed": "there is one speed; leave it out",
    }

    model: str | None = None
    messages: Messages
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    speed: str | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        refuse_unsupported(self, self.UNSUPPORTED)
        if self.cache_control is not None:
            check_cache_control(self.cache_control, "cache_control")
        return self

    @property
    def calls_one_tool(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.type != "disabled"

    def chat_request(self) -> ChatRequest:
        return parse_chat(self._chat_body(), NAMES)

    def _chat_body(self) -> dict[str, Any]:
        messages = chat_messages(self.system, self.messages)
        config = self.output_config or OutputConfig()
        choice = self.tool_choice
        # The words of an assistant at the end are gone on with.
        is_prefill = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        kwargs = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            for name in ("enable_thinking", "thinking"):  # as templates of various models call it
                kwargs.setdefault(name, self.shows_thinking)
        return {
            "model": self.model,
            "messages": messages,
            "tools": None if self.tools is None else [chat_tool(tool) for tool in self.tools],
            "tool_choice": None if choice is None else choice.for_chat(),
            "parallel_tool_calls": not self.calls_one_tool,
            "reasoning_effort": config.effort,
            "response_format": _chat_format(config.format),
            "continue_final_message": is_prefill,
            "chat_template_kwargs": kwargs or None,
        }


class CountTokensRequest(PromptFields):
    pass


class MessagesRequest(PromptFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **PromptFields.UNSUPPORTED,
        "container": "the server runs no tools",
        "inference_geo": "a server is where it is; leave it out",
        "diagnostics": "there are none; leave it out",
    }

    max_tokens: Annotated[Count, Field(ge=1)]
    stream: bool = False
    stop_sequences: StopSequences | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    priority: Int32 = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    container: Any = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise RequestError(
                "invalid_value",
                f"thinking.budget_tokens is {budget} and max_tokens is {self.max_tokens}, which "
                "counts thinking, too; raise max_tokens",
                "thinking.budget_tokens",
            )
        return self

    def _chat_body(self) -> dict[str, Any]:
        return {
            **super()._chat_body(),
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "thinking_token_budget": self._budget,
        }

    @property
    def _budget(self) -> int | None:
        is_bounded = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if self.thinking is not None and is_bounded else None


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema has a name in a chat request."""
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": {"name": "output", **schema}}
