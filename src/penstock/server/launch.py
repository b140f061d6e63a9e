"""Serves: find the model's files, bind, start the engine, and become the first API server.

A model that cannot be had is told before a port that is taken. The port refuses connections until
the engine is ready. The process ends with a code other than 0 when the engine could not start, died
or hangs, so that a supervisor notices. The engine takes seconds to import torch; what this process
needs itself is imported meanwhile (`lifespan`), so nothing that takes long may be imported here.
"""

import errno
import gc
import resource
import socket
import threading
import time

from penstock import log
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend.engine_handle import EngineHandle
from penstock.frontend.tokenizer_folder import tokenizer_folder
from penstock.server.launch_state import LaunchState
from penstock.server.signals import take_signals
from penstock.server.tenants import Access

_MAX_FILES = 1 << 20
_ASK_TIMEOUT_S = 2.0
_log = log.get(__name__)


def serve(config: EngineConfig, begun_at: float | None = None) -> int:
    """Run the server until a signal; the exit code of the process. `begun_at`: if not now."""
    begun_at = time.time() if begun_at is None else begun_at
    log.setup("http", config.log_level)
    allow_many_connections()
    try:
        folder = tokenizer_folder(config)
        access = Access.load(config)
        listener = bind(config.host, config.port)
        engine = EngineHandle.of(config)
    except ConfigError as error:
        _log.error("%s", error)
        return 1
    leaving = threading.Event()
    take_signals(lambda *_: leaving.set())  # until the server takes them, and after
    try:
        engine.start(config.model_dump(mode="json"), begun_at)
        gc.disable()
        from penstock.server.lifespan import FirstApiServer

        gc.freeze()
        gc.enable()
        launched = LaunchState(config, listener, folder, access, engine, leaving, begun_at)
        return FirstApiServer(launched).run()
    finally:
        engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """Take the port, without listening yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            + _advice(error, host, port)
        ) from None
    listener.set_inheritable(False)
    return listener


def _advice(error: OSError, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this machine with --host, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return "choose one above 1023 with --port"
    who = _who_listens(host, port) if error.errno == errno.EADDRINUSE else ""
    another = f'choose another with --port (make serve ARGS="--port {port + 1}"), or another --host'
    return who + another


def _who_listens(host: str, port: int) -> str:
    """Whether it is one of us: somebody may have forgotten a server that runs."""
    import httpx

    from penstock.server.report import base_url

    url = base_url(host, port)
    try:
        said = httpx.get(f"{url}/", timeout=_ASK_TIMEOUT_S, trust_env=False).json()
        if said["server"] == "penstock":
            return f"a Penstock serves '{said['model']}' there ('penstock chat --url {url}'); "
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        pass
    return ""


def allow_many_connections() -> None:
    """Each is an open file; the limit a shell starts with is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            _log.warning("at most %d files may be open, about as many connections: %s", soft, error)
