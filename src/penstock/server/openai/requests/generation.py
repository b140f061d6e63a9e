"""`GenerationFields`: what chat and completions share, with TensorRT-LLM's and vLLM's extras.

A field that is known but not built yet is refused when it asks for something.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.errors import RequestError
from penstock.server.openai.requests import structured
from penstock.server.openai.requests.lora import LoraChoice
from penstock.server.openai.requests.schema import (
    INT32_MAX,
    Count,
    Int32,
    Strict,
    Texts,
    TokenIds,
    at_most,
    shown,
    shown_as,
)
from penstock.server.openai.requests.structured import ResponseFormat, guided_decoding
from penstock.text.grammars.output_grammar import MAX_CHOICES
from penstock.types.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_OPTIONS = 64  # entries of an object of ours inside a body


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    Texts,
    at_most("stop", MAX_STOP_STRINGS),
    BeforeValidator(_as_list),
    shown_as(str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]),
]
StopIds = Annotated[
    TokenIds,
    at_most("stop_token_ids", MAX_STOP_TOKEN_IDS),
    shown_as(Annotated[list[Count], Field(max_length=MAX_STOP_TOKEN_IDS)]),
]
LogitBias = Annotated[
    dict[str, float],
    at_most("logit_bias", MAX_LOGIT_BIAS),
    shown_as(
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
        ]
    ),
]


AllowedIds = Annotated[
    TokenIds,
    at_most("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
    Field(min_length=1),
    shown_as(Annotated[list[Count], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]),
]
LogprobIds = Annotated[
    TokenIds,
    at_most("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
    Field(min_length=1),
    shown_as(Annotated[list[Count], Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]),
]
BadWords = Annotated[
    Texts,
    at_most("bad_words", MAX_BAD_WORDS),
    shown_as(Annotated[list[str], Field(max_length=MAX_BAD_WORDS)]),
]
Processors = Annotated[
    list[str | dict[str, Any]],
    at_most("logits_processors", MAX_LOGITS_PROCESSORS),
    shown_as(
        Annotated[list[str | dict[str, Any]], Field(max_length=MAX_LOGITS_PROCESSORS)],
    ),
]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _not_zero(value: int) -> int:
    if value == 0:
        raise RequestError(
            "invalid_value",
            "truncate_prompt_tokens is 0, it must be at least 1, or -1 for all that fit",
            "truncate_prompt_tokens",
        )
    return value


Truncation = Annotated[
    int,
    Field(ge=-1, le=INT32_MAX),
    AfterValidator(_not_zero),
    shown_as(Literal[-1] | Annotated[int, Field(ge=1, le=INT32_MAX)]),
]


class GenerationFields(Strict):
    NESTED: ClassVar[Mapping[str, type[Strict]]] = {
        "stream_options": StreamOptions,
        "lora_request": LoraChoice,
    }
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "top_p_min": "top_p decay is not supported",
        "prompt_ignore_length": "penalties always see the whole prompt",
        "return_context_logits": "logits are not returned; ask for prompt_logprobs",
        "disaggregated_params": "disaggregated serving is not supported",
        "conversation_params": "server-side conversations are not supported",
        "kv_transfer_params": "disaggregated serving is not supported",
        "vllm_xargs": "nothing reads it; logits_processors take arguments",
        "mm_processor_kwargs": "only text is supported",
        "repetition_detection": "outputs are not searched for repetition; set a penalty",
    }

    model: str | None = None
    max_tokens: Count | None = None
    n: Int32 = 1
    best_of: Int32 | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions, at_most("stream_options", MAX_OPTIONS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    logits_processors: Processors | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    thinking_token_budget: Count | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Truncation | None = None
    detokenize: bool = True
    echo: bool = False
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: LogprobIds | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = Field(default=None, pattern=r"^[\w.:-]{1,128}$")
    priority: Int32 = 0  # larger runs first
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Texts, at_most("guided_choice", MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "llguidance", "guidance", "xgrammar"] | None = None

    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Int32 | Literal["never"] = False
    top_p_min: float = 0.0
    prompt_ignore_length: int = 0
    return_context_logits: bool = False
    lora_request: Annotated[LoraChoice, at_most("lora_request", MAX_OPTIONS)] | None = None
    disaggregated_params: dict[str, Any] | None = None
    conversation_params: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    repetition_detection: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields, given = type(self).model_fields, self.model_fields_set
        for name, why in self.UNSUPPORTED.items():
            if name not in given:
                continue
            value = getattr(self, name)
            if value is not None and value != fields[name].default:
                raise RequestError("unsupported", f"{name} is {shown(value)}: {why}", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "invalid_value",
                "stream_options is only allowed with stream: true",
                "stream_options",
            )
        logprobs: bool | int | None = getattr(self, "logprobs", None)  # a number of completions
        if self.logprob_token_ids and (logprobs is None or logprobs is False):
            raise RequestError(
                "invalid_value",
                "logprob_token_ids needs logprobs, which are returned with these tokens",
                "logprob_token_ids",
            )
        if self.use_beam_search and self.stream:
            raise RequestError(
                "unsupported",
                "use_beam_search is true: the best outputs are known only at the end; leave out "
                "stream",
                "use_beam_search",
            )
        for name in ("length_penalty", "early_stopping"):
            if not self.use_beam_search and getattr(self, name) != fields[name].default:
                raise RequestError("invalid_value", f"{name} needs use_beam_search: true", name)
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

    def sampling(self, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
        """What was given, then the model's `defaults`, then those of `SamplingParams`.

        Whoever sets temperature 0 wants the likeliest tokens: no default changes which they are.
        """
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.logits_processors:
            given["logits_processors"] = _processors(self.logits_processors)
        given["guided_decoding"] = guided_decoding(
            {name: getattr(self, name) for name in structured.FIELDS}
        )
        given = given | changes
        if not isinstance(self.early_stopping, bool | str):  # TensorRT-LLM's numbers
            given["early_stopping"] = {0: False, 1: True}.get(self.early_stopping, "never")
        if given.get("temperature") == 0 or self.use_beam_search:
            defaults = {name: value for name, value in defaults.items() if name == "max_tokens"}
        if given["min_tokens"] > defaults.get("max_tokens", given["min_tokens"]):
            defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return SamplingParams(**{**defaults, **given})


_SAMPLING_FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "prompt_logprobs", "n", "best_of", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
    *("allowed_token_ids", "bad_words", "thinking_token_budget"),
    *("use_beam_search", "length_penalty", "early_stopping", "logprob_token_ids"),
)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > 10:
        raise RequestError(
            "invalid_value",
            f"logit_bias has the key {shown(key)}, it must be a token id",
            "logit_bias",
        )
    return int(key)


def _processors(asked: list[str | dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names, or vLLM's objects with a name and arguments -> arguments by name."""
    found: dict[str, dict[str, Any]] = {}
    for index, one in enumerate(asked):
        where = f"logits_processors[{index}]"
        given = {"qualname": one} if isinstance(one, str) else one
        name, kwargs = given.get("qualname"), given.get("kwargs") or {}
        if given.keys() - {"qualname", "kwargs"} or not isinstance(kwargs, dict):
            what = f"{where} is {shown(one)}: it must be a name, or have qualname and kwargs"
            raise RequestError("invalid_value", what, where)
        if not isinstance(name, str) or name in found:
            what = f"{where} is {shown(one)}: it names no processor, or one a second time"
            raise RequestError("invalid_value", what, where)
        found[name] = kwargs
    return found
