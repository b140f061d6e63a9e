"""`BatchService`: files and batches of one API server, as its endpoints need them."""

import asyncio
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from penstock.config.schema import EngineConfig
from penstock.hub.folder import cache_home
from penstock.server.auth import tenant_of
from penstock.server.batches.batch_run import BatchHost
from penstock.server.batches.endpoints import endpoints_app
from penstock.server.batches.folder import FileLimits, FilesRoot, TenantFolder
from penstock.server.batches.worker import BatchWorker
from penstock.server.drain import Drain
from penstock.server.state import ServerState
from penstock.server.tenants import Access

MAX_UPLOADS = 8  # at once


@dataclass(frozen=True, slots=True)
class BatchService:
    root: FilesRoot
    worker: BatchWorker
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))

    @property
    def is_on(self) -> bool:
        return self.root.limits.max_file_bytes > 0

    def start(self) -> None:
        """Goes on with what an earlier server has left."""
        if self.is_on:
            self.worker.wake()

    async def aclose(self) -> None:
        await self.worker.aclose()


def batch_service(
    state: ServerState, config: EngineConfig, drain: Drain, access: Access
) -> BatchService:
    http, client = config.http_config, state.pipeline.client
    limits = FileLimits(http.max_file_bytes, http.max_files, http.max_stored_bytes)
    root = FilesRoot(_folder(config, state.model_name), limits)

    def is_engine_well() -> bool:
        return client.is_healthy()

    host = BatchHost(
        app=endpoints_app(state),
        max_line_bytes=state.bodies.max_bytes,
        max_values=state.bodies.max_values,
        # Half of the rows are left to requests that somebody waits for.
        concurrency=lambda: http.max_batch_concurrency or max(1, client.info.max_batch_size // 2),
        is_leaving=lambda: drain.is_begun,
        is_engine_well=is_engine_well,
    )
    return BatchService(root, BatchWorker(root, host, {one.name: one for one in access.tenants}))


def batches_of(request: Request) -> BatchService:
    service: BatchService = request.app.state.batches
    if not service.is_on:
        raise HTTPException(404, "files and batches are off: http_config.max_file_bytes is 0")
    return service


def folder_of(request: Request) -> TenantFolder:
    return batches_of(request).root.of_tenant(tenant_of(request).name)


def _folder(config: EngineConfig, model_name: str) -> Path:
    """One for each model: servers of different models do not run each other's batches."""
    given = config.http_config.files_dir
    home = cache_home() / "files" if given is None else Path(given).expanduser()
    readable = re.sub(r"[^A-Za-z0-9.-]", "_", model_name)[:80]
    return home / f"{readable}-{hashlib.sha256(model_name.encode()).hexdigest()[:8]}"
