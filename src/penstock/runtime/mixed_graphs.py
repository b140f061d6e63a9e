"""`MixedGraphs`: steps of decodes and prompts in any mix, padded to the smallest captured shape."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from penstock.config.run import RunConfig
from penstock.runtime.graphs import Captured, GraphPool, GraphStep, Outputs
from penstock.runtime.input_batch import Rows
from penstock.runtime.stage_link import StageLink
from penstock.runtime.step_layout import MAX_CHUNKS, StepShape
from penstock.types.step import StepLoad, StepPlan


def shapes_at_start(config: RunConfig) -> list[StepShape]:
    """Of mixes, and of prompts alone; the largest first."""
    prompts = [StepShape(0, size) for size in config.graph_token_sizes]
    shapes = [StepShape(*mix) for mix in config.graph_mixes] + prompts
    return sorted(shapes, key=_size, reverse=True)


def shapes_when_idle(config: RunConfig) -> list[StepShape]:
    return [StepShape(*mix) for mix in config.graph_mixes_when_idle]


def all_shapes(config: RunConfig) -> list[StepShape]:
    return shapes_at_start(config) + shapes_when_idle(config)


def most_captured_tokens(config: RunConfig) -> int:
    """Of a step as graphs capture it, padding included, or as it warms up where none does."""
    decodes = config.max_batch_size * (1 + config.max_drafts)
    shapes = (shape.num_tokens for shape in all_shapes(config))
    return max((decodes, *config.graph_batch_sizes, *shapes))


class MixedGraphs:
    """`warmup()`: what a step runs in before its capture; one layer of each kind will do."""

    def __init__(
        self,
        step: Callable[[StepShape], GraphStep],
        at_start: Sequence[StepShape],
        when_idle: Sequence[StepShape],
        rows: Rows,
        pool: GraphPool,
        warmup: Callable[[], AbstractContextManager[None]],
        max_prefix: int | None,
    ) -> None:
        self._step = step
        self._at_start = at_start
        self._left = list(reversed(when_idle))
        self._rows = rows
        self._pool = pool
        self._warmup = warmup
        self._max_prefix = max_prefix
        # By size, the smallest first; of each kind: with fields or without.
        self._captured: dict[StepShape, dict[bool, Captured]] = {}
        self._num_tokens: list[int] = []  # of these shapes

    def capture(self) -> None:
        """What is captured at start, the largest first."""
        for shape in self._at_start:
            self._capture(shape)

    def capture_next(self) -> bool:
        """One of those that can wait; whether more are left."""
        if self._left:
            self._capture(self._left.pop())
        return bool(self._left)

    def _capture(self, shape: StepShape) -> None:
        padding = torch.from_numpy(shape.padding(self._rows.padding_row))
        kinds = {}
        for has_fields in self._rows.graph_kinds:
            inputs = padding.to(self._rows.device, copy=True)
            kinds[has_fields] = self._pool.capture(
                self._step(shape), inputs, has_fields, self._warmup()
            )
        known = {**self._captured, shape: kinds}
        self._captured = dict(sorted(known.items(), key=lambda item: _size(item[0])))
        self._num_tokens = [shape.num_tokens for shape in self._captured]

    def fits(self, load: StepLoad) -> bool:
        if load.is_eager or load.num_chunks > MAX_CHUNKS:
            return False
        if self._max_prefix is not None and load.longest_prefix > self._max_prefix:
            return False
        return self._shape_of(load) is not None

    def replay(self, link: StageLink, plan: StepPlan, load: StepLoad) -> Outputs:
        """`load`: of the rank with most, all ranks replay the same graph."""
        shape = self._shape_of(load)
        assert shape is not None, plan
        packed = shape.pack(plan, self._rows.padding_row, self._rows.prefill_ids)
        captured = self._captured[shape][self._rows.want_fields(plan.rows)]
        own = shape.places(plan)
        link.receive_padded(own, shape.num_tokens)
        outputs = captured.replay(packed)
        link.send_padded(outputs.logits_NV, own)
        hidden_TE, count = outputs.hidden_TE, int((plan.num_logit_rows > 0).sum())
        return Outputs(
            outputs.logits_NV[:count],
            outputs.kv_lens_N[:count],
            outputs.rows_N[:count],
            None if hidden_TE is None else torch.cat([hidden_TE[place] for place in own]),
            outputs.accept,
        )

    def _shape_of(self, load: StepLoad) -> StepShape | None:
        sizes = load.num_decodes, load.num_prompt_tokens
        large = itertools.islice(self._captured, bisect_left(self._num_tokens, sum(sizes)), None)
        return next((shape for shape in large if shape.holds(*sizes)), None)


def _size(shape: StepShape) -> tuple[int, int]:
    """By which the smallest shape is chosen: what GEMMs cost, then what attention may."""
    return shape.num_tokens, shape.num_decodes
