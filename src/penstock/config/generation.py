"""`override_generation_config`: sampling defaults of the server's operator."""

from penstock.config.base import StrictModel, setting


class GenerationOverrides(StrictModel):
    temperature: float | None = setting(
        None, "0: always the likeliest token. null: not overridden.", ge=0.0, le=100.0
    )
    top_p: float | None = setting(
        None, "Sample from the likeliest tokens of this total probability.", ge=0.0, le=1.0
    )
    top_k: int | None = setting(
        None, "Sample from so many likeliest tokens. 0 and -1: from all.", ge=-1, le=2**31 - 1
    )
    min_p: float | None = setting(
        None, "Drop tokens less likely than this share of the likeliest.", ge=0.0, le=1.0
    )
    repetition_penalty: float | None = setting(
        None, "Above 1: tokens of prompt and output become less likely.", ge=0.01, le=100.0
    )
    max_new_tokens: int | None = setting(
        None, "Most tokens of an output whose request sets no max_tokens.", ge=1, le=2**31 - 1
    )
