"""The names of `tensorrt_llm.executor` that have a counterpart."""

from penstock import LoRARequest

__all__ = ["LoRARequest"]
