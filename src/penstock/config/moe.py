"""`moe_config`: how layers of experts are computed, and where their experts lie."""

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from penstock.config.base import StrictModel, setting
from penstock.config.yaml_file import read_yaml

MoeBackend = Literal[
    "AUTO", "CUTLASS", "TRTLLM", "TRITON", "DEEPGEMM", "WIDEEP", "CUTEDSL", "DENSEGEMM", "VANILLA"
]


class LoadBalancerConfig(StrictModel):
    num_slots: int | None = setting(
        None,
        "Places for experts over all expert-parallel ranks, as many on each. More of them than "
        "experts: those with most to do have several, and share their tokens. null: as many as "
        "experts.",
        ge=1,
        le=2**16,
    )
    initial_global_assignments: dict[int, list[int]] | None = setting(
        None,
        "Layer -> the expert of each slot, as `penstock eplb` writes it. Layers that are not "
        "named, and null: ranks hold equal shares of the experts, and some of the next rank's.",
    )
    layer_updates_per_iter: int = setting(
        0,
        "Layers whose experts may move to other slots before each step, by the load that was "
        "measured. 0: they stay.",
        ge=0,
        le=1024,
    )

    @field_validator("initial_global_assignments", mode="before")
    @classmethod
    def _layers_are_numbers(cls, value: object) -> object:
        """Names in JSON are text."""
        if not isinstance(value, dict):
            return value
        return {
            int(layer) if isinstance(layer, str) and layer.isdecimal() else layer: slots
            for layer, slots in value.items()
        }


class MoeConfig(StrictModel):
    backend: MoeBackend = setting(
        "AUTO",
        "Kernels of the experts. VANILLA: plain torch, every expert on every token, to compare "
        "with. All other names give the kernels that fit the device (docs/moe.md), which is "
        "logged. WIDEEP: with attention DP, tokens are sent only to the ranks of their experts.",
    )
    max_num_tokens: int | None = setting(
        None,
        "Most tokens that go through the experts at once; larger steps are cut, which bounds the "
        "memory they need. null: a whole step.",
        ge=1,
        le=2**20,
    )
    load_balancer: LoadBalancerConfig | None = setting(
        None,
        "Slots for experts on expert-parallel ranks, or the name of a YAML file that says the "
        "same. null: every expert once, on one rank.",
        status="beta",
    )
    load_record_path: str | None = setting(
        None,
        "File to which rank 0 writes how many tokens each expert was given, every 100 steps, for "
        "`penstock eplb`. null: none is written.",
        status="beta",
    )

    @field_validator("load_balancer", mode="before")
    @classmethod
    def _from_file(cls, value: object) -> object:
        return read_yaml(Path(value)) if isinstance(value, str) else value
