"""The objects of `/v1/messages` as Anthropic's clients read them. Field order is key order."""

from typing import Any, Literal

import msgspec

from penstock.types.outputs import Usage as UsageCounts

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """`signature` is empty: reasoning is sent as it is, and read so when it comes back."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, counts: UsageCounts) -> "MessageUsage":
        return cls(
            input_tokens=counts.prompt_tokens - counts.cached_tokens,
            cache_read_input_tokens=counts.cached_tokens,
            output_tokens=counts.completion_tokens,
        )


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


# --- events ---------------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockTextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class BlockThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class BlockInputDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockInputDelta


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    pass


BlockEvent = BlockStart | BlockDelta | BlockStop
EVENTS: tuple[type[msgspec.Struct], ...] = (
    *(MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop),
)
