"""`AdapterField`: low-rank adapters on one rank: in host memory, in slots of the layers, by row.

Which adapter takes which slot comes with the rows that join (`RowJoin.adapter`), and for MLPs that
see the tokens of ranks with other rows with every step (`StepPlan.adapters`); what a slot does not
hold yet is copied there from host memory, in the order of the steps. So ranks stay alike.
"""

# R rows, T tokens

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock import log
from penstock.config.run import LoraRun, RunConfig
from penstock.errors import ConfigError
from penstock.hub.adapter_config import read_adapter_config
from penstock.kernels.forward_batch import AdapterTokens, ForwardBatch
from penstock.kernels.lora import lora_groups
from penstock.kernels.transfer import to_device
from penstock.layers.decoder import Decoder
from penstock.layers.linear import Linear
from penstock.layers.lora import LoraSlots, add_slots
from penstock.parallel.collectives import gathered
from penstock.runtime.batch_fields import BatchField
from penstock.types.adapter import Adapter
from penstock.types.step import Int32s, RowJoin, StepPlan
from penstock.weights.adapter import (
    AdapterReader,
    HostAdapter,
    WholeSizes,
    module_names,
    whole_sizes,
)
from penstock.weights.mapping import Rules

_log = log.get(__name__)
_GROUP_SIZE = 4  # decodes of one adapter that read its matrices together
_NO_REQUEST = 0  # id of the rows of warmup steps, which shall run every kernel


def make_batch_fields(
    config: RunConfig, model: Decoder, device: torch.device
) -> tuple[BatchField, ...]:
    """The fields of this run. Called once, before memory is planned: they may take some."""
    if config.lora is None:
        return ()
    gather = partial(
        gathered, num_ranks=config.mesh.size if config.mesh.pp > 1 else 1, device=device
    )
    return (AdapterField(config.lora, model, config.max_batch_size, device, gather),)


def find_adapters(fields: Sequence[BatchField]) -> "AdapterField | None":
    return next((field for field in fields if isinstance(field, AdapterField)), None)


class AdapterField:
    def __init__(
        self,
        config: LoraRun,
        model: Decoder,
        max_rows: int,
        device: torch.device,
        gather: Callable[[bytes], list[bytes]] = lambda message: [message],
    ) -> None:
        """`gather`: the messages of all ranks, where they have other layers."""
        layers = _linear_layers(model)
        own = {name: whole_sizes(layer) for name, layer in layers.items()}
        sizes: dict[str, WholeSizes] = {}
        for message in gather(msgspec.msgpack.encode(own)):
            sizes |= msgspec.msgpack.decode(message, type=dict[str, WholeSizes])
        sizes = _adapted(sizes, config, model.weight_rules)
        layers = {name: layer for name, layer in layers.items() if name in sizes}
        _, dtype, _ = model.hidden_states
        self._slots: dict[str, LoraSlots] = {
            name: add_slots(layer, config.num_slots, config.max_rank)
            for name, layer in layers.items()
        }
        is_pinned = device.type == "cuda"
        reader = AdapterReader(model.weight_rules, layers, sizes, config.max_rank, dtype, is_pinned)
        self.host = HostAdapters(reader, config.num_host)
        self._held: list[str | None] = [None] * config.num_slots  # ids
        self._slots_R = torch.full((max_rows + 1,), -1, dtype=torch.int32, device=device)
        self._slot_of_row = np.full(max_rows + 1, -1, np.int32)  # the same on the host
        self._is_adapted = np.zeros(max_rows + 1, bool)  # by row
        self._is_shared = False  # the step has adapters, here or on a rank with other rows
        self._device = device
        self._known = config.adapters

    @property
    def num_bytes(self) -> int:
        """Of the slots, on the device."""
        return sum(slots.num_bytes for slots in self._slots.values())

    def start(self) -> None:
        """Read the adapters of the settings; one that cannot be used is a `ConfigError`."""
        for adapter in self._known[self.host.max_adapters :]:
            read_adapter_config(Path(adapter.path))
        for adapter in self._known[: self.host.max_adapters]:
            self.host.get(adapter)

    def begin(self, plan: StepPlan) -> None:
        self._is_shared = plan.peers is not None and bool(plan.adapters)
        if self._is_shared:
            for one in plan.adapters:
                self._hold(one.slot, one.adapter)
        self.join(plan.joins)

    def join(self, joins: Sequence[RowJoin]) -> None:
        if not joins:
            return
        for join in joins:
            if join.adapter is not None:
                self._hold(join.adapter.slot, join.adapter.adapter)
            self._is_adapted[join.row] = join.adapter is not None or join.request_id == _NO_REQUEST
        rows = np.array([join.row for join in joins], np.int64)
        slots = [-1 if join.adapter is None else join.adapter.slot for join in joins]
        if (self._slot_of_row[rows] == slots).all():
            return  # as always where nobody has an adapter
        self._slot_of_row[rows] = slots
        self._slots_R.index_copy_(
            0, to_device(rows, self._device), to_device(np.array(slots, np.int32), self._device)
        )

    def is_wanted(self, rows: Int32s) -> bool:
        return self._is_shared or bool(self._is_adapted[rows].any())

    def attach(self, batch: ForwardBatch, rows_T: Tensor, rows: Int32s | None) -> None:
        if rows is None or self.is_wanted(rows):
            slots_T, groups_NG = self._slots_R[rows_T], None
            if slots_T.is_cuda:
                groups_NG = lora_groups(slots_T[: batch.num_decodes], _GROUP_SIZE)
            batch.adapters = AdapterTokens(slots_T, groups_NG)

    def _hold(self, slot: int, adapter: Adapter) -> None:
        """The slot has this adapter from the next step on."""
        if self._held[slot] == adapter.id:
            return
        self._held[slot] = adapter.id
        try:
            found = self.host.get(adapter)
        except (ConfigError, OSError, MemoryError) as error:
            # On another rank it could be read. Its requests end, the others go on.
            _log.error("adapter '%s' cannot be read: %s", adapter.name, error)
            self._held[slot] = None
            for slots in self._slots.values():
                slots.spoil(slot)
            return
        for name, slots in self._slots.items():
            none = (None,) * len(slots.part_sizes)
            slots.load(slot, found.layers.get(name, none))


def _linear_layers(model: Decoder) -> dict[str, Linear]:
    """Of this stage. What drafts for the model is not among them: its drafts are checked."""
    return {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, Linear) and not name.startswith("draft_head.")
    }


def _adapted(sizes: dict[str, WholeSizes], config: LoraRun, rules: Rules) -> dict[str, WholeSizes]:
    """Of the linear layers of all stages those that get slots: whose modules are named, or all."""
    wanted = set(config.target_modules) or _targets(config)
    if wanted is None:
        return sizes
    named = {name: set(module_names(rules, name, sizes)) for name in sizes}
    known = set().union(*named.values())
    if unknown := sorted(wanted - known):
        raise ConfigError(
            f"lora_config.lora_target_modules names {', '.join(unknown)}: this model has no such "
            f"linear layers, but {', '.join(sorted(known))}; experts, embeddings and the head take "
            "no adapters"
        )
    return {name: size for name, size in sizes.items() if named[name] & wanted}


def _targets(config: LoraRun) -> set[str] | None:
    """What all adapters that are known from the start change; None: anything may come."""
    if config.may_load or not config.adapters:
        return None
    found = [read_adapter_config(Path(one.path)).target_modules for one in config.adapters]
    if not all(found):
        return None
    return {name.rpartition(".")[2] for names in found for name in names}


class HostAdapters:
    """Adapters in host memory: read in a thread, those used last are kept."""

    def __init__(self, reader: AdapterReader, max_adapters: int) -> None:
        self._reader = reader
        self.max_adapters = max_adapters
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._kept: OrderedDict[str, Future[HostAdapter]] = OrderedDict()  # by id, oldest first

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def prepare(self, adapter: Adapter, is_needed: Sequence[str] = ()) -> "Future[HostAdapter]":
        """Read it if it is not there. Of the others none is forgotten whose id `is_needed`."""
        found = self._kept.get(adapter.id)
        if found is None:
            found = self._pool.submit(self._reader.read, Path(adapter.path))
            self._kept[adapter.id] = found
            self._forget_oldest((adapter.id, *is_needed))
        self._kept.move_to_end(adapter.id)
        return found

    def get(self, adapter: Adapter) -> HostAdapter:
        """Now, however long it takes; one that could not be read is tried again next time."""
        try:
            return self.prepare(adapter).result()
        except BaseException:
            self.forget(adapter.id)
            raise

    def forget(self, adapter_id: str) -> None:
        self._kept.pop(adapter_id, None)

    def _forget_oldest(self, is_needed: Sequence[str]) -> None:
        for adapter_id in [one for one in self._kept if one not in is_needed]:
            if len(self._kept) <= self.max_adapters:
                return
            del self._kept[adapter_id]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
