"""Response shapes of the OpenAI endpoints. Field order is key order; newer fields come last.

Whole replies print their nulls, as TensorRT-LLM's do; chat chunks leave them out.
"""

import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.types.outputs import Usage as UsageCounts


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, counts: UsageCounts) -> "Usage":
        return cls(
            prompt_tokens=counts.prompt_tokens,
            total_tokens=counts.total_tokens,
            completion_tokens=counts.completion_tokens,
            prompt_tokens_details=PromptDetails(counts.cached_tokens),
        )


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    context_logits: None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    disaggregated_params: None = None
    avg_decoded_tokens_per_iter: float | None = None
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole response, and also one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_token_ids: None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class Function(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    mm_embedding_handle: None = None
    disaggregated_params: None = None
    avg_decoded_tokens_per_iter: float | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallChunk(msgspec.Struct, kw_only=True):
    """The first one of a call has id, type and name; the rest are pieces of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    avg_decoded_tokens_per_iter: float | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
