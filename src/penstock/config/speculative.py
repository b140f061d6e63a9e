"""`speculative_config`: tokens that are drafted, and checked several at a time."""

from typing import Literal

from penstock.config.base import StrictModel, setting


class SpeculativeConfig(StrictModel):
    decoding_type: Literal["NGram"] = setting(
        "NGram",
        "Where drafts come from. NGram: what followed the last tokens when the same sequence held "
        "them before, for text that repeats its prompt or itself. Other decoding types are ignored "
        "with a warning: tokens are the same without them.",
        status="beta",
    )
    max_draft_len: int = setting(
        4, "Most tokens that are drafted for a step of a sequence.", status="beta", ge=1, le=32
    )
    max_matching_ngram_size: int = setting(
        2,
        "Most of the last tokens that are compared; the longest match counts, one token at least.",
        status="beta",
        ge=1,
        le=32,
    )
    is_keep_all: bool = setting(
        True, "false: only the newest of equally long matches is looked at.", status="beta"
    )
    is_use_oldest: bool = setting(
        True,
        "Of equally long matches the oldest counts, behind which most tokens are known; false: the "
        "newest.",
        status="beta",
    )
    max_concurrency: int | None = setting(
        None,
        "Nothing is drafted in steps that decode more sequences than this: many keep the device "
        "busy by themselves. null: no limit.",
        status="beta",
        ge=1,
        le=2**20,
    )
