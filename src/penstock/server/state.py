"""What every endpoint needs: handed to `build_app` once, read from `request.app.state`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from penstock.config.schema import EngineConfig
from penstock.frontend.pipeline import GenerationPipeline
from penstock.hub.gguf import is_gguf
from penstock.metrics.collect import Metrics
from penstock.server.board import Board
from penstock.server.openai.logprobs import TokenNames

Choice = tuple[str, str, str]  # setting, value, reason


@dataclass(frozen=True, slots=True)
class ServerState:
    pipeline: GenerationPipeline
    model_name: str
    metrics: Metrics
    names: TokenNames
    choices: Sequence[Choice] = ()
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # to begin with a request
    created: int = field(default_factory=lambda: int(time.time()))


def server_state(
    pipeline: GenerationPipeline,
    config: EngineConfig,
    board: Board | None,
    choices: Sequence[Choice],
) -> ServerState:
    name, client = model_name(config), pipeline.client
    metrics = Metrics(
        name,
        lambda: client.counters,
        client.drain_iterations,
        config.max_stats_len,
        rows=None if board is None else board.metrics,
        own=0 if board is None else board.own,
    )
    return ServerState(pipeline, name, metrics, TokenNames(pipeline.tokenizer), choices)


def model_name(config: EngineConfig) -> str:
    """The served name, else the name or id asked for, else the last part of a local path."""
    if config.served_model_name is not None:
        return config.served_model_name
    path = Path(config.model).expanduser()
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else config.model


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
