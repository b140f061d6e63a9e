"""`moe_config`: how layers of experts are computed."""

from typing import Literal

from penstock.config.base import StrictModel, setting

MoeBackend = Literal[
    "AUTO", "CUTLASS", "TRTLLM", "TRITON", "DEEPGEMM", "WIDEEP", "CUTEDSL", "DENSEGEMM", "VANILLA"
]


class MoeConfig(StrictModel):
    backend: MoeBackend = setting(
        "AUTO",
        "Kernels of the experts. VANILLA: plain torch, every expert on every token, to compare "
        "with. All other names give the kernels that fit the device (docs/moe.md), which is "
        "logged.",
    )
    max_num_tokens: int | None = setting(
        None,
        "Most tokens that go through the experts at once; larger steps are cut, which bounds the "
        "memory they need. null: a whole step.",
        ge=1,
        le=2**20,
    )
