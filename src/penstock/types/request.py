"""What a user asks (`GenerateInput`) and what the engine is asked (`Request`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from penstock.types.adapter import Adapter
from penstock.types.pooling import Pooling
from penstock.types.sampling import SamplingParams
from penstock.types.step import Int32s
from penstock.types.tenant import ANONYMOUS, Tenant


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    template: str | None = None  # instead of the model's


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRule:
    """A tool must be called, one of these; a tool that was named is called once."""

    names: tuple[str, ...]
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One prompt from a user: exactly one of `text`, `token_ids`, `messages` is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    suffix: str | None = None  # the output stands between text or ids and this
    chat: ChatOptions = ChatOptions()
    parse_output: bool = False  # take reasoning and tool calls out of the text
    tool_rule: ToolRule | None = None  # None: the model decides
    parallel_tool_calls: bool = True
    sampling: SamplingParams = SamplingParams()
    pooling: Pooling | None = None  # instead of output
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: Adapter | None = None
    tenant: Tenant = ANONYMOUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must match, in llguidance's notation, checked before it is sent.

    `min_tokens` is kept here and not in the sampling parameters: where the grammar allows nothing
    but the end, the output ends.
    """

    text: str
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many tokens an output may reason, and by which ids reasoning is known."""

    num_tokens: int
    opening: tuple[int, ...]  # one after the other they begin it
    closing: tuple[int, ...]  # each of them ends it
    ending: tuple[int, ...]  # written where the budget is used up
    not_next: int | None = None  # may not come behind that
    is_open: bool = False  # the prompt has begun it
    may_reopen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence for the engine: ids only, already checked against the limits.

    `id` is unique over all API servers (see `request_id`). `stop_ids` end the sequence: the last
    token of its deltas is then one of them, which `frontend` leaves out of the text. They hold
    the model's EOS unless `ignore_eos`. `max_tokens` is always set.
    """

    id: int
    # Any integers when it is made. Kept and sent as an array: 4 bytes each, a tuple takes 40.
    prompt_ids: Int32s = field(compare=False)
    sampling: SamplingParams
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    tenant: int = 0  # whose it is; the queue is fair between tenants
    weight: float = 1.0  # of the tenant: its share against others that wait
    priority: int = 0  # larger runs first, among those of its tenant
    cache_keys: tuple[
        str, ...
    ] = ()  # prefix blocks are shared only between equal keys (salt, adapter, ...)
    stream_interval: int = 1  # output tokens per delta; the first one is reported at once
    late_inputs: bool = False  # its sampling depends on what the commit before it finds
    grammar: Grammar | None = None  # which outputs it may have; then late_inputs is set
    thinking: ThinkingBudget | None = None  # then late_inputs is set
    pooling: Pooling | None = None  # wanted of its last position; then max_tokens is 1
    adapter: Adapter | None = None  # then it is among the cache_keys
    leader: int | None = (
        None  # id of the sample of the same prompt whose prefix this one waits to share
    )

    @property
    def has_followers(self) -> bool:
        """Whether followers want to know when it ends."""
        return self.late_inputs or self.adapter is not None

    @property
    def takes_drafts(self) -> bool:
        """Processors of other packages see each token before the next one is drawn."""
        return not self.sampling.logits_processors

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_ids, np.ndarray):
            object.__setattr__(self, "prompt_ids", np.array(self.prompt_ids, np.int32))


_CLIENT_SHIFT = 40


def request_id(client_id: int, serial: int) -> int:
    return client_id << _CLIENT_SHIFT | serial


def client_of(request_id: int) -> int:
    return request_id >> _CLIENT_SHIFT
