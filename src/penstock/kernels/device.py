"""`probe()`: what this machine has, found once per process. Decides nothing."""

import functools
import os
import platform
from importlib import metadata

import torch

from penstock.types.device import DeviceInfo

_H200_SMS = 132


@functools.cache
def probe() -> DeviceInfo:
    """The devices as they are at the first call; free memory is that of the current device then."""
    if not torch.cuda.is_available():
        return _probe_cpu()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        arch=properties.major * 10 + properties.minor,
        num_devices=torch.cuda.device_count(),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        num_sms=properties.multi_processor_count,
        num_threads=_num_usable_cores(),
        torch_version=torch.__version__,
        triton_version=_triton_version(),
        cuda_version=torch.version.cuda,
    )


def num_places() -> int:
    """Multiprocessors of this GPU; of an H200 where there is none to ask."""
    return probe().num_sms or _H200_SMS


def _probe_cpu() -> DeviceInfo:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return DeviceInfo(
        kind="cpu",
        name=platform.processor() or platform.machine(),
        arch=0,
        num_devices=1,
        total_bytes=page_bytes * os.sysconf("SC_PHYS_PAGES"),
        free_bytes=page_bytes * os.sysconf("SC_AVPHYS_PAGES"),
        num_sms=0,
        num_threads=_num_usable_cores(),
        torch_version=torch.__version__,
        triton_version=_triton_version(),
        cuda_version=torch.version.cuda,
    )


def _num_usable_cores() -> int:
    """Torch counts physical cores; an affinity mask may leave this process fewer."""
    if hasattr(os, "sched_getaffinity"):
        return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


def _triton_version() -> str | None:
    """From the package's metadata: a CPU process need not import Triton just to ask."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
