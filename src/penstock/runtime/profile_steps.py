"""Plans of profiling and warmup steps: the largest step there can be, short ones, one per size.

`warmup.py` runs them, `rank.py` measures the memory that they take.
"""

from dataclasses import replace

import numpy as np

from penstock.config.run import RunConfig
from penstock.kernels.attention.mla import PIECE_TOKENS
from penstock.types.sampling import SamplingParams
from penstock.types.step import FROM_DEVICE, BlockGrowth, Int32s, RowJoin, StepPlan


def eager_sizes(config: RunConfig) -> tuple[int, ...]:
    """Numbers of tokens of a prefill step: powers of two, the next number, and three in between.

    Kernels are the same within ranges that end at a power of two or somewhere on the way to it;
    each range has one of these sizes.
    """
    most = min(config.max_num_tokens, config.max_batch_size * config.max_seq_len)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    sizes = {p + more for p in powers for more in (0, 1, p // 4, p // 2, p // 4 * 3)}
    return tuple(sorted(size for size in sizes if size <= most))


def eager_decodes(config: RunConfig) -> tuple[int, ...]:
    """Batch sizes of decode steps that no graph takes; a drafted token counts as a sequence."""
    graphs = config.graph_batch_sizes if config.graph_padding and not config.max_drafts else ()
    most_in_graphs, most = max(graphs, default=0), config.max_batch_size * (1 + config.max_drafts)
    return tuple(n for n in eager_sizes(config) if most_in_graphs < n <= most)


def largest_step(config: RunConfig) -> StepPlan:
    """`max_num_tokens` tokens in as many rows as there are, each with logits."""
    return prompt_step(
        config.max_num_tokens, min(config.max_batch_size, config.max_num_tokens), config
    )


def prompt_step(num_tokens: int, num_rows: int, config: RunConfig) -> StepPlan:
    """`num_tokens` in `num_rows` rows, or fewer where max_seq_len is less.

    The last row continues a cached prefix, which latent attention expands in pieces.
    """
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[0] += num_tokens - lengths.sum()
    lengths = np.minimum(lengths, config.max_seq_len)
    rows = np.arange(num_rows, dtype=np.int32)
    starts = np.zeros_like(rows)
    starts[-1] = min(PIECE_TOKENS, config.max_seq_len - lengths[-1])
    joins = tuple(
        RowJoin(
            request_id=0, dp_rank=0, row=row, token_ids=np.zeros(end, np.int32), num_computed=0,
            num_prompt=int(end), sampling=SamplingParams(), stop_ids=(),
        )
        for row, end in enumerate(starts + lengths)
    )  # fmt: skip
    return _step(0, rows, starts, lengths, starts + lengths, num_decodes=0, joins=joins)


def short_steps(config: RunConfig) -> tuple[StepPlan, StepPlan]:
    """After the largest, for two rows or more: a prompt, then its decode beside another prompt.

    They take kernels that no other step at start does, and are the first tokens of their
    sequences.
    """
    length = min(2, config.max_num_tokens // config.max_batch_size)
    one, both = np.array([length], np.int32), np.array([1, length], np.int32)
    alone = _step(1, np.array([1], np.int32), one * 0, one, one, num_decodes=0)
    rows, starts = np.array([1, 0], np.int32), np.array([FROM_DEVICE, 0], np.int32)
    beside = _step(2, rows, starts, both, both + length, num_decodes=1)
    return alone, beside


def drafted_steps(config: RunConfig) -> tuple[StepPlan, ...]:
    """After the largest: rows of one token each, then the most drafts that a step can have, which
    is the most logits."""
    num_tokens = min(1 + config.max_drafts, config.max_seq_len - 1)
    rows = np.arange(
        min(config.max_batch_size, config.max_num_tokens // num_tokens), dtype=np.int32
    )
    if num_tokens < 2 or not len(rows):
        return ()
    one, most = np.ones_like(rows), np.full_like(rows, num_tokens)
    prompts = _step(3, rows, np.zeros_like(rows), one, one, num_decodes=0)
    starts = np.full_like(rows, FROM_DEVICE)
    decodes = _step(4, rows, starts, most, 1 + most, num_decodes=len(rows))
    return prompts, replace(decodes, num_logit_rows=most)


def first_tokens(rows: Int32s) -> StepPlan:
    """A prompt of one token in each row."""
    one = np.ones_like(rows)
    joins = tuple(
        RowJoin(
            request_id=0, dp_rank=0, row=int(row), token_ids=np.zeros(1, np.int32), num_computed=0,
            num_prompt=1, sampling=SamplingParams(temperature=0.0), stop_ids=(),
        )
        for row in rows
    )  # fmt: skip
    return _step(0, rows, np.zeros_like(rows), one, one, num_decodes=0, joins=joins)


def decodes_of(rows: Int32s, num_fed: int | Int32s, max_drafts: int, max_kv_len: int) -> StepPlan:
    """The rows feed so many tokens, drafted ones included, and are drafted for."""
    starts, fed = np.full_like(rows, FROM_DEVICE), np.ones_like(rows) * num_fed
    bounds = np.full_like(rows, max_kv_len)
    plan = _step(0, rows, starts, fed, bounds, num_decodes=len(rows))
    return replace(plan, num_logit_rows=fed, max_drafts=max_drafts)


def _step(
    step_id: int,
    rows: Int32s,
    starts: Int32s,
    lengths: Int32s,
    max_kv_lens: Int32s,
    *,
    num_decodes: int,
    joins: tuple[RowJoin, ...] = (),
) -> StepPlan:
    """A step without requests: no blocks, and every row has logits."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step_id=step_id,
        joins=joins,
        growth=BlockGrowth(dp_ranks=none, groups=none, rows=none, indices=none, block_ids=none),
        cache_ops=(),
        dp_ranks=np.zeros_like(rows),
        rows=rows,
        starts=starts,
        num_tokens=lengths,
        num_logit_rows=np.ones_like(rows),
        max_kv_lens=max_kv_lens,
        num_decodes=num_decodes,
        needs_late_inputs=False,
    )
