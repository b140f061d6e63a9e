"""`LaunchState`: what `launch` has prepared before the first API server is imported. Light."""

import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import EngineConfig
from penstock.frontend.engine_handle import EngineHandle
from penstock.server.tenants import Access


@dataclass(frozen=True, slots=True)
class LaunchState:
    config: EngineConfig
    listener: socket.socket  # bound, not listening
    tokenizer_folder: Path | None
    access: Access
    engine: EngineHandle
    leaving: threading.Event  # set by a signal that comes before the server hears of them
    begun_at: float  # when the user began to wait
