"""`lora_request` of a body; the bodies of `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`."""

from typing import Annotated

from pydantic import Field

from penstock.server.openai.requests.schema import Strict
from penstock.types.lora_request import MAX_NAME_CHARS, MAX_PATH_CHARS, LoRARequest

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
FolderPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class LoraChoice(Strict):
    lora_name: Name
    lora_int_id: _Int64 = 0
    lora_path: Annotated[str, Field(max_length=MAX_PATH_CHARS)] = ""
    lora_ckpt_source: str = "hf"

    def to_request(self) -> LoRARequest:
        return LoRARequest(self.lora_name, self.lora_int_id, self.lora_path, self.lora_ckpt_source)


class LoadLora(Strict):
    lora_name: Name
    lora_path: FolderPath
    load_inplace: bool = False  # in place of one of the same name


class UnloadLora(Strict):
    lora_name: Name
    lora_int_id: _Int64 | None = None  # the name is enough
