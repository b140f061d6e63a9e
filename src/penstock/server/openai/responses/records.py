"""The objects of `/v1/responses` as clients of OpenAI's API read them, the events that tell of one,
and what is kept of it. Field order is key order.
"""

import uuid
from typing import Any, Literal

import msgspec

from penstock.server.openai.reply import ChatTokenLogprob
from penstock.types.outputs import Usage as UsageCounts

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
OPEN_STATUSES = frozenset(("queued", "in_progress"))


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """`summary` is empty: reasoning is told as it is."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: UsageCounts, num_reasoning_tokens: int) -> "ResponseUsage":
        return cls(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning_tokens),
            total_tokens=counts.total_tokens,
        )


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class ReasoningEcho(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextEcho(msgspec.Struct, kw_only=True):
    format: dict[str, Any]
    verbosity: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningEcho
    service_tier: str | None = None
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str]

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredResponse(msgspec.Struct, kw_only=True):
    """`input`: the whole conversation that it was made from. `runner`: of the process in which it
    runs in the background."""

    response: ResponseObject
    input: list[dict[str, Any]]
    runner: str = ""


# --- events ---------------------------------------------------------------------------------------


class ResponseCreated(msgspec.Struct, kw_only=True, tag_field="type", tag="response.created"):
    sequence_number: int
    response: ResponseObject


class ResponseInProgress(
    msgspec.Struct, kw_only=True, tag_field="type", tag="response.in_progress"
):
    sequence_number: int
    response: ResponseObject


class ResponseCompleted(msgspec.Struct, kw_only=True, tag_field="type", tag="response.completed"):
    sequence_number: int
    response: ResponseObject


class ResponseIncomplete(msgspec.Struct, kw_only=True, tag_field="type", tag="response.incomplete"):
    sequence_number: int
    response: ResponseObject


class ResponseFailed(msgspec.Struct, kw_only=True, tag_field="type", tag="response.failed"):
    sequence_number: int
    response: ResponseObject


class ItemAdded(msgspec.Struct, kw_only=True, tag_field="type", tag="response.output_item.added"):
    sequence_number: int
    output_index: int
    item: OutputItem


class ItemDone(msgspec.Struct, kw_only=True, tag_field="type", tag="response.output_item.done"):
    sequence_number: int
    output_index: int
    item: OutputItem


class PartAdded(msgspec.Struct, kw_only=True, tag_field="type", tag="response.content_part.added"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(msgspec.Struct, kw_only=True, tag_field="type", tag="response.content_part.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(
    msgspec.Struct, kw_only=True, tag_field="type", tag="response.output_text.delta"
):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(
    msgspec.Struct, kw_only=True, tag_field="type", tag="response.output_text.done"
):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(
    msgspec.Struct, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"
):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningTextDone(
    msgspec.Struct, kw_only=True, tag_field="type", tag="response.reasoning_text.done"
):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(
    msgspec.Struct,
    kw_only=True,
    tag_field="type",
    tag="response.function_call_arguments.delta",
):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(
    msgspec.Struct,
    kw_only=True,
    tag_field="type",
    tag="response.function_call_arguments.done",
):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


OutputEvent = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
LifecycleEvent = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
)
EVENTS: tuple[type[msgspec.Struct], ...] = (
    *(ResponseCreated, ResponseInProgress, ItemAdded, PartAdded, ReasoningTextDelta),
    *(ReasoningTextDone, OutputTextDelta, OutputTextDone, ArgumentsDelta, ArgumentsDone),
    *(PartDone, ItemDone, ResponseCompleted, ResponseIncomplete, ResponseFailed),
)
