"""Which sizes of models fit on this machine, estimated from free memory: for `penstock doctor`."""

from dataclasses import dataclass
from pathlib import Path

_GIB = 2**30
_MEMORY = Path("/proc/meminfo")
EXAMPLE = 8e9  # parameters of the model that is talked about
# Bytes of a parameter: formats that a run takes as they are, the default of the device first.
CPU_FORMATS = {
    "float32 (default)": 4.0,
    "bfloat16 (--dtype)": 2.0,
    "GGUF of 8 bits": 34 / 32,
    "GGUF of 4 bits": 20 / 32,
}
GPU_FORMATS = {
    "bfloat16": 2.0,
    "8 bits (--quantization fp8)": 1.05,
    "4 bits (AWQ, GPTQ, NVFP4)": 0.57,
}
_BESIDE_CPU = 2 * _GIB  # the processes with torch, and activations; the cache comes on top
_WEIGHTS_OF_GPU = 0.8  # the rest is for cache and activations


@dataclass(frozen=True, slots=True)
class Size:
    format: str
    max_parameters: float
    bytes_of_example: float

    @property
    def fits_example(self) -> bool:
        return self.max_parameters >= EXAMPLE


def sizes(formats: dict[str, float], weight_bytes: float) -> list[Size]:
    room = max(0.0, weight_bytes)
    return [Size(name, room / one, EXAMPLE * one) for name, one in formats.items()]


def room_on_cpu(available_bytes: int, cache_bytes: int) -> float:
    return available_bytes - cache_bytes - _BESIDE_CPU


def room_on_gpu(free_bytes: int) -> float:
    return free_bytes * _WEIGHTS_OF_GPU


def available_bytes(free_bytes: int) -> int:
    """What can be had without swapping: also what files only cache; else what is free."""
    try:
        lines = _MEMORY.read_text(encoding="utf-8").splitlines()
    except OSError:
        return free_bytes
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else free_bytes


def billions(num_parameters: float) -> str:
    """Rounded down: 3.2 B, 17 B, 0.5 B."""
    count = num_parameters / 1e9
    return f"{int(count) if count >= 10 else int(count * 10) / 10:g} B"
