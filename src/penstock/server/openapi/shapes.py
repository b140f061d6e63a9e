"""Shapes of responses that no endpoint has a record for: they are written as JSON objects there."""

from typing import Any, Literal

import msgspec

from penstock.server.openai.models import ModelCard


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, kw_only=True):
    """`error` is what clients of OpenAI's API read; the rest what those of TensorRT-LLM do."""

    error: ErrorDetail
    object: str
    message: str
    type: str
    param: str | None
    code: int


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"]
    error: AnthropicErrorDetail


class Status(msgspec.Struct, kw_only=True):
    status: str


class ModelList(msgspec.Struct, kw_only=True):
    object: str
    data: list[ModelCard]


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class ServerSummary(msgspec.Struct, kw_only=True):
    server: str
    version: str
    model: str
    status: str
    running: int
    waiting: int
    links: list[str]


class Version(msgspec.Struct, kw_only=True):
    version: str
    model: str
    device: str
    limits: dict[str, int]
    default_sampling: dict[str, Any]
    config: dict[str, Any]
    choices: list[dict[str, str]]
    memory: dict[str, int]
    rank_weight_bytes: list[int]
    startup: list[dict[str, Any]]
