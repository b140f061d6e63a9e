"""The body of `POST /v1/chat/completions`: messages, tools and how the template is rendered."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from penstock.errors import RequestError
from penstock.server.openai.requests.generation import GenerationFields
from penstock.server.openai.requests.schema import Count, Texts, TokenIds, TopLogprobs, shown
from penstock.types.request import ChatOptions, GenerateInput, ToolRule

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_TEMPLATE_CHARS = 1 << 17
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise RequestError(
            "invalid_type",
            f"messages must be a list with at least one message, it is {shown(value)}",
            "messages",
        )
    if len(value) > MAX_MESSAGES:
        raise RequestError(
            "invalid_value", f"{len(value)} messages, at most {MAX_MESSAGES} are read", "messages"
        )
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return value


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise RequestError(
            "invalid_type", f"{where} must be an object, it is {shown(message)}", where
        )
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            "invalid_value",
            f"{where}.role is {shown(role)}, it must be one of {', '.join(_ROLES)}",
            f"{where}.role",
        )
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(
            "missing_field",
            f"{where}.content is missing; only an assistant may leave it out",
            f"{where}.content",
        )
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}.content[{index}]")
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            "invalid_type",
            f"{where}.content must be a text or a list of parts, it is {shown(content)}",
            f"{where}.content",
        )
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not (
        isinstance(tool_calls, list) and all(isinstance(call, dict) for call in tool_calls)
    ):
        raise RequestError(
            "invalid_type", f"{where}.tool_calls must be a list of objects", f"{where}.tool_calls"
        )


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            "invalid_type", f"{where} must be an object with a type, it is {shown(part)}", where
        )
    if kind != "text":
        raise RequestError(
            "unsupported", f"{where}.type is {shown(kind)}: only text parts are supported", where
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(
            "invalid_type", f"{where}.text must be a text, it is {shown(part.get('text'))}", where
        )


def _tools(value: Any) -> Any:
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise RequestError(
                "invalid_value",
                f"tools[{index}] is {shown(tool)}: it must be "
                '{"type": "function", "function": {...}}',
                f"tools[{index}]",
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(
                "missing_field",
                f"tools[{index}].function.name is {shown(name)}, it must be a text",
                f"tools[{index}].function.name",
            )
    return value


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_SHOWN_MESSAGES = WithJsonSchema(
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": list(_ROLES)},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": _TEXT_PART},
                        {"type": "null"},
                    ]
                },
                "tool_calls": {
                    "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]
                },
            },
            "required": ["role"],
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
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "minLength": 1}},
                    "required": ["name"],
                },
            },
            "required": ["function"],
        },
    }
)
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_messages), _SHOWN_MESSAGES]
Tools = Annotated[
    list[dict[str, Any]], BeforeValidator(_tools), Field(max_length=MAX_TOOLS), _SHOWN_TOOLS
]
OwnTemplate = Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)]


class ChatRequest(GenerationFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationFields.UNSUPPORTED,
        "media_io_kwargs": "only text is supported",
        "agent_hierarchy": "agent-aware scheduling is not supported",
        "modalities": 'only ["text"] is supported',
        "audio": "only text is supported",
        "prediction": "predicted outputs are not supported",
        "functions": "use tools",
        "function_call": "use tools",
        "web_search_options": "web search is not supported",
    }

    messages: Messages
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_token_ids: TokenIds | None = Field(default=None, min_length=1)
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=1024)
    chat_template: OwnTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    media_io_kwargs: dict[str, Any] | None = None
    agent_hierarchy: Any = None
    modalities: Texts | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_defaults(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("modalities") == ["text"]:
            return {key: value for key, value in body.items() if key != "modalities"}
        return body

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        self.tool_rule()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                "invalid_value",
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; they mean the same, give one",
                "max_completion_tokens",
            )
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            raise RequestError(
                "invalid_value",
                "continue_final_message needs a last message of the assistant",
                "continue_final_message",
            )
        for name in ("verbosity", "chat_template"):
            if getattr(self, name) is not None and self.prompt_token_ids is not None:
                raise RequestError(
                    "unsupported",
                    f"{name} is for rendering messages, which prompt_token_ids do without; give "
                    "one",
                    name,
                )
        return self

    def chat_input(self, defaults: Mapping[str, Any]) -> GenerateInput:
        """`defaults`: the model's own sampling parameters."""
        changes: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        ids = self.prompt_token_ids
        return GenerateInput(
            token_ids=None if ids is None else tuple(ids),
            messages=tuple(self.messages) if ids is None else None,
            chat=self.chat_options(),
            parse_output=True,
            tool_rule=self.tool_rule(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            sampling=self.sampling(defaults, **changes),
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def tool_rule(self) -> ToolRule | None:
        """Whether a tool must be called."""
        choice, names = self.tool_choice, tuple(one["function"]["name"] for one in self.tools or ())
        if choice in (None, "none", "auto"):
            return None
        if choice == "required":
            if not names:
                raise RequestError(
                    "invalid_value",
                    "tool_choice is required, and there are no tools",
                    "tool_choice",
                )
            return ToolRule(names=names)
        named = choice if isinstance(choice, dict) else {}
        function = named.get("function", named)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or named.get("type", "function") != "function":
            raise RequestError(
                "invalid_value",
                f"tool_choice is {shown(choice)}: it must be none, auto, required or "
                '{"type": "function", "function": {"name": ..}}',
                "tool_choice",
            )
        if name not in names:
            raise RequestError(
                "invalid_value", f"tool_choice names {shown(name)}, which tools lack", "tool_choice"
            )
        return ToolRule(names=(name,), is_named=True)

    def chat_options(self) -> ChatOptions:
        template_kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        if self.verbosity is not None:
            template_kwargs.setdefault("verbosity", self.verbosity)
        return ChatOptions(
            # Continuing the last message and opening a new one exclude each other.
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            template_kwargs=template_kwargs,
            tools=() if self.tool_choice == "none" else tuple(self.tools or ()),
            documents=tuple(self.documents or ()),
            template=self.chat_template,
        )
