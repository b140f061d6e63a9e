"""What users write against, as text: flags, settings, Python names, metrics, routes and fields.

`python tests/architecture/public_surface.py` rewrites the files in `snapshots/`.
"""

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from pydantic import BaseModel

import penstock
from penstock.api.llm import PendingOutput
from penstock.cli.flags import add_serve_flags
from penstock.config.schema import EngineConfig
from penstock.metrics.collect import Metrics
from penstock.server.anthropic.requests import CountTokensRequest, MessagesRequest
from penstock.server.app import build_app
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.completions import CompletionRequest
from penstock.server.openai.requests.pooling import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.openai.requests.responses import ResponsesRequest
from penstock.server.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.types.outputs import CompletionOutput, TextDelta, TokenLogprob
from penstock.types.request import ChatOptions
from penstock.types.stats import EngineCounters

_RECORDS = (
    *(penstock.SamplingParams, ChatOptions, penstock.RequestOutput),
    *(CompletionOutput, TokenLogprob),
)
FOLDER = Path(__file__).parent / "snapshots"


def serve_flags() -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_flags(parser)
    for action in parser._actions:
        spellings = " ".join(action.option_strings) or str(action.metavar)
        takes = "" if action.nargs == 0 else f" <{getattr(action.type, '__name__', 'str')}>"
        yield f"{spellings}{takes} -> {action.dest}"


def settings(model: type[BaseModel] = EngineConfig, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        if isinstance(info.default, BaseModel):
            yield from settings(type(info.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(info.default)}"


def python_api() -> Iterator[str]:
    yield "penstock: " + ", ".join(sorted(penstock.__all__))
    yield f"LLM{_parameters(penstock.LLM)}"
    for kind in (penstock.LLM, PendingOutput):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}{_parameters(member)}"
    for record in _RECORDS:
        for field in fields(record):
            yield f"{record.__name__}.{field.name}{_default(field)}"
    for field in msgspec.structs.fields(TextDelta):
        shown = "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"
        yield f"TextDelta.{field.name}{shown}"


def metrics() -> Iterator[str]:
    measured = Metrics("m", EngineCounters, list)
    yield from sorted(f"{family.name} {family.type}" for family in measured.registry.collect())


def http_api() -> Iterator[str]:
    info = SimpleNamespace(max_seq_len=1)
    client = SimpleNamespace(counters=None, drain_iterations=None, info=info)
    app = build_app(SimpleNamespace(client=client, tokenizer=None), EngineConfig())
    for route in app.routes:
        yield f"{' '.join(sorted(route.methods - {'HEAD'}))} {route.path}"
    for path, schema in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/embeddings", EmbeddingRequest),
        ("/v1/score", ScoreRequest),
        ("/v1/rerank", RerankRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ):
        for name, info in sorted(schema.model_fields.items()):
            yield f"{path}: {name}{'' if info.is_required() else f' = {json.dumps(info.default)}'}"


SNAPSHOTS = {
    "serve_flags.txt": serve_flags,
    "settings.txt": settings,
    "python_api.txt": python_api,
    "metrics.txt": metrics,
    "http_api.txt": http_api,
}


def _parameters(function: Any) -> str:
    signature = inspect.signature(function)
    bare = [
        one.replace(annotation=inspect.Parameter.empty)
        for name, one in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _default(field: "Field[Any]") -> str:
    if field.default is not MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is MISSING else f" = {field.default_factory()!r}"


if __name__ == "__main__":
    for name, render in SNAPSHOTS.items():
        (FOLDER / name).write_text("\n".join(render()) + "\n", encoding="utf-8")
