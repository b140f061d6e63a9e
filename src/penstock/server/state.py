"""What every endpoint needs: handed to `build_app` once, read from `request.app.state`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from penstock.config.schema import EngineConfig
from penstock.frontend.pipeline import GenerationPipeline
from penstock.hub.gguf_file import is_gguf
from penstock.metrics.collect import Metrics
from penstock.server.adapter_registry import AdapterRegistry
from penstock.server.body_limits import Bodies
from penstock.server.openai.logprobs import TokenNames
from penstock.server.shared_state import SharedState
from penstock.types.setting_choice import SettingChoice


@dataclass(frozen=True, slots=True)
class ServerState:
    pipeline: GenerationPipeline
    model_name: str
    metrics: Metrics
    names: TokenNames
    bodies: Bodies
    adapters: AdapterRegistry
    choices: Sequence[SettingChoice] = ()
    has_key: bool = False  # clients must send one
    created: int = field(default_factory=lambda: int(time.time()))


def server_state(
    pipeline: GenerationPipeline,
    config: EngineConfig,
    shared: SharedState | None,
    choices: Sequence[SettingChoice],
    has_key: bool,
) -> ServerState:
    name, client = model_name(config), pipeline.client
    metrics = Metrics(
        name,
        lambda: client.counters,
        client.drain_iterations,
        config.max_stats_len,
        rows=None if shared is None else shared.metrics,
        own=0 if shared is None else shared.own,
    )
    bodies = Bodies(config.http_config, client.info.max_seq_len)
    names = TokenNames(pipeline.tokenizer)
    folder = None if shared is None else Path(shared.path).with_name("adapters")
    adapters = AdapterRegistry(config.lora, name, folder)
    interval = SettingChoice(
        name="stream_interval",
        value=str(config.stream_interval),
        reason="tokens between two chunks of a stream",
    )
    choices = (*choices, interval)
    return ServerState(pipeline, name, metrics, names, bodies, adapters, choices, has_key)


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
