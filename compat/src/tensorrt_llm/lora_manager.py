"""`tensorrt_llm.lora_manager`."""

from penstock.config.lora import LoraConfig

__all__ = ["LoraConfig"]
