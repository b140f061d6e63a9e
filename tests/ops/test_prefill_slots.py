"""What programs of the prefill kernels do: every tile of every entry once, however many entries
are padding, and hardly any program nothing."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from penstock.kernels.attention.triton_prefill import num_slots, tile_of


@triton.jit
def _tiles(starts_ptr, found_ptr, first_entry, end_entry, G: tl.constexpr, ROWS: tl.constexpr):
    slot = tl.program_id(0)
    entry, tile = tile_of(slot, starts_ptr, first_entry, end_entry, G, ROWS)
    tl.store(found_ptr + 2 * slot, entry)
    tl.store(found_ptr + 2 * slot + 1, tile)


@pytest.mark.parametrize(
    ("lens", "first", "group", "rows"),
    [
        ((1024, *[0] * 15), 0, 4, 128),  # a lone prompt in a graph
        ((1, 1, 1, 300, 7, 0, 64, 0, 0), 3, 4, 128),  # beside decodes
        ((5, 1, 32, 31, 33, 64), 0, 1, 32),
        ((0, 0), 0, 8, 64),
    ],
)
def test_every_tile_of_every_entry_has_one_program(
    lens: tuple[int, ...], first: int, group: int, rows: int, device: torch.device
) -> None:
    starts = torch.tensor([0, *lens]).cumsum(0).int().to(device)
    slots = num_slots(sum(lens) - first, len(lens) - first, group, rows)
    found = torch.zeros(slots, 2, dtype=torch.int32, device=device)
    _tiles[(slots,)](starts, found, first, len(lens), G=group, ROWS=rows)
    pairs = [tuple(pair) for pair in found.tolist()]
    wanted = [
        (entry, tile)
        for entry in range(first, len(lens))
        for tile in range(-(-lens[entry] * group // rows))
    ]
    assert len(set(pairs)) == slots and set(pairs) >= set(wanted)
    assert slots <= len(wanted) + len(lens) - first
