"""`lora_config`: low-rank adapters that requests choose by name."""

from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from penstock.config.base import StrictModel, setting
from penstock.config.run import LoraRun
from penstock.types.lora_request import adapter_of

_MAX_ADAPTERS = 4096
# TensorRT-LLM's names of modules -> those of checkpoints.
_MODULES = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    "attn_dense": ("o_proj",),
    "mlp_h_to_4h": ("gate_proj",),
    "mlp_gate": ("up_proj",),
    "mlp_gate_up": ("gate_proj", "up_proj"),
    "mlp_4h_to_h": ("down_proj",),
}


class LoraConfig(StrictModel):
    lora_dir: tuple[str, ...] = setting(
        (),
        "Folders of adapters in PEFT's layout, each served under the last part of its path.",
        status="beta",
        max_length=_MAX_ADAPTERS,
    )
    lora_modules: dict[str, str] = setting(
        {},
        "Adapters by the names they are served under: a mapping of names to folders, or texts "
        "NAME=FOLDER as vLLM's --lora-modules has them.",
        status="beta",
        max_length=_MAX_ADAPTERS,
    )
    lora_ckpt_source: Literal["hf"] = setting(
        "hf", "Layout of the folders. hf: PEFT's. nemo is not read.", status="beta"
    )
    max_lora_rank: int = setting(
        64, "Largest rank of an adapter. Memory is taken for it.", status="beta", ge=1, le=256
    )
    max_loras: int = setting(
        4,
        "Adapters on the device at a time, which one step may mix. A request for another one "
        "waits until one of them has no more requests.",
        status="beta",
        ge=1,
        le=1024,
    )
    max_cpu_loras: int | None = setting(
        None,
        "Adapters kept in host memory; those not used for longest are read again from their "
        "files. null: twice max_loras.",
        status="beta",
        ge=1,
        le=_MAX_ADAPTERS,
    )
    lora_target_modules: tuple[str, ...] = setting(
        (),
        "Modules that adapters may change: names of checkpoints (q_proj, ...) or of TensorRT-LLM "
        "(attn_q, ...). Empty: those that the adapters given at start name, or all linear layers.",
        status="beta",
        max_length=64,
    )
    allow_runtime_updating: bool = setting(
        False,
        "Whether clients may load and unload adapters (POST /v1/load_lora_adapter, "
        "/v1/unload_lora_adapter, lora_request with a lora_path): the server then reads folders "
        "that they name.",
        status="beta",
    )
    max_runtime_loras: int = setting(
        256, "Most adapters that clients may have loaded.", status="beta", ge=1, le=_MAX_ADAPTERS
    )

    @field_validator("lora_dir", "lora_target_modules", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        return tuple(value) if isinstance(value, list) else value

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Texts of a flag, or a list of them."""
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            return value
        named: dict[str, str] = {}
        for text in value:
            name, equals, path = text.partition("=")
            if not equals or not name or not path:
                raise ValueError(f"'{text}' is not NAME=FOLDER")
            if name in named:
                raise ValueError(f"'{name}' is given twice")
            named[name] = path
        return named

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        of_folders = [Path(one).name for one in self.lora_dir]
        for name in [*of_folders, *self.lora_modules]:
            if not 1 <= len(name) <= 256 or not name.isprintable() or name != name.strip():
                raise ValueError(f"an adapter cannot be called {name!r}")
        twice = {name for name in of_folders if of_folders.count(name) > 1}
        if twice := twice | (set(of_folders) & set(self.lora_modules)):
            raise ValueError(f"two adapters are called '{min(twice)}'; name them by lora_modules")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, less than max_loras ({self.max_loras})"
            )
        return self

    @property
    def named(self) -> dict[str, str]:
        """Every adapter given at start: name -> folder."""
        return {Path(one).name: one for one in self.lora_dir} | self.lora_modules

    def to_run(self) -> LoraRun:
        modules = [_MODULES.get(name, (name,)) for name in self.lora_target_modules]
        return LoraRun(
            max_rank=self.max_lora_rank,
            num_slots=self.max_loras,
            num_host=self.max_cpu_loras or 2 * self.max_loras,
            target_modules=tuple(dict.fromkeys(name for names in modules for name in names)),
            adapters=tuple(adapter_of(name, path) for name, path in self.named.items()),
            may_load=self.allow_runtime_updating,
        )
