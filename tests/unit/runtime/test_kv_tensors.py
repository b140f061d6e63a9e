"""The cache's own operations, on whatever device there is."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime import host_blocks
from penstock.runtime.cache_groups import LayerGroup
from penstock.runtime.kv_tensors import KVTensors
from penstock.types.cache_spec import FullKV, LatentKV, RecurrentState
from penstock.types.step import CopyBlock, SwapIn, SwapOut

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bound_planes(spec, num_layers: int = 3, num_blocks: int = 6) -> tuple[KVTensors, list]:
    planes: list[tuple[torch.Tensor, ...]] = []
    layers = tuple(
        SimpleNamespace(bind_cache=lambda *own: planes.append(own)) for _ in range(num_layers)
    )
    kv = KVTensors([LayerGroup(spec=spec, layers=layers)], [num_blocks], 4, DEVICE, [8])
    for own in planes:
        for plane in own:
            plane.view(torch.uint8).random_()
    return kv, planes


@pytest.mark.parametrize(
    "spec",
    [
        FullKV(num_kv_heads=2, head_size=8, dtype="float32"),
        FullKV(num_kv_heads=2, head_size=8, dtype="float8_e4m3fn"),
        FullKV(num_kv_heads=2, head_size=8, dtype="int8"),
        LatentKV(latent_size=8, rope_size=4, dtype="bfloat16"),
        RecurrentState(
            num_past=3,
            num_channels=5,
            conv_dtype="bfloat16",
            num_value_heads=2,
            key_size=3,
            value_size=7,
        ),
    ],
    ids=lambda spec: f"{type(spec).__name__}-{getattr(spec, 'dtype', 'states')}",
)
def test_blocks_come_back_from_host_memory_as_they_were(spec, monkeypatch):
    monkeypatch.setattr(host_blocks, "_SLAB_BYTES", 4096)  # a few blocks
    kv, planes = bound_planes(spec)

    def bits(block: int) -> list[torch.Tensor]:
        return [plane[block].view(torch.uint8).clone() for own in planes for plane in own]

    second, third, fifth = bits(2), bits(3), bits(5)
    moves = [
        (2, 7, SwapOut), (3, 0, SwapOut),
        (1, 2, CopyBlock), (1, 3, CopyBlock),  # others have the blocks now
        (0, 4, SwapIn), (7, 1, SwapIn),
        (4, 7, SwapOut), (7, 2, SwapIn),  # a host block is used again
    ]  # fmt: skip
    kv.apply([op(dp_rank=0, group=0, src=a, dst=b) for a, b, op in moves])
    for block, expected in ((4, third), (1, second), (2, third), (5, fifth)):
        assert all(map(torch.equal, bits(block), expected)), block


def test_host_memory_is_taken_when_needed_and_no_more_than_was_given(monkeypatch):
    planes = [torch.zeros(2, 5, 100, device=DEVICE)]  # blocks of 800 bytes
    monkeypatch.setattr(host_blocks, "_SLAB_BYTES", 2000)
    host = host_blocks.HostBlocks(planes, num_blocks=10)
    assert not host._slabs
    first = host[0]
    assert [part.shape for part in first] == [(2, 100)]
    assert len(host._slabs) == 5  # two blocks each
    assert host[9][0].data_ptr() != host[8][0].data_ptr()
    assert sum(slab.result().nbytes for slab in host._slabs) == 8000
    first[0].fill_(1.0)
    assert host[0][0].eq(1.0).all() and host[1][0].eq(0.0).all()
    assert host[1][0].is_pinned() == (DEVICE.type == "cuda")


@pytest.mark.parametrize("error", [0, 712])
def test_what_is_pinned_is_given_back_before_its_memory(error, monkeypatch):
    calls: list[tuple[str, int]] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("pin", address))
            return error

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unpin", address))

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    memory = mmap.mmap(-1, 8192)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    address = slab.data_ptr()
    host_blocks._pin(memory, slab)
    assert calls == [("pin", address)]
    del memory, slab
    gc.collect()
    assert calls[1:] == ([] if error else [("unpin", address)])
