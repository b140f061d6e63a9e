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
    "eagle3_layers_to_capture": ("Eagle3", "SaveState"),
    "use_relaxed_acceptance_for_thinking": ("MTP",),
    "relaxed_topk": ("MTP",),
    "relaxed_delta": ("MTP",),
    "begin_thinking_phase_token": ("MTP",),
    "end_thinking_phase_token": ("MTP",),
    "greedy_sampling": ("Eagle3",),
    "posterior_threshold": ("Eagle3",),
    "drafter": ("User_Provided",),
    "output_directory": ("SaveState",),
    "write_interval": ("SaveState",),
    "file_prefix": ("SaveState",),
}
_NEEDED_FIELDS = {
    "Draft_Target": ("speculative_model", "a folder or a name"),
    "Eagle3": ("speculative_model", "a folder or a name"),
    "User_Provided": ("drafter", "the name of an entry point"),
    "SaveState": ("output_directory", "where files of hidden states go"),
}
DRAFT_LENS = {  # where none is set
    "NGram": 4,
    "MTP": 1,
    "Draft_Target": 4,
    "Eagle3": 3,
    "User_Provided": 4,
}
FINAL_STATE = -1  # as a layer: hidden states behind the final norm


class SpeculativeConfig(StrictModel):
    decoding_type: Literal[
        "NGram", "MTP", "Draft_Target", "Eagle3", "AUTO", "User_Provided", "SaveState"
    ] = setting(
        "NGram",
        "Where drafts come from. NGram: what followed the last tokens when the same sequence held "
        "them before, for text that repeats its prompt or itself. MTP: the model's own MTP head, "
        "of DeepSeek-V3 and R1, GLM-4.5 and Qwen3-Next. Draft_Target: a small model of the same "
        "vocabulary. Eagle3: a head in a folder of its own, trained for the model. AUTO: MTP if "
        "the model has such a head, else NGram. User_Provided: an entry point of an installed "
        "package. SaveState: nothing is drafted; hidden states of prompts are saved, to train a "
        "head with. Tokens are the same with and without.",
        status="beta",
    )
    max_draft_len: int | None = setting(
        None,
        "Most tokens that are drafted for a step of a sequence; also called "
        "num_nextn_predict_layers. null: 3 with Eagle3, 1 with MTP, else 4.",
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
    eagle3_layers_to_capture: list[Annotated[int, Field(ge=-1, le=4096)]] | None = setting(
        None,
        "Behind which layers hidden states are read. Eagle3: three, as the head was trained. "
        "SaveState: any; -1 stands for the final norm, behind which they are always saved. null: "
        "behind the second one, the middle one and the fourth to last.",
        status="beta",
        min_length=1,
        max_length=64,
    )
    drafter: str | None = setting(
        None,
        "User_Provided: name of the entry point (penstock.drafters) of an installed package. It "
        "runs inside the engine.",
        status="prototype",
        min_length=1,
        max_length=256,
    )
    output_directory: str | None = setting(
        None,
        "SaveState: folder for the files, made if it is not there.",
        status="prototype",
        min_length=1,
        max_length=4096,
    )
    write_interval: int = setting(
        20, "SaveState: prompts of a file.", status="prototype", ge=1, le=2**20
    )
    file_prefix: str = setting(
        "data",
        "SaveState: files are named <file_prefix>_<number of their last prompt>.safetensors.",
        status="prototype",
        pattern=r"^[\w.-]{1,128}$",
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
        name, what = _NEEDED_FIELDS.get(kind, ("decoding_type", ""))
        if getattr(self, name) is None:
            article = "an" if name[0] in "aeiou" else "a"
            raise ValueError(f"decoding_type {kind} needs {article} {name}: {what}")
        if kind == "SaveState" and self.max_draft_len is not None:
            raise ValueError(
                "with decoding_type SaveState nothing is drafted; remove max_draft_len"
            )
        layers = self.eagle3_layers_to_capture
        if kind == "Eagle3" and layers is not None and (len(layers) != 3 or min(layers) < 0):
            raise ValueError(
                "an Eagle3 head reads three layers; give eagle3_layers_to_capture three"
            )
        if self.greedy_sampling != (self.posterior_threshold is None):
            raise ValueError("greedy_sampling: false and posterior_threshold belong together")
        if not self.use_relaxed_acceptance_for_thinking and (
            self.relaxed_topk > 1 or self.relaxed_delta
        ):
            raise ValueError(
                "relaxed_topk and relaxed_delta need use_relaxed_acceptance_for_thinking: true"
            )
        return self
