"""`probe()`: what this machine has, found once per process. Decides nothing."""

import contextlib
import functools
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from penstock.types.device import DeviceInfo

_H200_SMS = 132
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}  # of others 99
_MEMINFO, _STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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
        host_bytes=_host_bytes(),
        num_sms=properties.multi_processor_count,
        num_threads=_num_usable_cores(),
        torch_version=torch.__version__,
        triton_version=_triton_version(),
        cuda_version=torch.version.cuda,
    )


def num_sms() -> int:
    """SMs of this GPU; of an H200 where there is none to ask."""
    return probe().num_sms or _H200_SMS


def shared_bytes() -> int:
    """Shared memory that a program may have; that of an H200 where there is no GPU to ask."""
    return _SHARED_KIB.get(probe().arch or 90, 99) << 10


def available_bytes() -> int:
    """Host memory that can still be taken: what is free, and what files only keep for later."""
    found = {}
    with contextlib.suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) << 10
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    available = found.get("MemAvailable", pages)
    match _container_limit("memory.max"), _container_limit("memory.current"):
        case [limit], [current] if limit.isdigit():
            words = _container_limit("memory.stat")
            stat = dict(zip(words[::2], words[1::2], strict=False))
            files = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            available = min(available, max(0, int(limit) - int(current) + files))
    return available


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _probe_cpu() -> DeviceInfo:
    return DeviceInfo(
        kind="cpu",
        name=platform.processor() or platform.machine(),
        arch=0,
        num_devices=1,
        total_bytes=_host_bytes(),
        free_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        host_bytes=_host_bytes(),
        num_sms=0,
        num_threads=_num_usable_cores(),
        torch_version=torch.__version__,
        triton_version=_triton_version(),
        cuda_version=torch.version.cuda,
    )


def _num_usable_cores() -> int:
    """Torch counts physical cores; an affinity mask or a container may leave this process fewer."""
    num_cores = torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):
        num_cores = min(num_cores, len(os.sched_getaffinity(0)))
    match _container_limit("cpu.max"):
        case [quota, period] if quota.isdigit():
            num_cores = min(num_cores, max(1, int(quota) // int(period)))
    return num_cores


def _host_bytes() -> int:
    return _usable_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _usable_bytes(total_bytes: int) -> int:
    match _container_limit("memory.max"):
        case [limit] if limit.isdigit():
            return min(total_bytes, int(limit))
    return total_bytes


def _container_limit(name: str) -> list[str]:
    """What the control group of this process (version 2) says; nothing where there is none."""
    try:
        own = _OWN_GROUP.read_text().rpartition("0::")[2].strip()
        return (_GROUPS / own.lstrip("/") / name).read_text().split()
    except OSError:
        return []


def _triton_version() -> str | None:
    """From the package's metadata: a CPU process need not import Triton just to ask."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
