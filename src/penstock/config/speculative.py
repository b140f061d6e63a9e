"""`speculative_config`: tokens that are drafted, and checked several at a time."""

from typing import Literal

from pydantic import model_validator

from penstock.config.base import StrictModel, setting

_NGRAM_FIELDS = ("max_matching_ngram_size", "is_keep_all", "is_use_oldest")
DRAFT_LENS = {"NGram": 4, "MTP": 1}  # where none is set


class SpeculativeConfig(StrictModel):
    decoding_type: Literal["NGram", "MTP", "AUTO"] = setting(
        "NGram",
        "Where drafts come from. NGram: what followed the last tokens when the same sequence held "
        "them before, for text that repeats its prompt or itself. MTP: the model's own MTP head, "
        "of DeepSeek-V3 and R1, GLM-4.5 and Qwen3-Next. AUTO: MTP if the model has such a head, "
        "else NGram. Tokens are the same with and without.",
        status="beta",
    )
    max_draft_len: int | None = setting(
        None,
        "Most tokens that are drafted for a step of a sequence; also called "
        "num_nextn_predict_layers. null: 4 with NGram, 1 with MTP.",
        status="beta",
        ge=1,
        le=32,
    )
    max_matching_ngram_size: int = setting(
        2,
        "NGram: most of the last tokens that are compared; the longest match counts, one token at "
        "least.",
        status="beta",
        ge=1,
        le=32,
    )
    is_keep_all: bool = setting(
        True, "NGram: false: only the newest of equally long matches is looked at.", status="beta"
    )
    is_use_oldest: bool = setting(
        True,
        "NGram: of equally long matches the oldest counts, behind which most tokens are known; "
        "false: the newest.",
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

    @model_validator(mode="after")
    def _fields_are_of_the_type(self) -> "SpeculativeConfig":
        if self.decoding_type == "MTP":
            for name in _NGRAM_FIELDS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to decoding_type NGram, not MTP")
        return self
