"""`HopperConfig`: how the warp-specialized GEMMs of experts are launched."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Of both GEMMs."""

    stages: int  # of the pipeline, a tile each
    band: int  # blocks of pairs that follow each other before the next outputs
    registers: int  # of a thread on average; they decide the occupancy
