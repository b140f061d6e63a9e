"""`AdapterRegistry`: the adapters of a server by name: those of its settings, and those that
clients have loaded, which all its API servers know from files in their shared folder. Reads no
weights."""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.config.lora import LoraConfig
from penstock.errors import ConfigError, RequestError
from penstock.types.adapter import Adapter
from penstock.types.lora_request import adapter_of, check_name

_SUFFIX = ".json"
_DECODER = msgspec.json.Decoder(Adapter)


class AdapterRegistry:
    """`config`: None where the server takes no adapters. `folder`: None, this process is alone."""

    def __init__(
        self, config: LoraConfig | None, model_name: str, folder: Path | None = None
    ) -> None:
        self.config = config
        self.model_name = model_name
        self._folder = folder
        self._own: dict[str, Adapter] = {}  # loaded, where there is no folder
        self._fixed: Mapping[str, Adapter] = {}
        if config is not None:
            self._fixed = {name: adapter_of(name, path) for name, path in config.named.items()}
            if model_name in self._fixed:
                raise ConfigError(f"an adapter is called '{model_name}', as the model is")
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def is_on(self) -> bool:
        return self.config is not None

    @property
    def may_load(self) -> bool:
        return self.config is not None and self.config.allow_runtime_updating

    def find(self, name: str) -> Adapter | None:
        found = self._fixed.get(name)
        if found is not None or not self.may_load:
            return found
        if self._folder is None:
            return self._own.get(name)
        return _read(self._file(name))

    def all(self) -> list[Adapter]:
        loaded = list(self._own.values())
        if self.may_load and self._folder is not None:
            read = [_read(path) for path in sorted(self._folder.glob(f"*{_SUFFIX}"))]
            loaded = [one for one in read if one is not None]
        return [*self._fixed.values(), *sorted(loaded, key=lambda one: one.name)]

    def new(self, name: str, path: str, may_replace: bool) -> Adapter:
        """One that could be added: checked by what is known here, not yet by the engine."""
        assert self.config is not None
        check_name(name)
        if name == self.model_name or name in self._fixed:
            raise RequestError(
                "invalid_value", f"'{name}' is a name of the server's own settings", "lora_name"
            )
        if self.find(name) is not None and not may_replace:
            raise RequestError(
                "invalid_value",
                f"adapter '{name}' is loaded already; unload it first, or send load_inplace: true",
                "lora_name",
            )
        most = self.config.max_runtime_loras
        if self.find(name) is None and len(self.all()) - len(self._fixed) >= most:
            raise RequestError(
                "invalid_value",
                f"{most} adapters are loaded, no more are taken; unload some, or raise "
                "lora_config.max_runtime_loras",
                "lora_name",
            )
        # Whatever the folder held before, this is another adapter.
        return adapter_of(name, path, secrets.token_hex(16))

    def add(self, adapter: Adapter) -> None:
        if self._folder is None:
            self._own[adapter.name] = adapter
            return
        path = self._file(adapter.name)
        fresh = path.with_suffix(f".{secrets.token_hex(8)}")
        fresh.write_bytes(msgspec.json.encode(adapter))
        os.replace(fresh, path)

    def remove(self, name: str) -> bool:
        """Whether it was there. Requests that run with it go on."""
        if name in self._fixed:
            raise RequestError(
                "invalid_value",
                f"adapter '{name}' is one of the server's own settings and stays",
                "lora_name",
            )
        if self._folder is None:
            return self._own.pop(name, None) is not None
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / (hashlib.sha256(name.encode()).hexdigest() + _SUFFIX)


def _read(path: Path) -> Adapter | None:
    try:
        return _DECODER.decode(path.read_bytes())
    except FileNotFoundError:  # never there, or unloaded at this moment
        return None
