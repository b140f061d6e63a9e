"""`http_config`: limits and time-outs of the HTTP server."""

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.base import StrictModel, setting

HostName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9._-]+)$", max_length=255)]  # no port
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s,]+")


class HttpConfig(StrictModel):
    shutdown_timeout: float = setting(
        30.0,
        "Seconds that running requests may take to finish after SIGTERM, SIGINT or SIGHUP. What is "
        "left then ends with an error event or status 503. A second signal ends it at once.",
        ge=0.0,
        le=86400.0,
    )
    max_body_bytes: int | None = setting(
        None,
        "Largest body of a request; a larger one gets status 413. null: 8 MiB and 64 bytes for "
        "each token of `max_seq_len`, at most `max_body_bytes_in_flight`.",
        ge=1 << 10,
        le=1 << 31,
    )
    max_body_bytes_in_flight: int = setting(
        256 << 20,
        "Bytes of all bodies that are being received or decoded by one API server, without the "
        "first 64 KiB of each. A body that would exceed it gets status 429 with Retry-After.",
        ge=1 << 20,
        le=1 << 40,
    )

    files_dir: str | None = setting(
        None,
        "Folder of the files and batches of /v1/files and /v1/batches, with one folder for each "
        "served model name in it, of mode 0700. null: `files` in PENSTOCK_HOME.",
        min_length=1,
        max_length=4096,
    )
    max_file_bytes: int = setting(
        100 << 20,
        "Largest file that may be uploaded to /v1/files; a larger one gets status 413. 0: there "
        "are no files and no batches.",
        ge=0,
        le=1 << 34,
    )
    max_files: int = setting(
        100,
        "Most files of each API key that are kept, those with the results of batches among them; "
        "as many batches are kept, the oldest that have ended go first.",
        ge=1,
        le=100_000,
    )
    max_stored_bytes: int = setting(
        1 << 30,
        "Most bytes of each API key's files together. Over it no file and no batch is accepted; "
        "batches that run may write their results.",
        ge=1,
        le=1 << 44,
    )
    max_batch_concurrency: int | None = setting(
        None,
        "Most requests of batches that run at once; they wait for other requests besides. null: "
        "half of max_batch_size.",
        ge=1,
        le=1 << 16,
    )

    max_stored_responses: int = setting(
        1000,
        "Most responses of /v1/responses of each API key that are stored, for "
        "`previous_response_id`, `background` and GET; the oldest go first, and all of them when "
        "the server stops. 0: none are.",
        ge=0,
        le=1_000_000,
    )
    max_stored_response_bytes: int = setting(
        64 << 20,
        "Most bytes of each API key's stored responses together, with the conversations before "
        "them; the oldest go first.",
        ge=1 << 10,
        le=1 << 40,
    )

    keep_alive_timeout: float = setting(
        75.0,
        "Seconds that a connection without a request stays open. Longer than a balancer in front "
        "keeps its own: otherwise it may send on one that is being closed.",
        gt=0.0,
        le=86400.0,
    )
    head_timeout: float = setting(
        30.0,
        "Seconds from the first byte of a request line to the end of the headers; then status 408.",
        gt=0.0,
        le=86400.0,
    )
    body_timeout: float = setting(
        30.0,
        "Seconds that a request body may bring nothing; then status 408.",
        gt=0.0,
        le=86400.0,
    )
    min_body_rate: int = setting(
        240,
        "Bytes per second that a request body must bring on average once body_timeout has passed, "
        "else status 408. 0: no bound.",
        ge=0,
        le=1 << 30,
    )
    max_connections_per_address: int = setting(
        0,
        "Most connections from one address at a time, in each HTTP process; more get status 429. "
        "0: no bound. Behind a balancer all come from its address.",
        ge=0,
        le=1 << 20,
    )
    allowed_hosts: list[HostName] | None = setting(
        None,
        "Names that clients may call the server by (their Host header), beside IP addresses and "
        "localhost, which they always may. '*': any. null: any, but no others while it listens on "
        "loopback only, where a web page could otherwise reach it under a name of its own.",
        max_length=256,
    )
    access_log: bool = setting(
        True,
        "Log a line for each request when it has ended: method, path, status, duration, tokens, "
        "finish reason, id, client. No text. Health checks and metrics are logged at verbose.",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Web pages that browsers may let call this server (CORS): origins such as "
        "https://example.org, or * for all. Empty: only pages of the server itself.",
        max_length=256,
    )

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """One text of a flag holds several, separated by commas; YAML and JSON have lists."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        return tuple(value) if isinstance(value, list) else value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"'{origin}' is no origin; write scheme and host, and a port where there is "
                    "one, such as http://localhost:3000, or *"
                )
        return value

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_body_bytes is not None and self.max_body_bytes > self.max_body_bytes_in_flight:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, more than max_body_bytes_in_flight "
                f"({self.max_body_bytes_in_flight}): such a body could never be read; lower the "
                "one or raise the other"
            )
        return self
