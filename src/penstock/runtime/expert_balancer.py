"""`ExpertBalancer` measures the load of experts on all ranks, and moves them while it serves;
`LoadRecord` writes the load to a file.

Weights go from rank to rank into memory of their own, then into the slots, in stream order behind
the steps before: graphs keep their addresses, and nothing stops.
"""

# L layers of experts, E experts

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock import log
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.kernels.transfer import start_copy_to_host
from penstock.layers.decoder import Decoder
from penstock.layers.moe import Experts
from penstock.parallel.all_to_all import largest, swapped
from penstock.parallel.collectives import all_reduce
from penstock.parallel.mesh import RankMesh, RoleGroup
from penstock.quantization.expert_slots import slot_tensors
from penstock.runtime.expert_schedule import STEPS_LATE, BalanceSchedule, SlotChange, moves

_STEPS_BETWEEN_RECORDS = 100
_log = log.get(__name__)


def balancing(model: Decoder, mesh: RankMesh, config: RunConfig) -> list[Callable[[], None]]:
    """What is done about the load of experts before each step."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    role = mesh.role("tokens" if mesh.shape.dp > 1 else "copies")  # all who share the experts
    turns: list[Callable[[], None]] = []
    if layers and config.expert_slots is not None and config.expert_slots.layer_updates:
        turns.append(ExpertBalancer(layers, role, config.expert_slots.layer_updates).turn)
    if layers and config.expert_load_path is not None:
        turns.append(LoadRecord(layers, role, Path(config.expert_load_path)).turn)
    return turns


class _Load:
    """Tokens that the experts of each layer were given on all ranks, since now."""

    def __init__(self, layers: Sequence[Experts], role: RoleGroup) -> None:
        self._layers, self._role = layers, role
        self._host_LE = torch.zeros(0)
        self._event: torch.cuda.Event | None = None
        for layer in layers:
            layer.load_S.zero_()

    def start(self) -> None:
        load_LE = all_reduce(torch.stack([layer.load_S for layer in self._layers]), self._role)
        self._host_LE = start_copy_to_host(load_LE)
        if load_LE.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[int]]:
        """What the last `start` found."""
        if self._event is not None:
            self._event.synchronize()
        found: list[list[int]] = self._host_LE.tolist()
        return found


class ExpertBalancer:
    def __init__(self, layers: Sequence[Experts], role: RoleGroup, layer_updates: int) -> None:
        self._layers, self._role = layers, role
        for layer in layers:
            self._check(layer)
        load = _Load(layers, role)
        self._schedule = BalanceSchedule(
            [layer.experts_S for layer in layers],
            layers[0].num_experts,
            role.size,
            layer_updates,
            load.start,
            load.read,
        )

    @torch.inference_mode()
    def turn(self) -> None:
        for change in self._schedule.next_step():
            self._move(change)

    def _move(self, change: SlotChange) -> None:
        layer, own_rank = self._layers[change.layer], self._role.rank
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        slots: list[Tensor] = []  # where each that is received belongs
        for source, target in moves(layer.experts_S, change.experts_S):
            (sender, from_slot), (receiver, to_slot) = (
                divmod(slot, layer.num_slots) for slot in (source, target)
            )
            if sender == own_rank:
                tensors = slot_tensors(layer, from_slot)
                sends += [(receiver, one.contiguous()) for one in tensors]
            elif receiver == own_rank:
                tensors = slot_tensors(layer, to_slot)
                slots += tensors
                receives += [(sender, one.new_empty(one.shape)) for one in tensors]
        swapped(sends, receives, self._role)
        for slot, (_, arrived) in zip(slots, receives, strict=True):
            slot.copy_(arrived)
        layer.place(change.experts_S)
        if own_rank == 0:
            _log.debug("layer %d: experts moved to balance their load", layer.layer)

    def _check(self, layer: Experts) -> None:
        """An expert takes the place of any other if slots have the same shapes on all ranks."""
        forms = {
            str([(one.shape, one.dtype) for one in slot_tensors(layer, slot)])
            for slot in range(layer.num_slots)
        }
        number = zlib.crc32(min(forms).encode()) if len(forms) == 1 else self._role.rank
        found = largest(torch.tensor([number, -number], device=layer.device), self._role)
        if len(forms) > 1 or int(found.sum()):
            raise ConfigError(
                "moe_config.load_balancer.layer_updates_per_iter is set, but the experts of layer "
                f"{layer.layer} are stored in several forms, and cannot take each other's place; "
                "leave it out, and give initial_global_assignments"
            )


class LoadRecord:
    def __init__(self, layers: Sequence[Experts], role: RoleGroup, path: Path) -> None:
        self._load, self._path, self._is_first = _Load(layers, role), path, role.rank == 0
        self._layers, self._num_experts = [one.layer for one in layers], layers[0].num_experts
        self._num_steps = 0

    @torch.inference_mode()
    def turn(self) -> None:
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_RECORDS == 0:
            self._load.start()
        since = self._num_steps - STEPS_LATE
        if self._is_first and since > 0 and since % _STEPS_BETWEEN_RECORDS == 0:
            self._write()

    def _write(self) -> None:
        load = dict(zip(self._layers, self._load.read(), strict=True))
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps({"num_experts": self._num_experts, "load": load}))
        os.replace(partial, self._path)
