"""`LoRARequest`: an adapter as a Python program asks for it; fields as in TensorRT-LLM and vLLM."""

import hashlib
import os
from dataclasses import dataclass

from penstock.errors import RequestError
from penstock.types.adapter import Adapter

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_path` may be left out for an adapter of `lora_config`. Another `lora_int_id` says that
    the folder has other contents now."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        check_name(self.lora_name)
        if self.lora_ckpt_source != "hf":
            raise RequestError(
                "unsupported",
                f"lora_ckpt_source is {self.lora_ckpt_source!r}: only PEFT's layout (hf) is read",
                "lora_request",
            )
        if len(self.lora_path) > MAX_PATH_CHARS or "\0" in self.lora_path:
            raise RequestError("invalid_value", "lora_path is no path", "lora_request")

    @property
    def adapter(self) -> Adapter:
        """Of its path."""
        return adapter_of(self.lora_name, self.lora_path, str(self.lora_int_id))


def adapter_of(name: str, path: str, version: str = "") -> Adapter:
    """The same id for the same three, in every process."""
    path = os.path.abspath(os.path.expanduser(path))
    digest = hashlib.sha256("\0".join((name, path, version)).encode()).hexdigest()[:32]
    return Adapter(id=digest, name=name, path=path)


def check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise RequestError(
            "invalid_value",
            f"an adapter cannot be called {name[:80]!r}: 1 to {MAX_NAME_CHARS} printable "
            "characters, no space at either end",
            "lora_name",
        )
