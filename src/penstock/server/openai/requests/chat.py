"""Request schemas of the OpenAI endpoints with TensorRT-LLM's and vLLM's extensions.

Strict: a wrong type is refused, an unknown field is refused with the nearest known name, and a
field that is known but not built yet is refused when it asks for something. Every refusal is a
`RequestError`.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from penstock.errors import RequestError
from penstock.types.request import ChatOptions, GenerateInput
from penstock.types.sampling import SamplingParams

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
_MAX_SHOWN = 80  # characters of a wrong value repeated in an error
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INT32_MAX = 2**31 - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int32 = Annotated[int, Field(ge=-(2**31), le=_INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=_INT32_MAX)]
TokenIds = list[Count]
Stop = Annotated[list[str], BeforeValidator(_as_list)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(Strict):
    """What both endpoints share."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "use_beam_search": "beam search is not supported",
        "length_penalty": "it only means something in a beam search, which is not supported",
        "early_stopping": "it only means something in a beam search, which is not supported",
        "top_p_min": "top_p decay is not supported",
        "prompt_ignore_length": "penalties always see the whole prompt",
        "return_context_logits": "logits are not returned; ask for prompt_logprobs",
        "response_format": 'only {"type": "text"} is supported',
        "lora_request": "adapters are not supported",
        "disaggregated_params": "disaggregated serving is not supported",
        "conversation_params": "server-side conversations are not supported",
        "thinking_token_budget": "a thinking budget is not supported",
    }

    model: str | None = None
    max_tokens: Count | None = None
    n: Int32 = 1
    best_of: Int32 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    detokenize: bool = True
    echo: bool = False
    prompt_logprobs: Int32 | None = None
    priority: Int32 = 0  # larger runs first
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | int = False
    top_p_min: float = 0.0
    prompt_ignore_length: int = 0
    return_context_logits: bool = False
    response_format: dict[str, Any] | None = None
    lora_request: dict[str, Any] | None = None
    disaggregated_params: dict[str, Any] | None = None
    conversation_params: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        for name, why in self.UNSUPPORTED.items():
            value = getattr(self, name)
            if name == "response_format" and value == {"type": "text"}:
                continue
            if value is not None and value != fields[name].default:
                raise RequestError("unsupported", f"{name} is {_shown(value)}: {why}", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "invalid_value",
                "stream_options is only allowed with stream: true",
                "stream_options",
            )
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise RequestError(
                "unsupported",
                f"best_of is {self.best_of} and n is {self.n}: the best samples are known only at "
                "the end; leave out stream, or set best_of to n",
                "best_of",
            )
        return self

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def streams_usage_always(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, **changes: Any) -> SamplingParams:
        """What was given; the rest keeps the defaults of `SamplingParams`."""
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**(given | changes))


_SAMPLING_FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "prompt_logprobs", "n", "best_of", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > 10:
        raise RequestError(
            "invalid_value",
            f"logit_bias has the key {_shown(key)}, it must be a token id",
            "logit_bias",
        )
    return int(key)


def _prompts(value: Any) -> Any:
    """str | [str] | [int] | [[int]] -> a list of texts or id lists, checked."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise _bad_prompt(f"it is {_shown(value)}")
    if not value:
        raise _bad_prompt("it is empty")
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            "invalid_value",
            f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS} may come in one request",
            "prompt",
        )
    for index, prompt in enumerate(value):
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
            raise _bad_prompt(f"prompt[{index}] is {_shown(prompt)}")
        if min(prompt) < 0 or max(prompt) > _INT32_MAX:
            raise _bad_prompt(f"prompt[{index}] holds a number that is no token id")
    return value


def _bad_prompt(what: str) -> RequestError:
    return RequestError(
        "invalid_type",
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists; "
        f"{what}",
        "prompt",
    )


class CompletionRequest(GenerationFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationFields.UNSUPPORTED,
        "suffix": "filling in the middle is not supported; put the model's markers in the prompt",
    }

    prompt: Annotated[list[str | TokenIds], PlainValidator(_prompts)]
    logprobs: Int32 | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "invalid_value",
                "max_tokens is 0, it must be at least 1 unless echo is true",
                "max_tokens",
            )
        return self

    @property
    def echo_only(self) -> bool:
        """Score the prompt, generate nothing."""
        return self.max_tokens == 0

    def inputs(self) -> list[GenerateInput]:
        changes: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo_only:
            changes |= {"max_tokens": 1, "min_tokens": 0}  # a step samples one; it is dropped
        if self.echo and self.logprobs is not None:
            changes["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        sampling = self.sampling(**changes)
        return [
            GenerateInput(
                text=prompt if isinstance(prompt, str) else None,
                token_ids=tuple(prompt) if isinstance(prompt, list) else None,
                sampling=sampling,
                add_special_tokens=self.add_special_tokens,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
            for prompt in self.prompt
        ]


def _messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise RequestError(
            "invalid_type",
            f"messages must be a list with at least one message, it is {_shown(value)}",
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
            "invalid_type", f"{where} must be an object, it is {_shown(message)}", where
        )
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            "invalid_value",
            f"{where}.role is {_shown(role)}, it must be one of {', '.join(_ROLES)}",
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
            f"{where}.content must be a text or a list of parts, it is {_shown(content)}",
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
            "invalid_type", f"{where} must be an object with a type, it is {_shown(part)}", where
        )
    if kind != "text":
        raise RequestError(
            "unsupported", f"{where}.type is {_shown(kind)}: only text parts are supported", where
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(
            "invalid_type", f"{where}.text must be a text, it is {_shown(part.get('text'))}", where
        )


def _tools(value: Any) -> Any:
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise RequestError(
                "invalid_value",
                f"tools[{index}] is {_shown(tool)}: it must be "
                '{"type": "function", "function": {...}}',
                f"tools[{index}]",
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(
                "missing_field",
                f"tools[{index}].function.name is {_shown(name)}, it must be a text",
                f"tools[{index}].function.name",
            )
    return value


Messages = Annotated[list[dict[str, Any]], BeforeValidator(_messages)]
Tools = Annotated[list[dict[str, Any]], BeforeValidator(_tools), Field(max_length=1024)]


class ChatRequest(GenerationFields):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationFields.UNSUPPORTED,
        "chat_template": "a request may not bring its own template; start the server with one",
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
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_token_ids: TokenIds | None = Field(default=None, min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=1024)
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    agent_hierarchy: Any = None
    modalities: list[str] | None = None
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
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "unsupported",
                f"tool_choice is {_shown(self.tool_choice)}: a model cannot be made to call a "
                "tool yet; only none and auto are supported",
                "tool_choice",
            )
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
        return self

    def chat_input(self) -> GenerateInput:
        changes: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        ids = self.prompt_token_ids
        return GenerateInput(
            token_ids=None if ids is None else tuple(ids),
            messages=tuple(self.messages) if ids is None else None,
            chat=self.chat_options(),
            parse_answer=True,
            sampling=self.sampling(**changes),
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def chat_options(self) -> ChatOptions:
        template_kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatOptions(
            # Continuing the last message and opening a new one exclude each other.
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            template_kwargs=template_kwargs,
            tools=() if self.tool_choice == "none" else tuple(self.tools or ()),
            documents=tuple(self.documents or ()),
        )


class TokenizeRequest(Strict):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # null: as for generating
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("missing_field", "give one of prompt and messages", "prompt")
        return self

    def prompt_input(self) -> GenerateInput:
        is_text = self.prompt is not None
        special = is_text if self.add_special_tokens is None else self.add_special_tokens
        return GenerateInput(
            text=self.prompt,
            messages=None if self.messages is None else tuple(self.messages),
            chat=ChatOptions(
                add_generation_prompt=self.add_generation_prompt
                and not self.continue_final_message,
                continue_final_message=self.continue_final_message,
                template_kwargs=self.chat_template_kwargs or {},
                tools=tuple(self.tools or ()),
            ),
            add_special_tokens=special,
        )


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


M = TypeVar("M", bound=Strict)


def parse(schema: type[M], body: Any) -> M:
    """A null stands for a field that is not given."""
    if not isinstance(body, dict):
        raise RequestError("invalid_type", f"the body must be a JSON object, it is {_shown(body)}")
    known = schema.model_fields
    given = {name: value for name, value in body.items() if value is not None or name not in known}
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _request_error(schema, error) from None


def _request_error(schema: type[Strict], error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    where, kind = _path(first["loc"]), first["type"]
    if kind == "extra_forbidden":
        known = list(schema.model_fields)
        if len(first["loc"]) > 1:
            known = list(StreamOptions.model_fields)
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return RequestError("unknown_field", f"unknown field '{where}'{hint}", where)
    if kind == "missing":
        return RequestError("missing_field", f"the field '{where}' is missing", where)
    said = first["msg"][0].lower() + first["msg"][1:]
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return RequestError(code, f"{where} is {_shown(first['input'])}: {said}", where)


def _path(loc: tuple[int | str, ...]) -> str:
    """("stop", 0) -> "stop[0]"."""
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc]
    return "".join(parts).removeprefix(".")[:_MAX_SHOWN]


def _shown(value: Any) -> str:
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
