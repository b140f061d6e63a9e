"""Libraries that came with the package: one per set of vector instructions, the best one is taken.

A platform wheel has them (`tools/platform_wheel.py`); a source tree and the pure wheel have not.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("prebuilt")
_CPU_INFO = Path("/proc/cpuinfo")
_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: tuple[str, ...]  # as the kernel lists them; all are needed

    @property
    def file_name(self) -> str:
        return f"ops-{self.name}.so"


# By machine, the fastest first.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
        Variant("avx512", ("-march=x86-64-v4",), _V4),
        Variant("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Variant("neon", ("-march=armv8-a",), ("asimd",)),),
}


def prebuilt(folder: Path = FOLDER) -> Path | None:
    """The best library of the package that this processor can run; None where it has none."""
    if not folder.is_dir():
        return None
    has = cpu_flags()
    for variant in VARIANTS.get(platform.machine(), ()):
        path = folder / variant.file_name
        if has.issuperset(variant.cpu_flags) and path.is_file():
            return path
    return None


def cpu_flags() -> set[str]:
    """What every processor of this machine can do."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    found = [
        set(line.split(":")[1].split()) for line in lines if line.startswith(("flags", "Feat"))
    ]
    return set.intersection(*found) if found else set()
