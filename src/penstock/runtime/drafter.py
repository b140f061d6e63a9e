"""`Drafter`: proposes the tokens that a row's next step feeds beside its last one.

It runs on every rank, right behind sampling and on the device: with two steps in flight the host
has not seen the tokens that it goes on from. What it proposes is checked; a bad drafter costs time
and nothing else.
"""

# T tokens of a step, N rows that have new ones, W most of a row, K most drafts

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.config.entry_points import load_entry_point
from penstock.config.run import (
    EagleDrafting,
    ModelDrafting,
    MTPDrafting,
    NGramDrafting,
    RunConfig,
    StateSaving,
    UserDrafting,
)
from penstock.layers.decoder import Decoder
from penstock.layers.mtp import MTPHead
from penstock.models.eagle3 import Eagle3Head
from penstock.runtime.drafter_inputs import DrafterInputs
from penstock.runtime.graphs import GraphPool
from penstock.runtime.head_drafter import HeadDrafter
from penstock.runtime.input_batch import Rows
from penstock.runtime.model_drafter import ModelDrafter
from penstock.runtime.ngram_drafter import NGramDrafter
from penstock.runtime.state_saver import StateSaver
from penstock.types.step import RowJoin

_GROUP = "penstock.drafters"  # of entry points


class Drafter(Protocol):
    max_drafts: int  # K
    reads_steps: bool = False  # it is told of steps, and what they fed
    reads_hidden: bool = False  # and what the model computed in them

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        """CUDA graphs of what it runs behind steps of decodes, of so many tokens."""

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        """The same on a CPU."""

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Sequences take rows; whatever the rows held is gone."""

    def draft(self, step: DrafterInputs) -> Tensor:
        """int64 [N, K]: tokens to follow the new ones, negative where there are none. Where none
        are worth it, the drafter only keeps up, and where it is not told what was fed, it rests.
        Nothing waits for the device."""


def make_drafter(
    config: RunConfig, model: Decoder, rows: Rows, device: torch.device, *, is_sampling_rank: bool
) -> Drafter | None:
    dtype = getattr(torch, config.dtype)
    match config.drafting:
        case NGramDrafting() as drafting:
            return NGramDrafter(config.max_batch_size, config.max_seq_len, drafting, device)
        case MTPDrafting(max_drafts=max_drafts):
            assert isinstance(model.draft_head, MTPHead)
            best = lambda x_ND: model.logits(x_ND).argmax(-1)  # noqa: E731
            return HeadDrafter(model.embedded, model.draft_head, best, rows, max_drafts, dtype)
        case EagleDrafting(max_drafts=max_drafts):
            head = model.draft_head
            assert isinstance(head, Eagle3Head)
            return HeadDrafter(model.embedded, head, head.best, rows, max_drafts, dtype)
        case ModelDrafting(max_drafts=max_drafts):
            assert isinstance(model.draft_head, Decoder)
            return ModelDrafter(model.draft_head, rows, max_drafts)
        case UserDrafting(entry_point=name, max_drafts=max_drafts):
            make = load_entry_point(_GROUP, name, "speculative_config.drafter")
            made: Drafter = make(config.max_batch_size, config.max_seq_len, max_drafts, device)
            return made
        case StateSaving() as saving:
            return StateSaver(saving, writes=is_sampling_rank)
    return None
