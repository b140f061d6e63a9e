"""Context parallelism: the ranks of axis cp share the tokens of every sequence.

- Cache: rank r has the r-th of the equal parts of each block. Layers of windows, which keep few
  tokens, have whole blocks on every rank.
- Prompts: each rank has some of the step's tokens (`parallel/prompt_runs.py`), from the embedding
  to the final norm. In front of attention keys and values of all ranks come together: those of the
  step, and what the cache has of the sequences before it, for this one layer. Attention itself is
  that of one rank: a run of a prompt, behind a prefix.
- Decodes: every rank has all of them. Each attends to its part of the cache, and the results are
  merged by the sums of exponentials.
"""

# T tokens in the step, Q of them of prompts, P of those on this rank, D hidden size
# N entries, E chunks of prompts, R ranks, H heads of this rank, V value size
# B cache blocks, S tokens of one on this rank, M blocks a row may have

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.attention.partial import merged
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.transfer import to_device
from penstock.layers.context import LayerContext
from penstock.parallel.collectives import (
    all_reduce,
    gather_blocks,
    gather_packed,
    gather_tokens,
    scatter_sums,
)
from penstock.parallel.prompt_runs import Run, zigzag
from penstock.types.cache_spec import FullKV, LatentKV

Tensors = tuple[Tensor, ...]
Int64s = NDArray[np.int64]


class SharedAttention(Protocol):
    """What of an attention layer is the same however its tokens are shared."""

    num_parts: int
    sinks: Tensor | None
    planes: Tensors

    def cache_spec(self) -> FullKV | LatentKV: ...

    def write(
        self, inputs: Tensors, positions_T: Tensor, planes: Tensors, slots_T: Tensor
    ) -> Tensors:
        """Keys and values into `planes`; what `attend` needs of each token."""

    def attend(self, queries: Tensors, planes: Tensors, batch: ForwardBatch) -> Tensor:
        """out_THV of the step's tokens."""

    def attend_part(
        self, queries: Tensors, batch: ForwardBatch, kv_lens_N: Tensor, max_kv_len: int
    ) -> tuple[Tensor, Tensor]:
        """(out_NHV, lse_NH) of decodes over the first keys of the layer's own planes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The prompt tokens of a step and who has them. Numbers count from the first prompt token."""

    runs: list[Run]  # of this rank
    own: Int64s  # [P]
    all: Int64s  # [Q], rank after rank
    counts_R: tuple[int, ...] | None  # of each rank; None: fewer tokens than ranks, all have all
    own_T: Tensor  # on the device: decodes and own tokens of the step
    all_Q: Tensor  # the same numbers as `all`, of the step
    places_Q: Tensor  # of each prompt token among `all`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Chunks whose keys and values are on this rank together, for one layer at a time.

    The blocks of what was cached before come first, those of rank 0 before those of rank 1, then
    zeros for what the step adds.
    """

    num_blocks: int
    blocks_B: Tensor  # cached before, of this rank's cache
    tokens: Tensor  # of the step's, among `_Share.all`
    slots: Tensor  # where they go
    own: slice  # of this rank's prompt tokens
    batch: ForwardBatch | None  # its runs; None: it has none


class ContextRanks:
    def __init__(self, build: LayerContext) -> None:
        role = build.mesh.role("context")
        self.rank, self.size = role.rank, role.size
        self._role, self._copies = role, build.mesh.role("copies")
        self._heads = build.mesh.role("attention")
        self._num_positions = build.num_positions

    # The stream: which tokens this rank has of it

    def splits(self, batch: ForwardBatch) -> bool:
        """Whether ranks have other tokens of this step."""
        return self.size > 1 and bool(batch.chunk_lens) and self._share(batch).counts_R is not None

    def num_own(self, batch: ForwardBatch) -> int:
        return len(self._share(batch).own_T) if self.splits(batch) else batch.num_tokens

    def own(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Of all tokens, those that this rank has."""
        return x_TD[self._share(batch).own_T] if self.splits(batch) else x_TD

    def all(self, x_PD: Tensor, batch: ForwardBatch) -> Tensor:
        """The way back: of all tokens, in order."""
        if not self.splits(batch):
            return x_PD
        decodes_ND, prompts_QD = self._gathered(x_PD, batch)
        return torch.cat((decodes_ND, prompts_QD[self._share(batch).places_Q]))

    def own_tokens(self, batch: ForwardBatch) -> Tensor:
        """Which tokens of the step `own` takes."""
        return self._share(batch).own_T

    def gathered_tokens(self, batch: ForwardBatch) -> Tensor:
        """Which token of the step lies where behind `gather`."""
        decodes_N = torch.arange(batch.num_decodes, device=batch.rows_N.device)
        return torch.cat((decodes_N, self._share(batch).all_Q))

    def gather(self, x_PD: Tensor, batch: ForwardBatch) -> Tensor:
        """Of all tokens, in the order that `scatter` expects."""
        return torch.cat(self._gathered(x_PD, batch))

    def scatter(self, y_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """`y_TD`: this rank's part of the sums. Returns the sums of the tokens that it has."""
        num_decodes, counts_R = batch.num_decodes, self._share(batch).counts_R
        own_PD = scatter_sums(y_TD[num_decodes:], self._role, counts_R)
        own_PD = all_reduce(own_PD, self._heads)
        if not num_decodes:
            return own_PD
        return torch.cat((all_reduce(y_TD[:num_decodes].contiguous(), self._copies), own_PD))

    def _gathered(self, x_PD: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        decodes_ND, own_PD = x_PD.tensor_split([batch.num_decodes])
        return decodes_ND, gather_tokens(own_PD, self._role, self._share(batch).counts_R)

    def _share(self, batch: ForwardBatch) -> _Share:
        if _Share not in batch.plans:
            batch.plans[_Share] = self._make_share(batch)
        share: _Share = batch.plans[_Share]
        return share

    def _make_share(self, batch: ForwardBatch) -> _Share:
        lens = batch.chunk_lens
        assert lens is not None, "the host knows every step with prompts"
        starts = list(itertools.accumulate(lens, initial=0))
        by_rank = [[Run(chunk, 0, length) for chunk, length in enumerate(lens)]]
        if is_split := starts[-1] >= self.size:
            by_rank = zigzag(lens, self.size)
        tokens_R = [
            np.concatenate([np.arange(run.start, run.end) + starts[run.chunk] for run in runs])
            for runs in by_rank
        ]
        mine = self.rank if is_split else 0
        own, everyone = tokens_R[mine], np.concatenate(tokens_R)
        own_T = np.concatenate((np.arange(batch.num_decodes), own + batch.num_decodes))
        device = batch.rows_N.device
        return _Share(
            runs=by_rank[mine],
            own=own,
            all=everyone,
            counts_R=tuple(map(len, tokens_R)) if is_split else None,
            own_T=to_device(own_T, device),
            all_Q=to_device(everyone + batch.num_decodes, device),
            places_Q=to_device(np.argsort(everyone), device),
        )

    # Attention

    def attend(self, layer: SharedAttention, inputs: Tensors, batch: ForwardBatch) -> Tensor:
        """out_THV of the tokens that this rank has; `inputs` are theirs, `batch` the layer's."""
        num_decodes, outputs = batch.num_decodes, []
        if num_decodes:
            outputs.append(self._decodes(layer, tuple(x[:num_decodes] for x in inputs), batch))
        if batch.chunk_lens:
            outputs += self._prompts(layer, tuple(x[num_decodes:] for x in inputs), batch)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decodes(self, layer: SharedAttention, inputs: Tensors, batch: ForwardBatch) -> Tensor:
        batch = _decodes_only(batch)
        queries = layer.write(inputs, batch.positions_T, layer.planes, batch.slots_T)
        if layer.num_parts == 1:
            return layer.attend(queries, layer.planes, batch)
        here = layer.planes[0].shape[_token_dim(layer, 0)]
        if merged not in batch.plans:
            batch.plans[merged] = self._own_lens(batch.kv_lens_N, here)
        lens_N = batch.plans[merged]
        most = -(-batch.max_kv_len // (here * self.size)) * here
        # Of a sequence without keys here a block is read all the same, and counts for nothing.
        out_NHV, lse_NH = layer.attend_part(queries, batch, lens_N.clamp(min=1), most)
        lse_NH = lse_NH.masked_fill((lens_N == 0)[:, None], -torch.inf)
        parts = gather_packed((out_NHV, lse_NH), self._role, None)
        out_RNHV, lse_RNH = (part.unflatten(0, (self.size, -1)) for part in parts)
        return merged(out_RNHV, lse_RNH, layer.sinks)

    def _own_lens(self, kv_lens_N: Tensor, here: int) -> Tensor:
        """How many of each sequence's tokens lie on this rank."""
        num_full, rest_N = kv_lens_N // (here * self.size), kv_lens_N % (here * self.size)
        return num_full * here + (rest_N - self.rank * here).clamp(0, here)

    def _prompts(
        self, layer: SharedAttention, inputs: Tensors, batch: ForwardBatch
    ) -> list[Tensor]:
        share = self._share(batch)
        num_own, num_decodes = len(share.own), batch.num_decodes
        one_token = layer.cache_spec().planes(1)
        fresh = tuple(
            plane.new_empty((num_own, *shape.shape))
            for plane, shape in zip(layer.planes, one_token, strict=True)
        )
        own_T = share.own_T[num_decodes:]
        slots_P = torch.arange(num_own, device=own_T.device)
        queries = layer.write(inputs, batch.positions_T[own_T], fresh, slots_P)
        if share.counts_R is not None:
            fresh = tuple(gather_packed(fresh, self._role, share.counts_R))
        slots_Q = batch.slots_T[share.all_Q]
        for number, plane in enumerate(layer.planes):
            _store(plane, _token_dim(layer, number), slots_Q, fresh[number])
        if layer.num_parts == 1:
            if _runs_batch not in batch.plans:
                batch.plans[_runs_batch] = _runs_batch(batch, share.runs, own_T)
            return [layer.attend(queries, layer.planes, batch.plans[_runs_batch])]
        if _Piece not in batch.plans:
            here = layer.planes[0].shape[_token_dim(layer, 0)]
            batch.plans[_Piece] = self._make_pieces(batch, share, here)
        outputs = []
        for piece in batch.plans[_Piece]:
            planes = tuple(
                self._filled(plane, _token_dim(layer, number), piece, fresh[number])
                for number, plane in enumerate(layer.planes)
            )
            if piece.batch is not None:
                own = tuple(query[piece.own] for query in queries)
                outputs.append(layer.attend(own, planes, piece.batch))
        return outputs

    def _filled(self, plane: Tensor, dim: int, piece: _Piece, fresh: Tensor) -> Tensor:
        """A plane that holds all that the piece's chunks attend to."""
        filled = plane.new_empty((piece.num_blocks, *plane.shape[1:]))
        num_cached = self.size * len(piece.blocks_B)
        if num_cached:
            blocks = plane.view(torch.uint8)[piece.blocks_B]
            gather_blocks(blocks, self._role, filled[:num_cached])
        filled[num_cached:].zero_()
        _store(filled, dim, piece.slots, fresh[piece.tokens])
        return filled

    def _make_pieces(self, batch: ForwardBatch, share: _Share, here: int) -> list[_Piece]:
        """As many chunks together as have no more keys than the longest sequence."""
        assert batch.cached_lens is not None and batch.chunk_lens is not None
        cached, lens = np.array(batch.cached_lens), np.array(batch.chunk_lens)
        whole = here * self.size
        num_blocks = -(-(cached + lens) // whole)
        most = num_blocks.max()
        if self._num_positions is not None:
            most = max(most, -(-self._num_positions // whole))
        cuts = [0]
        for chunk in range(len(lens)):
            if num_blocks[cuts[-1] : chunk + 1].sum() > most:
                cuts.append(chunk)
        cuts.append(len(lens))
        return [
            self._make_piece(batch, share, here, range(*ends)) for ends in itertools.pairwise(cuts)
        ]

    def _make_piece(self, batch: ForwardBatch, share: _Share, here: int, chunks: range) -> _Piece:
        assert batch.cached_lens is not None and batch.chunk_lens is not None
        device, size = batch.rows_N.device, self.size
        is_in_E = np.isin(np.arange(len(batch.chunk_lens)), chunks)
        cached_E, lens_E = np.array(batch.cached_lens) * is_in_E, np.array(batch.chunk_lens)
        num_cached_E = -(-cached_E // (here * size))  # blocks, as the scheduler counts them
        num_parts_E = -(-(cached_E + lens_E) // here) * is_in_E  # of blocks, that hold tokens
        num_new_E = np.maximum(num_parts_E - size * num_cached_E, 0)
        first_cached_E, first_new_E = (np.cumsum(num) - num for num in (num_cached_E, num_new_E))
        num_cached, num_new = int(num_cached_E.sum()), int(num_new_E.sum())
        table_EM = np.zeros((len(lens_E), int((size * num_cached_E + num_new_E).max())), np.int32)
        for chunk in chunks:
            behind = size * num_cached_E[chunk]
            blocks = np.arange(num_cached_E[chunk]) + first_cached_E[chunk]
            table_EM[chunk, :behind] = (blocks[:, None] + np.arange(size) * num_cached).ravel()
            new = np.arange(num_new_E[chunk]) + size * num_cached + first_new_E[chunk]
            table_EM[chunk, behind : behind + len(new)] = new
        # Where the step's tokens go, those of other chunks anywhere.
        chunk_Q = np.repeat(np.arange(len(lens_E)), lens_E)
        position_Q = np.arange(len(chunk_Q)) - np.repeat(np.cumsum(lens_E) - lens_E, lens_E)
        position_Q = (position_Q + cached_E[chunk_Q]) * is_in_E[chunk_Q]
        slots_Q = table_EM[chunk_Q, position_Q // here].astype(np.int64) * here + position_Q % here
        tokens = np.flatnonzero(is_in_E[chunk_Q[share.all]])
        own = slice(*np.searchsorted(chunk_Q[share.own], (chunks.start, chunks.stop)).tolist())
        chunk_B = np.repeat(np.arange(len(lens_E)), num_cached_E)
        column_B = to_device(np.arange(num_cached) - first_cached_E[chunk_B], device)
        rows_B = batch.rows_N[batch.num_decodes :][to_device(chunk_B, device)].long()
        own_batch = None
        if runs := [run for run in share.runs if run.chunk in chunks]:
            own_batch = replace(
                _runs_batch(batch, runs, share.own_T[batch.num_decodes :][own]),
                rows_N=to_device(np.array([run.chunk for run in runs], np.int32), device),
                slots_T=to_device(slots_Q[share.own[own]], device),
                block_table_RM=to_device(table_EM, device),
            )
        return _Piece(
            num_blocks=size * num_cached + num_new,
            blocks_B=batch.block_table_RM[rows_B, column_B].long(),
            tokens=to_device(tokens, device),
            slots=to_device(slots_Q[share.all[tokens]], device),
            own=own,
            batch=own_batch,
        )


def _token_dim(layer: SharedAttention, number: int) -> int:
    """Of a plane's dimensions the one that counts the tokens of a block."""
    spec = layer.cache_spec()
    sizes = zip(spec.planes(1)[number].shape, spec.planes(2)[number].shape, strict=True)
    return 1 + next(dim for dim, (one, two) in enumerate(sizes) if one != two)


def _store(plane: Tensor, dim: int, slots_T: Tensor, values: Tensor) -> None:
    """Planes of blocks of one token, `values`, to where these tokens go."""
    if plane.dtype.itemsize == 1:  # indexed writes know no FP8
        plane, values = plane.view(torch.uint8), values.view(torch.uint8)
    size = plane.shape[dim]
    plane.movedim(dim, 1)[slots_T // size, slots_T % size] = values.squeeze(dim)


def _decodes_only(batch: ForwardBatch) -> ForwardBatch:
    num = batch.num_decodes
    if num == batch.num_entries:
        return batch
    if _decodes_only not in batch.plans:
        batch.plans[_decodes_only] = replace(
            batch,
            input_ids_T=batch.input_ids_T[:num],
            positions_T=batch.positions_T[:num],
            slots_T=batch.slots_T[:num],
            rows_N=batch.rows_N[:num],
            query_starts_N1=batch.query_starts_N1[: num + 1],
            kv_lens_N=batch.kv_lens_N[:num],
            others=(),
            plans={},
            cached_lens=None,
            chunk_lens=None,
        )
    decodes: ForwardBatch = batch.plans[_decodes_only]
    return decodes


def _runs_batch(batch: ForwardBatch, runs: Sequence[Run], own_T: Tensor) -> ForwardBatch:
    """Each run as a prompt of its own behind what comes before it, in the cache of the batch."""
    assert batch.cached_lens is not None
    device = batch.rows_N.device
    lens = np.array([run.num_tokens for run in runs])
    before = np.array([batch.cached_lens[run.chunk] + run.start for run in runs])
    chunks = np.array([run.chunk for run in runs])
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[own_T],
        positions_T=batch.positions_T[own_T],
        slots_T=batch.slots_T[own_T],
        rows_N=batch.rows_N[batch.num_decodes :][to_device(chunks, device)],
        query_starts_N1=to_device(np.append(0, np.cumsum(lens)).astype(np.int32), device),
        kv_lens_N=to_device((before + lens).astype(np.int32), device),
        num_decodes=0,
        max_kv_len=int((before + lens).max()),
        others=(),
        plans={},
        cached_lens=tuple(before.tolist()),
        chunk_lens=tuple(lens.tolist()),
    )
