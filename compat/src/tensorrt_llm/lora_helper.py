"""`tensorrt_llm.lora_helper`."""

from penstock.config.lora import LoraConfig

__all__ = ["LoraConfig"]
