"""Penstock: an LLM inference and serving engine. Public names resolve lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "penstock.api.llm",
    "SamplingParams": "penstock.types.sampling",
    "GuidedDecodingParams": "penstock.types.guided_decoding",
    "EngineConfig": "penstock.config.schema",
    "LoRARequest": "penstock.types.lora_request",
    "RequestOutput": "penstock.types.outputs",
}
__all__ = [
    "LLM",
    "EngineConfig",
    "GuidedDecodingParams",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.config.schema import EngineConfig
    from penstock.types.guided_decoding import GuidedDecodingParams
    from penstock.types.lora_request import LoRARequest
    from penstock.types.outputs import RequestOutput
    from penstock.types.sampling import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute '{name}'")
