"""`PlanBuilder`: a `StepPlan` in the making: entries, rows that join, blocks that rows gain."""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.core.drafts import Lengths
from penstock.core.sequence import Sequence
from penstock.types.step import (
    FROM_DEVICE,
    BlockGrowth,
    CacheOp,
    RowJoin,
    StepPlan,
)


class Entry(NamedTuple):  # made for every sequence and step, which a dataclass takes longer for
    """One sequence's part of a step, remembered until the step's result comes."""

    seq: Sequence
    epoch: int
    dp_rank: int
    row: int
    start: int
    num_tokens: int
    num_logit_rows: int
    max_kv_len: int


@dataclass(slots=True)
class PlanBuilder:
    step_id: int
    budgets: list[int]  # tokens left per data-parallel rank
    # Where an older sequence waits for blocks.
    blocked_dp_ranks: set[int] = field(default_factory=set)
    _decodes: list[Entry] = field(default_factory=list)
    _drafted: list[Entry] = field(default_factory=list)  # decodes of more than one token
    _prefills: list[Entry] = field(default_factory=list)
    _joins: list[RowJoin] = field(default_factory=list)
    _growth: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """Decodes first, those with drafts behind the others."""
        return self._decodes + self._drafted + self._prefills

    def has(self, seq: Sequence) -> bool:
        return seq.last_step == self.step_id

    def join(self, seq: Sequence, num_computed: int) -> None:
        """A sequence that has just started takes its row."""
        self._joins.append(
            RowJoin(
                request_id=seq.id,
                dp_rank=seq.dp_rank,
                row=seq.row,
                token_ids=seq.tokens.copy(),
                num_computed=num_computed,
                num_prompt=seq.num_prompt,
                sampling=seq.request.sampling,
                stop_ids=seq.request.stop_ids,
                pooling=seq.request.pooling,
            )
        )

    def limit_chunks(self, num_tokens: int) -> None:
        """From here on: no more than so many tokens where there are decodes."""
        for dp_rank, left in enumerate(self.budgets):
            decodes = itertools.chain(self._decodes, self._drafted)
            if left > num_tokens and any(entry.dp_rank == dp_rank for entry in decodes):
                self.budgets[dp_rank] = num_tokens

    def decode(self, seq: Sequence, num_drafts: int, max_kv_len: int) -> None:
        entries, num_tokens = self._drafted if num_drafts else self._decodes, 1 + num_drafts
        self._add(entries, seq, FROM_DEVICE, num_tokens, num_tokens, max_kv_len)

    def prefill(self, seq: Sequence, num_tokens: int) -> None:
        """The next chunk of `seq`; only the one that reaches the end needs logits."""
        start = seq.num_planned
        seq.num_planned += num_tokens
        num_logit_rows = 0 if seq.is_prefilling else 1
        self._add(self._prefills, seq, start, num_tokens, num_logit_rows, seq.num_planned)

    def _add(
        self,
        entries: list[Entry],
        seq: Sequence,
        start: int,
        num_tokens: int,
        num_logit_rows: int,
        max_kv_len: int,
    ) -> None:
        assert seq.holder is not None
        seq.last_step = self.step_id
        seq.num_in_flight += 1
        seq.num_pending += num_logit_rows
        self.budgets[seq.dp_rank] -= num_tokens
        self._growth += [
            (seq.dp_rank, new.group, seq.row, new.index, new.block) for new in seq.holder.unsent()
        ]
        entries.append(
            Entry(
                seq, seq.epoch, seq.dp_rank, seq.row, start, num_tokens, num_logit_rows, max_kv_len
            )
        )

    def to_plan(self, cache_ops: Seq[CacheOp], lengths: Lengths) -> StepPlan:
        entries = self.entries
        growth = np.array(self._growth, np.int32).reshape(-1, 5).T
        columns = np.array(list(zip(*entries, strict=True))[2:], np.int32)
        dp_ranks, rows, starts, num_tokens, num_logit_rows, max_kv_lens = columns
        return StepPlan(
            step_id=self.step_id,
            joins=tuple(self._joins),
            growth=BlockGrowth(
                dp_ranks=growth[0],
                groups=growth[1],
                rows=growth[2],
                indices=growth[3],
                block_ids=growth[4],
            ),
            cache_ops=tuple(cache_ops),
            dp_ranks=dp_ranks,
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            num_logit_rows=num_logit_rows,
            max_kv_lens=max_kv_lens,
            num_decodes=len(self._decodes) + len(self._drafted),
            needs_late_inputs=any(e.seq.request.late_inputs for e in entries),
            max_drafts=lengths.most,
            is_followed=lengths.is_followed or (bool(self._prefills) and lengths.takes_prompts),
        )
