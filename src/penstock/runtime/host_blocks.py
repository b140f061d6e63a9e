"""`HostBlocks`: host (CPU) memory for cache blocks that are swapped out."""

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from penstock import log

_SLAB_BYTES = 64 << 20  # allocated at once: while the driver pins a slab, others wait for it
_ALIGNMENT = 16  # bytes, of a plane within its block
_AHEAD = 8  # slabs that are ready, or being allocated, beyond the last one in use

_log = log.get(__name__)


class HostBlocks:
    """Host blocks by number, each for one block of all layers. How many there are the memory plan
    says. Memory is taken with the first of them, slab by slab: a thread allocates the next ones, so
    that a step seldom waits."""

    def __init__(self, planes_LB: Sequence[Tensor], num_blocks: int) -> None:
        self._blocks_L = [plane_LB[:, 0] for plane_LB in planes_LB]
        self._sizes = [-(-block_L.nbytes // _ALIGNMENT) * _ALIGNMENT for block_L in self._blocks_L]
        self._device = planes_LB[0].device
        self._per_slab = max(1, min(_SLAB_BYTES // sum(self._sizes), num_blocks))
        self._num_slabs = -(-num_blocks // self._per_slab)
        self._slabs: list[Future[Tensor]] = []
        self._allocator: ThreadPoolExecutor | None = None

    def __getitem__(self, number: int) -> list[Tensor]:
        """A block's planes, [L, ...] each."""
        index, at = divmod(number, self._per_slab)
        if self._allocator is None:
            self._allocator = ThreadPoolExecutor(1, "host blocks")
        while len(self._slabs) < min(index + 1 + _AHEAD, self._num_slabs):
            self._slabs.append(self._allocator.submit(self._allocate))
        parts = self._slabs[index].result()[at].split(self._sizes)
        return [
            part[: block_L.nbytes].view(block_L.dtype).view(block_L.shape)
            for part, block_L in zip(parts, self._blocks_L, strict=True)
        ]

    def _allocate(self) -> Tensor:
        """Bytes [host blocks, block]."""
        num_bytes = self._per_slab * sum(self._sizes)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            slab.zero_()  # pages are there before the driver is asked
            with torch.cuda.device(self._device):  # a thread begins with the first
                _pin(memory, slab)
        return slab.view(self._per_slab, -1)


def _pin(memory: mmap.mmap, slab: Tensor) -> None:
    """For as long as there is `memory`, which the slab is of."""
    driver = torch.cuda.cudart()
    if error := int(driver.cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)):
        # Copies then wait for each other, and are right all the same.
        _log.warning("%d bytes of host memory cannot be pinned: error %d", slab.nbytes, error)
    else:
        weakref.finalize(memory, driver.cudaHostUnregister, slab.data_ptr()).atexit = False
