"""`access_config`: who may ask, what a key may have, and who shares prefixes with whom."""

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.base import StrictModel, setting


class AccessConfig(StrictModel):
    api_keys_file: str | None = setting(
        None,
        "YAML or JSON file of names and keys, each with settings of its own: docs/security.md. "
        "null: api_key alone, or no check where that is null, too.",
        min_length=1,
        max_length=4096,
    )
    prefix_sharing: Literal["key", "open"] = setting(
        "key",
        "key: the cached prefix of a prompt is reused only by requests of the same key (or of its "
        "cache_group). open: by everybody, which is faster where keys have long prompts in common, "
        "and lets each of them find out by trial what the others have sent, a block at a time; "
        "enable_partial_reuse is off then. Without keys all clients are one.",
    )
    cache_salt_secret: str | None = Field(
        default=None,
        description="Secret from which the scope of each key's prefixes is derived, the same on "
        "all servers of a group. null: drawn at every start. Never shown, and not passed on to the "
        "engine process.",
        min_length=16,
        max_length=4096,
        repr=False,
        exclude=True,
        json_schema_extra={"status": "stable"},
    )
    cache_salt_secret_file: str | None = setting(
        None, "File that holds this secret instead.", min_length=1, max_length=4096
    )
    allow_priority: bool = setting(
        False,
        "Take a priority above 0 from requests without a key and from those with api_key. Keys of "
        "the file say it for themselves. Without it such a request is refused.",
    )
    max_request_share: float = setting(
        0.25,
        "Share of max_queued_requests and of max_queued_tokens that the prompts and samples of one "
        "HTTP request may take together; more is refused with status 400.",
        gt=0.0,
        le=1.0,
    )
    reserved_share: float = setting(
        0.125,
        "Share of max_queued_requests and of max_queued_tokens that is kept for keys that hold "
        "less than their part of it, divided by weight; other keys get status 429 before they take "
        "it. Not used with fewer than two keys.",
        ge=0.0,
        le=1.0,
    )

    @model_validator(mode="after")
    def _one_secret(self) -> "AccessConfig":
        if self.cache_salt_secret is not None and self.cache_salt_secret_file is not None:
            raise ValueError("give cache_salt_secret or cache_salt_secret_file, not both")
        return self
