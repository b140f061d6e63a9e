"""What the device knows of each running sequence (`Rows`), and a plan turned into tensors.

True lengths and last tokens live here, on the device. A decode step is built from them alone: the
host sends row numbers. Nothing in this file waits for the device.
"""

# R rows (the last one is padding), M blocks a row may have, N entries, T tokens, L logit rows,
# K most drafts of a row

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.forward_batch import DraftedSpans, ForwardBatch, Runs
from penstock.kernels.gather import decode_inputs
from penstock.kernels.transfer import to_device
from penstock.runtime.batch_fields import BatchField
from penstock.runtime.step_layout import StepShape
from penstock.sampling.verification import Accepted, DraftedRows
from penstock.types.step import FROM_DEVICE, Int32s, StepPlan

_ALIGNED = 4  # numbers in 16 bytes


def all_to_device(arrays: list[Int32s], device: torch.device) -> list[Tensor]:
    """Several host arrays in one copy. Each begins at a multiple of 16 bytes: for any other address
    Triton would compile its kernels once more, in the middle of serving."""
    sizes = [len(array) for array in arrays]
    *starts, total = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)])
    packed = np.zeros(total, np.int32)
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    for place, array in zip(places, arrays, strict=True):
        packed[place] = array
    on_device = to_device(packed, device)
    return [on_device[place] for place in places]


def fed_tokens(plan: StepPlan) -> tuple[Int32s, Int32s]:
    """Of each token that decodes feed: its row, and how far it is behind the row's last token."""
    fed = plan.num_tokens[: plan.num_decodes]
    firsts = np.cumsum(fed) - fed
    offsets = np.arange(int(fed.sum()), dtype=np.int32) - np.repeat(firsts, fed)
    return np.repeat(plan.rows[: plan.num_decodes], fed), offsets.astype(np.int32)


def by_token(plan: StepPlan) -> StepPlan:
    """The step with every token that decodes feed as a decode of its own; `starts` say how far it
    is behind its row's last token: FROM_DEVICE less that."""
    num_decodes = plan.num_decodes
    rows, offsets = fed_tokens(plan)
    fed, ones = plan.num_tokens[:num_decodes], np.ones_like(rows)
    return replace(
        plan,
        dp_ranks=np.append(
            np.repeat(plan.dp_ranks[:num_decodes], fed), plan.dp_ranks[num_decodes:]
        ),
        rows=np.append(rows, plan.rows[num_decodes:]),
        starts=np.append(FROM_DEVICE - offsets, plan.starts[num_decodes:]),
        num_tokens=np.append(ones, plan.num_tokens[num_decodes:]),
        num_logit_rows=np.append(ones, plan.num_logit_rows[num_decodes:]),
        max_kv_lens=np.append(
            np.repeat(plan.max_kv_lens[:num_decodes], fed), plan.max_kv_lens[num_decodes:]
        ),
        num_decodes=len(rows),
    )


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step, ready to run: the model's batch, and which tokens' hidden states become logits."""

    batch: ForwardBatch
    rows_L: Tensor  # int64: device rows that sample
    kv_lens_L: Tensor  # int32: their lengths, the index of the token they sample
    rows: NDArray[np.int32]  # the same rows on the host
    logit_index_L: Tensor | None  # token of each logit row; None: all of them, in order
    drafted: DraftedRows | None = None  # None: one logit row an entry


class Rows:
    """Persistent state of `max_rows` rows and one padding row, which points to block 0."""

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        groups: Sequence[bool] = (True,),
        max_drafts: int = 0,
        fields: Sequence[BatchField] = (),
        num_positions: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """`groups`: of each cache group, whether blocks hold `block_size` tokens; else one holds
        the whole sequence, and a token's slot is that block. `fields`: of features.
        `num_positions`: that a token may have, where that is less than its row has blocks for.
        `part`: which of how many equal parts of each block of group 0 is here; tokens of the others
        are written to the padding block."""
        self.device = device
        self.num_positions = num_positions or max_blocks * block_size
        self.block_size = block_size
        self.padding_row = max_rows
        self.last_tokens_R = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.lengths_R = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.drafts_RK = torch.full((max_rows + 1, max_drafts), -1, device=device)
        self.block_tables = [
            torch.zeros(
                (max_rows + 1, max_blocks if is_paged else 1), dtype=torch.int32, device=device
            )
            for is_paged in groups
        ]
        self._is_paged = tuple(groups)
        self._part, self._num_parts = part
        self._fields = tuple(fields)
        # Numbers that a decode graph takes of each token.
        self.decode_width = 2 if max_drafts else 1
        num_entries = max_rows * (1 + max_drafts) + 1
        self._arange_R1 = torch.arange(num_entries + 1, dtype=torch.int32, device=device)
        self._prefill_ids: dict[int, Int32s] = {}  # host: what each row must prefill

    def apply(self, plan: StepPlan) -> None:
        """Rows that join and blocks that rows gain."""
        for join in plan.joins:
            self._prefill_ids[join.row] = join.token_ids
        for field in self._fields:
            field.begin(plan)
        if plan.decode_tokens is not None and plan.num_decodes:
            self._take_over(plan, plan.decode_tokens)
        growth = plan.growth
        for group, table_RM in enumerate(self.block_tables):
            own = growth.groups == group
            if not own.any():
                continue
            places = growth.rows[own].astype(np.int64) * table_RM.shape[1] + growth.indices[own]
            packed = np.concatenate((places.view(np.int32), growth.block_ids[own]))  # one copy
            places_P2, block_ids_P = to_device(packed, self.device).tensor_split([2 * len(places)])
            table_RM.view(-1).index_copy_(0, places_P2.view(torch.int64), block_ids_P)

    def _take_over(self, plan: StepPlan, tokens_NW: Int32s) -> None:
        """What other ranks have drawn and drafted for the decodes, and how long that makes them."""
        decodes = slice(plan.num_decodes)
        lengths = plan.max_kv_lens[decodes] - plan.num_tokens[decodes]
        arrays = [plan.rows[decodes], lengths, tokens_NW.ravel()]
        rows, lengths_N, flat_ids = all_to_device(arrays, self.device)
        rows_N, ids_NW = rows.long(), flat_ids.long().view(len(rows), -1)
        self.accept(rows_N, ids_NW[:, 0])
        self.lengths_R.index_copy_(0, rows_N, lengths_N)
        if ids_NW.shape[1] > 1:
            self.drafts_RK.index_copy_(0, rows_N, ids_NW[:, 1:])

    def build(self, plan: StepPlan, *, is_grown: bool = False) -> StepInputs:
        """The tensors of a step with any mix of prompt chunks and decodes. `is_grown`: once more,
        rows are as long as the step made them."""
        sampling = np.flatnonzero(plan.num_logit_rows).astype(np.int32)
        arrays = self._host_arrays(plan)
        *tensors, sampling_L = all_to_device([*arrays, sampling], self.device)
        batch = self._batch(
            tensors,
            num_decodes=plan.num_decodes,
            max_kv_len=int(plan.max_kv_lens.max()),
            cached_lens=tuple(plan.starts[plan.num_decodes :].tolist()),
            chunk_lens=tuple(plan.num_tokens[plan.num_decodes :].tolist()),
            rows=plan.rows,
            is_grown=is_grown,
        )
        sampling_rows = sampling_L.long()
        return StepInputs(
            batch=batch,
            rows_L=batch.rows_N.long()[sampling_rows],
            kv_lens_L=batch.kv_lens_N[sampling_rows],
            rows=plan.rows[sampling],
            logit_index_L=(batch.query_starts_N1[1:].long() - 1)[sampling_rows],
        )

    def build_drafted(self, plan: StepPlan, *, is_grown: bool = False) -> StepInputs:
        """The same where a decode has drafts: each of its tokens is an entry of the batch."""
        num_decodes, counts = plan.num_decodes, plan.num_tokens
        fed, num_fed = counts[:num_decodes], int(counts[:num_decodes].sum())
        num_single, ends = int((fed == 1).sum()), np.cumsum(counts)
        tokens = by_token(plan)
        sampling = np.flatnonzero(plan.num_logit_rows)
        sampling_chunks = sampling[sampling >= num_decodes]
        *tensors, starts_E1, logit_index_L, rows_L = all_to_device(
            [
                *self._host_arrays(tokens),
                np.append(0, ends),
                np.append(np.arange(num_fed), ends[sampling_chunks] - 1),
                np.append(tokens.rows[:num_fed], plan.rows[sampling_chunks]),
            ],
            self.device,
        )
        batch = self._batch(
            tensors,
            num_decodes=num_fed,
            max_kv_len=int(plan.max_kv_lens.max()),
            cached_lens=tuple(plan.starts[num_decodes:].tolist()),
            chunk_lens=tuple(counts[num_decodes:].tolist()),
            rows=plan.rows,
            is_grown=is_grown,
            has_drafts=True,
            drafted=None
            if all(self._is_paged)
            else DraftedSpans(
                starts_E1=starts_E1,
                num_single=num_single,
                num_drafted=num_decodes - num_single,
            ),
        )
        logit_index = logit_index_L.long()
        return StepInputs(
            batch=batch,
            rows_L=rows_L.long(),
            kv_lens_L=batch.positions_T[logit_index].int() + 1,
            rows=np.append(tokens.rows[:num_fed], plan.rows[sampling_chunks]),
            logit_index_L=logit_index,
            drafted=self.drafted_rows(plan),
        )

    def drafted_rows(self, plan: StepPlan) -> DraftedRows:
        """What the step's entries that sample have been fed."""
        sampling = np.flatnonzero(plan.num_logit_rows)
        rows_N = to_device(plan.rows[sampling], self.device).long()
        most = int(plan.num_tokens[: plan.num_decodes].max()) - 1
        return DraftedRows(plan.num_logit_rows[sampling], self.drafts_RK[rows_N, :most])

    def padded_batch(
        self, packed: Tensor, shape: StepShape, max_kv_len: int, rows: Int32s | None = None
    ) -> tuple[ForwardBatch, Tensor]:
        """A step of any mix as `shape` packs it, built on the device; and the entries that have
        logits, in order, then others."""
        tensors, logit_entries_N = shape.unpack(packed)
        batch = self._batch(
            tensors,
            num_decodes=shape.num_decodes,
            max_kv_len=max_kv_len,
            rows=rows,
            has_drafts=self.decode_width > 1,
        )
        self.lengths_R[self.padding_row :].zero_()
        return batch, logit_entries_N.long()

    def _host_arrays(self, plan: StepPlan) -> list[Int32s]:
        """Of entries: row, start, tokens, first token (one more); of tokens: id, entry, offset."""
        counts = plan.num_tokens
        query_starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        ids = np.zeros(query_starts[-1], np.int32)
        for i in range(plan.num_decodes, plan.num_entries):
            start = plan.starts[i]
            token_ids = self._prefill_ids[int(plan.rows[i])]
            ids[query_starts[i] : query_starts[i + 1]] = token_ids[start : start + counts[i]]
        entries = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        offsets = np.arange(len(entries), dtype=np.int32) - query_starts[entries]
        return [plan.rows, plan.starts, counts, query_starts, ids, entries, offsets]

    def _batch(
        self,
        tensors: Sequence[Tensor],
        *,
        num_decodes: int,
        max_kv_len: int,
        cached_lens: tuple[int, ...] | None = None,
        chunk_lens: tuple[int, ...] | None = None,
        rows: Int32s | None = None,
        is_grown: bool = False,
        has_drafts: bool = False,
        drafted: DraftedSpans | None = None,
    ) -> ForwardBatch:
        """From the arrays of `_host_arrays`. Rows are as long as their entries say from here on;
        by drafts they grow when it is known how many of them count. `is_grown`: they are already.
        """
        rows_N, starts_N, counts_N, query_starts_N1, ids_T, entries_T, offsets_T = tensors
        is_prompt_N = starts_N >= 0
        index_N = grown = rows_N.long()
        own_firsts_N, own_ids_N = self.lengths_R[index_N], self.last_tokens_R[index_N]
        runs = None
        if is_grown:
            own_firsts_N = own_firsts_N - 1
        if self.drafts_RK.shape[1]:
            offsets_N = (FROM_DEVICE - starts_N).clamp(min=0)
            own_firsts_N = own_firsts_N + offsets_N
            own_ids_N = self._ids_behind(index_N, offsets_N)
            grown = torch.where(offsets_N > 0, self.padding_row, index_N)
            if has_drafts:
                runs = self._runs(offsets_N)
                drafted = drafted or self._spans(offsets_N[:num_decodes], query_starts_N1)
        firsts_N = torch.where(is_prompt_N, starts_N, own_firsts_N)
        entries = entries_T.long()
        rows_T = index_N[entries]
        positions_T = (firsts_N[entries] + offsets_T).long()
        input_ids_T = torch.where(is_prompt_N[entries], ids_T.long(), own_ids_N[entries])
        kv_lens_N = firsts_N + counts_N
        if not is_grown:
            self.lengths_R.index_copy_(0, grown, kv_lens_N)
        if grown is not index_N:
            self.lengths_R[self.padding_row :].zero_()
        return self._with_fields(
            rows_T,
            ForwardBatch(
                input_ids_T=input_ids_T,
                positions_T=positions_T,
                slots_T=self._slots(0, rows_T, positions_T),
                rows_N=rows_N,
                query_starts_N1=query_starts_N1,
                kv_lens_N=kv_lens_N,
                block_table_RM=self.block_tables[0],
                num_decodes=num_decodes,
                max_kv_len=max_kv_len,
                cached_lens=cached_lens,
                chunk_lens=chunk_lens,
                drafted=drafted,
                runs=runs,
            ),
            rows,
        )

    def _runs(self, offsets_N: Tensor) -> Runs:
        return Runs(offsets_N, 1 + self.drafts_RK.shape[1])

    def _spans(self, offsets_N: Tensor, query_starts_N1: Tensor) -> DraftedSpans | None:
        """Of the decodes whose offsets these are, found on the device; the sequences first, then
        as many without tokens as others have more than one."""
        num_decodes = len(offsets_N)
        if all(self._is_paged) or not num_decodes:
            return None
        is_first_N = offsets_N == 0
        sequence_N = torch.where(is_first_N, is_first_N.cumsum(0) - 1, num_decodes)
        starts_N1 = torch.full_like(query_starts_N1[: num_decodes + 1], num_decodes)
        starts_N1.scatter_(0, sequence_N, self._arange_R1[:num_decodes])
        return DraftedSpans(
            starts_E1=torch.cat((starts_N1[:-1], query_starts_N1[num_decodes:])),
            num_single=0,
            num_drafted=num_decodes,
        )

    def build_decode(self, rows: Int32s, max_kv_len: int) -> StepInputs:
        """The same for a step of decodes only, where row numbers are all the host sends."""
        rows_N = to_device(rows, self.device)
        batch = self.decode_batch(rows_N, max_kv_len, rows)
        return StepInputs(
            batch=batch,
            rows_L=rows_N.long(),
            kv_lens_L=batch.kv_lens_N,
            rows=rows,
            logit_index_L=None,
        )

    def decode_batch(
        self,
        rows_N: Tensor,
        max_kv_len: int,
        rows: Int32s | None = None,
        offsets_N: Tensor | None = None,
    ) -> ForwardBatch:
        """One token of each row, built on the device; `rows_N` may hold padding rows. `rows`: the
        same on the host, where it knows them.

        `offsets_N`: how far each token is behind its row's last one, 0 or a draft's place; rows
        grow by the one that is not drafted.
        """
        index_N = rows_N.long()
        grown = index_N
        if offsets_N is None:
            input_ids_N, positions_N, kv_lens_N, slots_N = decode_inputs(
                rows_N, self.last_tokens_R, self.lengths_R, self.block_tables[0], self.block_size
            )
            if self._num_parts > 1:
                slots_N = self._slots(0, index_N, positions_N)
        else:
            input_ids_N = self._ids_behind(index_N, offsets_N)
            positions_N = (self.lengths_R[index_N] + offsets_N).long()
            kv_lens_N = positions_N.int() + 1
            slots_N = self._slots(0, index_N, positions_N)
            grown = torch.where(offsets_N > 0, self.padding_row, index_N)
        self.lengths_R.index_copy_(0, grown, kv_lens_N)
        self.lengths_R[self.padding_row :].zero_()
        num_entries = rows_N.shape[0]
        query_starts_N1 = self._arange_R1[: num_entries + 1]
        return self._with_fields(
            index_N,
            ForwardBatch(
                input_ids_T=input_ids_N,
                positions_T=positions_N,
                slots_T=slots_N,
                rows_N=rows_N,
                query_starts_N1=query_starts_N1,
                kv_lens_N=kv_lens_N,
                block_table_RM=self.block_tables[0],
                num_decodes=num_entries,
                max_kv_len=max_kv_len,
                drafted=None if offsets_N is None else self._spans(offsets_N, query_starts_N1),
                runs=None if offsets_N is None else self._runs(offsets_N),
            ),
            rows,
        )

    def fed_ids(self, rows_N: Tensor, offsets: Int32s | None) -> Tensor:
        """What a decode step has fed, as long as nothing was accepted: see `decode_batch`."""
        if offsets is None:
            return self.last_tokens_R[rows_N]
        return self._ids_behind(rows_N, to_device(offsets, self.device))

    def _ids_behind(self, index_N: Tensor, offsets_N: Tensor) -> Tensor:
        """Each row's last token, or the draft that is so far behind it."""
        drafts_N = self.drafts_RK[index_N, (offsets_N.long() - 1).clamp(min=0)].clamp(min=0)
        return torch.where(offsets_N > 0, drafts_N, self.last_tokens_R[index_N])

    def batch_at(
        self,
        rows_N: Tensor,
        positions_N: Tensor,
        max_kv_len: int,
        *,
        input_ids_N: Tensor | None = None,
        ends_N: Tensor | None = None,
    ) -> ForwardBatch:
        """One token of each row at these positions, for who runs beside the model: rows stay as
        they are. From `ends_N` on rows have no blocks: such a token is written to the padding
        block, and stands for the last one before it. None of both: no ids, blocks for all."""
        size = self.block_tables[0].shape[1] * self.block_size
        at_N = positions_N if ends_N is None else torch.minimum(positions_N, ends_N - 1)
        num_entries = rows_N.shape[0]
        batch = self._with_groups(
            rows_N,
            ForwardBatch(
                input_ids_T=torch.zeros_like(at_N) if input_ids_N is None else input_ids_N,
                positions_T=at_N,
                slots_T=self._slots(0, rows_N, at_N),
                rows_N=rows_N.int(),
                query_starts_N1=self._arange_R1[: num_entries + 1],
                kv_lens_N=at_N.int() + 1,
                block_table_RM=self.block_tables[0],
                num_decodes=num_entries,
                max_kv_len=min(max_kv_len, size),
            ),
        )
        if ends_N is not None:
            for own in (batch, *batch.others):
                own.slots_T = torch.where(positions_N < ends_N, own.slots_T, 0)
        return batch

    def next_of_chunks(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """(token of the step, the prompt's next id), both int64, of each chunk that does not reach
        the end of what its row must prefill; None: there is none."""
        chunks = np.flatnonzero(plan.num_logit_rows == 0)
        if not len(chunks):
            return None
        ends = plan.starts[chunks] + plan.num_tokens[chunks]
        rows = plan.rows[chunks].tolist()
        ids = [self._prefill_ids[row][end] for row, end in zip(rows, ends, strict=True)]
        last = np.cumsum(plan.num_tokens)[chunks] - 1
        last_C, ids_C = to_device(np.array((last, ids), np.int64), self.device)
        return last_C, ids_C

    @property
    def graph_kinds(self) -> tuple[bool, ...]:
        """Whether the batch has fields, of each kind of graph that is captured."""
        return (True, False) if self._fields else (False,)

    def want_fields(self, rows: Int32s) -> bool:
        """Whether a step of these rows takes any."""
        return any(field.is_wanted(rows) for field in self._fields)

    def _with_fields(
        self, rows_T: Tensor, batch: ForwardBatch, rows: Int32s | None
    ) -> ForwardBatch:
        """The batch with the fields of features. `rows`: of its entries; None: a graph, which
        serves any."""
        for field in self._fields:
            field.attach(batch, rows_T, rows)
        return self._with_groups(rows_T, batch)

    def _with_groups(self, rows_T: Tensor, batch: ForwardBatch) -> ForwardBatch:
        """The batch of group 0, and beside it that of every other group."""
        batch.others = tuple(
            replace(
                batch,
                slots_T=self._slots(group, rows_T, batch.positions_T),
                block_table_RM=self.block_tables[group],
                plans={},
            )
            for group in range(1, len(self.block_tables))
        )
        return batch

    def _slots(self, group: int, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        table_RM = self.block_tables[group]
        if not self._is_paged[group]:
            return table_RM[rows_T, 0].long()
        blocks_T = table_RM[rows_T, positions_T // self.block_size].long()
        offsets_T = positions_T % self.block_size
        if group or self._num_parts == 1:
            return blocks_T * self.block_size + offsets_T
        here = self.block_size // self._num_parts
        slots_T = blocks_T * here + offsets_T % here
        return torch.where(offsets_T // here == self._part, slots_T, 0)

    def accept(self, rows_L: Tensor, token_ids_L: Tensor) -> None:
        """The sampled tokens are what these rows feed next."""
        self.last_tokens_R.index_copy_(0, rows_L, token_ids_L)

    def accept_drafted(self, rows_N: Tensor, indices_N: Tensor, accepted: Accepted) -> None:
        """The same of several tokens each, from `indices_N` on: the last one that counts is fed
        next, and the next step overwrites what lies in the cache behind it."""
        num_accepted_N = accepted.num_accepted_N
        last_N = accepted.token_ids_NW.gather(1, num_accepted_N[:, None] - 1)[:, 0]
        self.accept(rows_N, last_N)
        self.lengths_R.index_copy_(0, rows_N, indices_N + num_accepted_N.int() - 1)

    def prefill_ids(self, row: int) -> Int32s:
        """What the row must prefill, on the host."""
        return self._prefill_ids[row]
