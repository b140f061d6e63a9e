"""`BatchWorker`: runs the batches of a server behind its other requests, one process for all API
servers. What is done is on disk: whoever comes after goes on where it ended.

How one batch runs is `batch_run`'s business, what is on disk `folder`'s.
"""

import asyncio
from collections.abc import Mapping

from penstock import log
from penstock.errors import PenstockError
from penstock.server.batches.batch_run import BatchHost, BatchRun, fail
from penstock.server.batches.folder import FilesRoot, TenantFolder
from penstock.server.batches.records import BatchState
from penstock.types.tenant import Tenant

MAX_RUNNING = 4  # batches; others wait for their turn
_POLL_S = 1.0
_log = log.get(__name__)


class BatchWorker:
    """`tenants`: of the server, by name."""

    def __init__(self, root: FilesRoot, host: BatchHost, tenants: Mapping[str, Tenant]) -> None:
        self._root = root
        self._host = host
        self._tenants = tenants
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}  # by batch id
        self._known_ended: set[str] = set()  # batch ids; they stay so
        self._last_warning = ""
        self._places: asyncio.Semaphore  # from `wake` on

    def wake(self) -> None:
        """There may be something to do. The first call starts it."""
        if self._task is None:
            self._places = asyncio.Semaphore(self._host.concurrency())
            self._task = asyncio.create_task(self._run())
        self._woken.set()

    async def aclose(self) -> None:
        """What runs is left for another time."""
        tasks = [one for one in (self._task, *self._running.values()) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._root.close()

    async def _run(self) -> None:
        while not self._host.is_leaving():
            self._woken.clear()
            try:
                if self._root.take_leader_lock():
                    await self._start_waiting()
            except (OSError, PenstockError) as error:  # such as a disk that is gone for a while
                if str(error) != self._last_warning:
                    _log.warning("batches are not run: %s", error)
                self._last_warning = str(error)
            try:
                await asyncio.wait_for(self._woken.wait(), _POLL_S)
            except TimeoutError:
                pass

    async def _start_waiting(self) -> None:
        """The oldest first."""
        for folder, state in await asyncio.to_thread(self._waiting):
            if len(self._running) >= MAX_RUNNING:
                return
            if (batch_id := state.batch.id) not in self._running:
                task = asyncio.create_task(self._run_batch(folder, state))
                self._running[batch_id] = task

    def _waiting(self) -> list[tuple[TenantFolder, BatchState]]:
        found = [
            (folder, state)
            for folder in self._root.folders()
            for state in folder.open_batches(self._known_ended)
        ]
        return sorted(found, key=lambda one: one[1].batch.created_at)

    async def _run_batch(self, folder: TenantFolder, state: BatchState) -> None:
        tenant = self._tenants.get(state.tenant)
        try:
            await BatchRun(folder, state, tenant, self._host, self._places).run()
        except Exception as error:  # of this batch alone
            _log.error("batch %s failed", state.batch.id, exc_info=error)
            fail(folder, state, "internal_error", "the server failed to run this batch")
        finally:
            del self._running[state.batch.id]
            self._woken.set()
