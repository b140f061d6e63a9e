"""Drives a model with hand-built batches: sequences, scattered cache blocks, any mix of chunks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.batch import ForwardBatch
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quant.choose import Schemes
from penstock.types.cache_spec import RecurrentState
from penstock.weights.load import load_weights

BLOCK_SIZE = 4
CPU = torch.device("cpu")


class PagedDriver:
    """Sequence s lives in row s; its blocks are drawn at random, never block 0. Layers with states
    are group 1, the others group 0."""

    def __init__(self, model, num_rows: int = 4, max_len: int = 128) -> None:
        self.model = model
        num_columns = max_len // BLOCK_SIZE
        blocks = list(range(1, num_rows * num_columns + 1))
        random.Random(0).shuffle(blocks)
        self.table = torch.tensor(blocks, dtype=torch.int32).view(num_rows, num_columns)
        self.lengths = [0] * num_rows
        for layer in model.cache_layers():
            spec = layer.cache_spec()
            has_states = isinstance(spec, RecurrentState)
            num_blocks = 2 * num_rows if has_states else len(blocks) + 1
            layer.group = int(has_states)
            layer.bind_cache(
                *(
                    torch.full(
                        (num_blocks, *plane.shape), torch.nan, dtype=getattr(torch, plane.dtype)
                    )
                    for plane in spec.planes(BLOCK_SIZE)
                )
            )

    @torch.inference_mode()
    def step(self, entries: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Run (row, new token ids) entries as one batch; logits of every token, entry by entry."""
        sizes = [len(ids) for _, ids in entries]
        num_decodes = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
        ids, positions, slots, states, kv_lens = [], [], [], [], []
        for row, new_ids in entries:
            for token_id in new_ids:
                position = self.lengths[row]
                block = int(self.table[row, position // BLOCK_SIZE])
                ids.append(token_id)
                positions.append(position)
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
                states.append(2 * row + 1)
                self.lengths[row] += 1
            kv_lens.append(self.lengths[row])
        batch = ForwardBatch(
            input_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            rows_N=torch.tensor([row for row, _ in entries], dtype=torch.int32),
            query_starts_N1=torch.tensor([0, *sizes]).cumsum(0).int(),
            kv_lens_N=torch.tensor(kv_lens, dtype=torch.int32),
            block_table_RM=self.table,
            num_decodes=num_decodes,
            max_query_len=max(sizes),
            max_kv_len=max(kv_lens),
            cached_lens=tuple(kv_len - size for kv_len, size in zip(kv_lens, sizes, strict=True))[
                num_decodes:
            ],
        )
        batch.others = (replace(batch, slots_T=torch.tensor(states), plans={}),)
        return list(self.model.logits(self.model(batch)).split(sizes))


def load_model(
    folder: Path,
    mesh: RankMesh | None = None,
    dtype: torch.dtype = torch.float32,
    schemes: Schemes | None = None,
    finished: bool = False,
):
    """With `schemes`, or `finished`, it is in the form in which the engine runs it; without, its
    parameters are the checkpoint's numbers, and most models run so as well."""
    mesh = mesh or RankMesh.single()
    spec = parse_model_spec(folder)
    model = build_model(spec, mesh, dtype, CPU, get_backend("reference"), schemes)
    load_weights(model, folder, spec, mesh, progress=False)
    if finished or schemes is not None:
        with torch.inference_mode():
            model.finish()
    return model


def prompts(vocab_size: int, lengths: Sequence[int] = (13, 9, 22)) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def mixed_run(model, sequences: list[list[int]]) -> list[Tensor]:
    """Logits at every position of three sequences: one prefilled at once, one late, one in chunks,
    with decode steps of the others in the same batches."""
    driver = PagedDriver(model)
    found: list[list[Tensor]] = [[], [], []]
    first, second, third = sequences
    cuts = [len(third) // 3, len(third) // 2, len(third) - 1]
    schedule = [
        [(0, first[:-3]), (2, third[: cuts[0]])],
        [(0, first[-3:-2]), (2, third[cuts[0] : cuts[1]]), (1, second[:-2])],
        [(1, second[-2:-1]), (0, first[-2:-1]), (2, third[cuts[1] : cuts[2]])],
        [(2, third[cuts[2] :]), (1, second[-1:]), (0, first[-1:])],
    ]
    for entries in schedule:
        for (row, _), logits in zip(entries, driver.step(entries), strict=True):
            found[row].append(logits)
    return [torch.cat(parts) for parts in found]
