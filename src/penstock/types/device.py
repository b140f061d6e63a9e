"""`DeviceInfo`: what this machine has, as a record; filled by `kernels/device.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    kind: str  # "cuda" or "cpu"
    name: str
    arch: int  # 90 for sm_90; 0 on a CPU
    num_devices: int
    total_bytes: int  # memory of one device; host memory on a CPU
    free_bytes: int
    host_bytes: int  # host memory that this process may use
    num_sms: int
    num_threads: int  # physical cores the CPU ops may use
    torch_version: str
    triton_version: str | None
    cuda_version: str | None
