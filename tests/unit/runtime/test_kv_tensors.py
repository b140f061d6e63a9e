"""The cache's own operations, on whatever device there is."""

from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.cache_groups import LayerGroup
from penstock.runtime.kv_tensors import KVTensors
from penstock.types.cache_spec import FullKV, LatentKV
from penstock.types.step import CopyBlock, Move

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bound_planes(spec, num_layers: int = 3, num_blocks: int = 6) -> tuple[KVTensors, list]:
    planes: list[tuple[torch.Tensor, ...]] = []
    layers = tuple(
        SimpleNamespace(bind_cache=lambda *own: planes.append(own)) for _ in range(num_layers)
    )
    kv = KVTensors([LayerGroup(spec=spec, layers=layers)], [num_blocks], 4, DEVICE)
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
    ],
    ids=lambda spec: f"{type(spec).__name__}-{spec.dtype}",
)
def test_blocks_come_back_from_host_memory_as_they_were(spec):
    kv, planes = bound_planes(spec)

    def bits(block: int) -> list[torch.Tensor]:
        return [plane[block].view(torch.uint8).clone() for own in planes for plane in own]

    second, third, fifth = bits(2), bits(3), bits(5)
    moves = [
        (2, 7, Move.OUT), (3, 0, Move.OUT),
        (1, 2, Move.WITHIN), (1, 3, Move.WITHIN),  # others have the blocks now
        (0, 4, Move.IN), (7, 1, Move.IN),
        (4, 7, Move.OUT), (7, 2, Move.IN),  # a place is used again
    ]  # fmt: skip
    kv.apply([CopyBlock(rank=0, group=0, src=a, dst=b, move=move) for a, b, move in moves])
    for block, expected in ((4, third), (1, second), (2, third), (5, fifth)):
        assert all(map(torch.equal, bits(block), expected)), block
