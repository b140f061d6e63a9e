"""`StepPlan` (down) and `StepResult` (up): the only two shapes between control and device.

A plan is a delta. It names rows that join, blocks that rows gain, and the entries that run; that a
sequence has left its row is not told, the next join takes it over. Block tables, last tokens and
true lengths live on the device. Nothing here is proportional to batch x context.

A *row* is the device slot of one running sequence, in [0, max_batch_size) of its data-parallel
rank.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.types.adapter import AdapterInSlot
from penstock.types.pooling import Pooling
from penstock.types.sampling import SamplingParams

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]

FROM_DEVICE = -1  # in StepPlan.starts: the row itself knows its position and its next input tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJoin:
    """A sequence takes a row. `token_ids` is all it must prefill: its prompt, and after a
    preemption its output.

    The first `num_computed` tokens already have their cache in the row's first blocks.
    """

    request_id: int
    dp_rank: int
    row: int
    token_ids: Int32s
    num_computed: int
    num_prompt: int  # tokens of the user's prompt, the rest of token_ids was generated
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    pooling: Pooling | None = None
    adapter: AdapterInSlot | None = None


class _BlockOp(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Of one block in one cache group, all its layers."""

    dp_rank: int
    group: int
    src: int
    dst: int


class CopyBlock(_BlockOp, frozen=True):
    """Block `dst` becomes a copy of block `src`."""


class SwapOut(_BlockOp, frozen=True):
    """Host block `dst` becomes a copy of block `src`."""


class SwapIn(_BlockOp, frozen=True):
    """Block `dst` becomes a copy of host block `src`."""


CacheOp = CopyBlock | SwapOut | SwapIn  # tagged, since a plan travels to other ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrowth:
    """Blocks that rows gained: table[dp_ranks[i]][group][rows[i], indices[i]] = block_ids[i]."""

    dp_ranks: Int32s
    groups: Int32s
    rows: Int32s
    indices: Int32s
    block_ids: Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """By which the graph of a step is chosen."""

    num_decodes: int
    num_chunks: int
    num_prompt_tokens: int
    longest_prefix: int  # tokens before a chunk
    is_eager: bool  # no graph takes it, for another reason than its size


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoads:
    """What the data-parallel ranks of a step run, each its own entries."""

    num_tokens: tuple[int, ...]  # of each rank; one without entries runs a padding token
    num_sampling: tuple[int, ...]  # entries of each rank that have logits
    most: StepLoad  # of each number the largest: all ranks replay the same graph, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the device does next, in this order: joins, block growth, cache operations, forward,
    sample.

    Entry i runs `num_tokens[i]` tokens of row `rows[i]`. `starts[i] >= 0`: prompt tokens from that
    offset. FROM_DEVICE: decode, the row's own last token at the row's own position, and behind it
    `num_tokens[i] - 1` of the tokens that were drafted for the row. Decode entries come first,
    those with drafts behind the others. `num_logit_rows[i]` is 0 for a chunk that does not reach
    the end of what must be prefilled, all tokens of a decode. `max_kv_lens[i]` bounds the
    sequence's length after the step, as if every draft were accepted.
    """

    step_id: int
    joins: tuple[RowJoin, ...]
    growth: BlockGrowth
    cache_ops: tuple[CacheOp, ...]
    dp_ranks: Int32s
    rows: Int32s
    starts: Int32s
    num_tokens: Int32s
    num_logit_rows: Int32s
    max_kv_lens: Int32s
    num_decodes: int
    needs_late_inputs: bool  # sample() must wait until every earlier step has been committed
    max_drafts: int | None = None  # tokens to draft behind each row, at most; None: as many as fit
    # The drafter is told what is fed and keeps up, whether or not it drafts. False: it rests.
    is_followed: bool = True
    peers: PeerLoads | None = None  # where this is one rank's part of a plan
    # That tokens of the step have, on any rank: ranks with other sequences share MLPs.
    adapters: tuple[AdapterInSlot, ...] = ()
    # Of the decodes, where a rank that has the rows does not sample for them: [num_decodes, 1 + K],
    # the token that each goes on from, and those drafted behind it, negative where there are none.
    decode_tokens: Int32s | None = None

    @property
    def num_entries(self) -> int:
        return len(self.rows)

    @property
    def kind(self) -> str:
        """What it holds: "decode", "prefill" or "mixed"."""
        if self.num_decodes == self.num_entries:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def has_drafts(self) -> bool:
        return bool((self.num_tokens[: self.num_decodes] > 1).any())

    @property
    def load(self) -> StepLoad:
        """Of this rank; with peers, of the busiest of them."""
        if self.peers is not None:
            return self.peers.most
        num_decodes, num_entries = self.num_decodes, self.num_entries
        if num_decodes == num_entries:
            num_prompt_tokens = longest_prefix = 0
        else:
            num_prompt_tokens = int(self.num_tokens[num_decodes:].sum())
            longest_prefix = int(self.starts[num_decodes:].max())
        return StepLoad(
            num_decodes=num_decodes,
            num_chunks=num_entries - num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            longest_prefix=longest_prefix,
            is_eager=self.has_drafts,
        )


def _no_positions() -> Int32s:
    return np.zeros(0, np.int32)


def _no_masks() -> Int32s:
    return np.zeros((0, 0), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInputs:
    """What only the previous commit could tell sampling: the tokens that some rows may draw.

    Row `positions[i]` of the step's logits draws token v only where bit v % 32 of
    `bitmasks[i, v // 32]` is set. Rows that are not named draw what they like.
    """

    positions: Int32s = field(default_factory=_no_positions)
    bitmasks: Int32s = field(default_factory=_no_masks)  # [rows that want one, ceil(V / 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities: what position j gave to one token and to its best alternatives."""

    token_ids: Int32s  # [J] the token asked about
    logprobs: Float32s  # [J]
    ranks: Int32s  # [J]
    top_ids: Int32s  # [J, K]
    top_logprobs: Float32s  # [J, K]

    @property
    def has_nan(self) -> bool:
        return bool(np.isnan(self.logprobs).any())


class RanAs(StrEnum):
    """How the host got a step to the device."""

    EAGER = "eager"  # launch by launch
    GRAPH = "graph"  # a CUDA graph
    CPU_GRAPH = "cpu_graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device found. token_ids[i, :num_accepted[i]] are entry i's new tokens (none for a
    middle chunk). `draft_ids[i]`: what its row has drafted for its next step, negative behind the
    last one; None: nobody drafts, and rows keep what they have.

    `logprobs[i]`, `prompt_logprobs[i]` and `pooled[i]` exist for the entries that asked, keyed by
    entry index.
    `error` fails every request of the step, `failures[i]` the request of entry i alone: why.
    """

    step_id: int
    token_ids: Int32s  # [N, max tokens per entry]
    num_accepted: Int32s  # [N]
    logprobs: dict[int, LogprobRows]
    prompt_logprobs: dict[int, LogprobRows]
    draft_ids: Int32s | None = None  # [N, most drafts]
    error: str | None = None
    failures: dict[int, str] = field(default_factory=dict)
    pooled: dict[int, Float32s] = field(default_factory=dict)
    ran_as: RanAs = RanAs.EAGER

    def drafts(self) -> tuple[list[int], list[list[int]] | None]:
        """How many tokens each entry's row has drafted, and `draft_ids`, as numbers of Python."""
        if self.draft_ids is None:
            return [0] * len(self.num_accepted), None
        return (self.draft_ids >= 0).sum(1).tolist(), self.draft_ids.tolist()
