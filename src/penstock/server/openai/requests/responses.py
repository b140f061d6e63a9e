"""The body of `POST /v1/responses`, and the chat request it stands for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from penstock.errors import RequestError, did_you_mean
from penstock.server.openai.requests.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from penstock.server.openai.requests.generation import Stop
from penstock.server.openai.requests.schema import Count, Int32, Strict, Texts, TopLogprobs, shown
from penstock.server.openai.requests.through_chat import parse_chat, refuse_unsupported
from penstock.server.openai.responses.conversation import messages_of

LOGPROBS = "message.output_text.logprobs"
# What may be included: of the second kind there is nothing, reasoning comes as it is.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
# Chat's name of a field -> its name here, in errors.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_AS_IN_CHAT = (
    *("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"),
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "min_tokens", "ignore_eos", "priority", "cache_salt", "chat_template_kwargs"),
)


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(
            "invalid_type",
            f"input must be a text or a list with at least one item, it is {shown(value)}",
            "input",
        )
    if len(value) > MAX_MESSAGES:
        raise RequestError(
            "invalid_value", f"input holds {len(value)} items, at most {MAX_MESSAGES} are read"
        )
    return value


def _tools(value: Any) -> Any:
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(
                "unsupported",
                f"{where}.type is {shown(kind)}: only tools of type function are supported; what "
                "the server would have to run itself is not",
                where,
            )
        for name, given in tool.items():
            if given and name not in _TOOL_FIELDS:
                hint = did_you_mean(name, _TOOL_FIELDS)
                said = f"unknown field '{where}.{name[:80]}'{hint}"
                raise RequestError("unknown_field", said, f"{where}.{name[:80]}")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise RequestError(
                "missing_field",
                f"{where}.name is {shown(tool.get('name'))}, it must be a text",
                f"{where}.name",
            )
    return value


_SHOWN_INPUT = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_MESSAGES,
                "items": {
                    "type": "object",
                    "properties": {
                        "type": {
                            "enum": [
                                *("message", "function_call", "function_call_output", "reasoning")
                            ]
                        },
                        "role": {"enum": ["user", "assistant", "system", "developer"]},
                    },
                },
            },
        ]
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
                "name": {"type": "string", "minLength": 1},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["type", "name"],
        },
    }
)
Input = Annotated[str | list[Any], BeforeValidator(_input), _SHOWN_INPUT]
FunctionTools = Annotated[
    list[dict[str, Any]], BeforeValidator(_tools), Field(max_length=MAX_TOOLS), _SHOWN_TOOLS
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class ReasoningOptions(Strict):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextOptions(Strict):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Strict):
    NESTED: ClassVar[Mapping[str, type[Strict]]] = {
        "reasoning": ReasoningOptions,
        "text": TextOptions,
        "stream_options": ResponseStreamOptions,
    }
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "conversation": "server-side conversations are not supported; use previous_response_id",
        "prompt": "prompt templates are not kept here; send instructions and input",
        "context_management": "a context is not compacted; truncation: auto drops its oldest turns",
        "moderation": "there is no moderation",
        "prompt_cache_options": "prefixes are found by themselves; leave it out",
        "prompt_cache_retention": "prefixes are found by themselves; leave it out",
    }

    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    background: bool = False
    store: bool | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: FunctionTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Texts | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    priority: Int32 = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    chat_template_kwargs: dict[str, Any] | None = None

    conversation: Any = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_unsupported(self, self.UNSUPPORTED)
        for one in self.include or ():
            if one not in _INCLUDABLE:
                raise RequestError(
                    "unsupported",
                    f"include holds {shown(one)}; known are {', '.join(_INCLUDABLE)}",
                    "include",
                )
        if self.top_logprobs and not self.has_logprobs:
            raise RequestError(
                "invalid_value", f"top_logprobs needs {LOGPROBS} in include", "top_logprobs"
            )
        if self.background and self.stream:
            raise RequestError(
                "unsupported",
                "a response in the background is not streamed; ask for it with GET, or leave out "
                "one of background and stream",
                "background",
            )
        if self.background and self.store is False:
            raise RequestError(
                "invalid_value",
                "store is false and background is true: a response in the background is fetched "
                "from where it is stored; leave out store",
                "store",
            )
        return self

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat_request(self, history: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """`history`: items of the conversation before."""
        is_text = isinstance(self.input, str)
        given = [{"role": "user", "content": self.input}] if is_text else self.input
        messages = messages_of(given, history)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        text, reasoning = self.text or TextOptions(), self.reasoning or ReasoningOptions()
        return parse_chat(
            {
                **{name: getattr(self, name) for name in _AS_IN_CHAT},
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
                "tool_choice": _chat_tool_choice(self.tool_choice),
                "response_format": _chat_format(text.format),
                "verbosity": text.verbosity,
                "reasoning_effort": reasoning.effort,
                "logprobs": self.has_logprobs,
            },
            NAMES,
        )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema lies one level deeper in a chat request."""
    if form is None or form.get("type") != "json_schema" or "json_schema" in form:
        return form
    schema = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
