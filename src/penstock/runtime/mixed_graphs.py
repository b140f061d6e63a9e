"""`MixedGraphs`: steps of decodes and prompts in any mix, padded to the smallest captured shape."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from penstock.config.run import RunConfig
from penstock.runtime.graphs import Captured, GraphPool, GraphStep, Outputs
from penstock.runtime.input_batch import Rows
from penstock.runtime.step_layout import MAX_CHUNKS, StepShape
from penstock.types.step import StepPlan


def shapes_at_start(config: RunConfig) -> list[StepShape]:
    """Of mixes, and of prompts alone; the largest first."""
    prompts = [StepShape(0, size) for size in config.graph_token_sizes]
    shapes = [StepShape(*mix) for mix in config.graph_mixes] + prompts
    return sorted(shapes, key=_size, reverse=True)


def shapes_when_idle(config: RunConfig) -> list[StepShape]:
    return [StepShape(*mix) for mix in config.graph_mixes_when_idle]


def all_shapes(config: RunConfig) -> list[StepShape]:
    return shapes_at_start(config) + shapes_when_idle(config)


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
        self._captured: dict[StepShape, Captured] = {}  # by size, the smallest first

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
        inputs = torch.from_numpy(shape.padding(self._rows.padding_row)).to(self._rows.device)
        captured = self._pool.capture(self._step(shape), inputs, self._warmup())
        known = {**self._captured, shape: captured}
        self._captured = dict(sorted(known.items(), key=lambda item: _size(item[0])))

    def fits(self, plan: StepPlan) -> bool:
        num_decodes = plan.num_decodes
        if plan.num_entries - num_decodes > MAX_CHUNKS:
            return False
        if (plan.num_tokens[:num_decodes] != 1).any():
            return False
        starts = plan.starts[num_decodes:]
        if self._max_prefix is not None and int(starts.max(initial=0)) > self._max_prefix:
            return False
        return self._shape_of(plan) is not None

    def replay(self, plan: StepPlan) -> Outputs:
        shape = self._shape_of(plan)
        assert shape is not None, plan
        packed = shape.pack(plan, self._rows.padding_row, self._rows.prefill_ids)
        logits_NV, kv_lens_N, rows_N, hidden_TE = self._captured[shape].replay(packed)
        if hidden_TE is not None:  # without padding
            first, num_tokens = shape.num_decodes, int(plan.num_tokens.sum())
            chunks = hidden_TE[first : first + num_tokens - plan.num_decodes]
            hidden_TE = torch.cat((hidden_TE[: plan.num_decodes], chunks))
        num_logits = int((plan.num_logit_rows > 0).sum())
        return logits_NV[:num_logits], kv_lens_N[:num_logits], rows_N[:num_logits], hidden_TE

    def _shape_of(self, plan: StepPlan) -> StepShape | None:
        num_decodes = plan.num_decodes
        num_prompt_tokens = int(plan.num_tokens.sum()) - num_decodes
        fitting = (s for s in self._captured if s.holds(num_decodes, num_prompt_tokens))
        return next(fitting, None)


def _size(shape: StepShape) -> tuple[int, int]:
    """By which the smallest shape is chosen: what GEMMs cost, then what attention may."""
    return shape.num_tokens, shape.num_decodes
