"""`speculative_config`: tokens that are drafted, and checked several at a time."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.config.base import StrictModel, setting

_OWN_FIELDS = {  # what one decoding type has alone
    "max_matching_ngram_size": ("NGram", "AUTO"),
    "is_keep_all": ("NGram", "AUTO"),
    "is_use_oldest": ("NGram", "AUTO"),
    "speculative_model": ("Draft_Target", "Eagle3"),
    "quantization": ("Draft_Target", "Eagle3"),
    "eagle3_layers_to_capture": ("Eagle3",),
    "use_relaxed_acceptance_for_thinking": ("MTP",),
    "relaxed_topk": ("MTP",),
    "relaxed_delta": ("MTP",),
    "begin_thinking_phase_token": ("MTP",),
    "end_thinking_phase_token": ("MTP",),
    "greedy_sampling": ("Eagle3",),
    "posterior_threshold": ("Eagle3",),
}
DRAFT_LENS = {"NGram": 4, "MTP": 1, "Draft_Target": 4, "Eagle3": 3}  # where none is set


class SpeculativeConfig(StrictModel):
    decoding_type: Literal["NGram", "MTP", "Draft_Target", "Eagle3", "AUTO"] = setting(
        "NGram",
        "Where drafts come from. NGram: what followed the last tokens when the same sequence held "
        "them before, for text that repeats its prompt or itself. MTP: the model's own MTP head, "
        "of DeepSeek-V3 and R1, GLM-4.5 and Qwen3-Next. Draft_Target: a small model of the same "
        "vocabulary. Eagle3: a head in a folder of its own, trained for the model. AUTO: MTP if "
        "the model has such a head, else NGram. Tokens are the same with and without.",
        status="beta",
    )
    max_draft_len: int | None = setting(
        None,
        "Most tokens that are drafted for a step of a sequence; also called "
        "num_nextn_predict_layers. null: 4 with NGram and Draft_Target, 3 with Eagle3, 1 with MTP.",
        status="beta",
        ge=1,
        le=32,
    )
    speculative_model: str | None = setting(
        None,
        "Draft_Target: the small model; Eagle3: the folder of the head. As `model` is named.",
        status="beta",
        min_length=1,
        max_length=4096,
    )
    quantization: Literal["fp8", "fp8_block", "int8", "nf4"] | None = setting(
        None,
        "Draft_Target, Eagle3: quantize the plain weights of what drafts while they are loaded, as "
        "`quantization` does the model's. Drafting takes less time and drafts are a little worse; "
        "the output stays the same. null: as its checkpoint is.",
        status="beta",
    )
    eagle3_layers_to_capture: list[Annotated[int, Field(ge=0, le=4096)]] | None = setting(
        None,
        "Eagle3: behind which layers hidden states are read, as the head was trained. null: behind "
        "the second one, the middle one and the fourth to last.",
        status="beta",
        min_length=3,
        max_length=3,
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
    use_relaxed_acceptance_for_thinking: bool = setting(
        False,
        "MTP: while a sequence thinks, a draft counts, too, that is nearly as likely as the "
        "likeliest token (relaxed_topk, relaxed_delta). More drafts count; output may differ from "
        "that without drafts.",
        status="beta",
    )
    relaxed_topk: int = setting(
        1, "How many of the likeliest tokens a draft may be of.", status="beta", ge=1, le=1024
    )
    relaxed_delta: float = setting(
        0.0,
        "How much less probable than the likeliest token a draft may be.",
        status="beta",
        ge=0.0,
        le=1.0,
    )
    begin_thinking_phase_token: int = setting(
        128798, "Token that begins the thinking; DeepSeek-R1's.", status="beta", ge=0, le=2**31 - 1
    )
    end_thinking_phase_token: int = setting(
        128799, "Token that ends the thinking; DeepSeek-R1's.", status="beta", ge=0, le=2**31 - 1
    )
    greedy_sampling: bool = setting(
        True,
        "Eagle3: false: typical acceptance, by posterior_threshold. Output may differ from that "
        "without drafts.",
        status="beta",
    )
    posterior_threshold: float | None = setting(
        None,
        "Eagle3 with greedy_sampling false: a draft counts if it is more probable than this, or "
        "than its root times exp(-entropy) where that is less.",
        status="beta",
        gt=0.0,
        le=1.0,
    )
    max_concurrency: int | None = setting(
        None,
        "Nothing is drafted in steps that decode more sequences than this: many keep the device "
        "busy by themselves. null: no limit.",
        status="beta",
        ge=1,
        le=2**20,
    )

    adaptive_draft_len: bool = setting(
        True,
        "Draft as many tokens as give most output per second, none where drafting loses: by the "
        "time of steps, measured at start, and by what was accepted lately. false: always "
        "max_draft_len.",
        status="beta",
    )

    @model_validator(mode="after")
    def _fields_are_of_the_type(self) -> "SpeculativeConfig":
        kind = self.decoding_type
        for name, kinds in _OWN_FIELDS.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and kind not in kinds:
                raise ValueError(f"{name} belongs to decoding_type {kinds[0]}, not {kind}")
        if kind in _OWN_FIELDS["speculative_model"] and self.speculative_model is None:
            raise ValueError(f"decoding_type {kind} needs a speculative_model: a folder or a name")
        if self.greedy_sampling != (self.posterior_threshold is None):
            raise ValueError("greedy_sampling: false and posterior_threshold belong together")
        if not self.use_relaxed_acceptance_for_thinking and (
            self.relaxed_topk > 1 or self.relaxed_delta
        ):
            raise ValueError(
                "relaxed_topk and relaxed_delta need use_relaxed_acceptance_for_thinking: true"
            )
        return self
