"""Warmup: runs once what requests will need, so that none of them waits for a kernel to compile.

Which kernel is launched depends on the number of tokens, so there are steps of every size that
makes a difference (`profile_steps.py`), on one layer of each kind.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from penstock.config.run import RunConfig
from penstock.layers.decoder import Decoder
from penstock.parallel.mesh import RankMesh
from penstock.runtime.graphs import padding_inputs
from penstock.runtime.input_batch import Rows
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.profile_steps import (
    drafted_steps,
    largest_step,
    prompt_step,
    short_steps,
)
from penstock.runtime.step_layout import StepShape
from penstock.sampling.sampler import Sampler
from penstock.types.model_spec import ModelSpec
from penstock.types.sampling import SamplingParams
from penstock.types.step import LateInputs, RowJoin

_SAMPLING_MODES = [  # penalties sample from an fp32 copy of the logits
    SamplingParams(temperature=temperature, top_p=top_p, presence_penalty=penalty)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
    for penalty in (0.0, 0.1)
]


def run_steps(runner: ModelRunner, config: RunConfig) -> None:
    """The largest step, for its peak of memory, and short ones."""
    short = short_steps(config) if config.max_batch_size > 1 else ()
    for plan in (largest_step(config), *short, *drafted_steps(config)):
        runner.forward(plan)
        runner.sample(plan.step_id, LateInputs())


def run_sizes(runner: ModelRunner, model: Decoder, config: RunConfig, sizes: Sequence[int]) -> None:
    """Prefill steps of so many tokens: whatever selects a kernel by the number has selected."""
    with model.shortened():
        for size in sizes:
            num_rows = -(-size // config.max_seq_len)
            plan = prompt_step(size, num_rows, config)
            runner.forward(plan)
            runner.sample(plan.step_id, LateInputs())


def run_decodes(
    runner: ModelRunner, model: Decoder, rows: Rows, max_kv_len: int, sizes: Sequence[int]
) -> None:
    """Decode steps of so many sequences, outside graphs."""
    kinds = (False, True) if rows.decode_width > 1 else (False,)  # plain ones take other kernels
    with model.shortened():
        for size, is_plain in itertools.product(sizes, kinds):
            for has_fields in rows.graph_kinds:
                step = runner.decode_step(max_kv_len, is_plain)
                step(padding_inputs(rows, size, is_plain), has_fields)


def run_padded(
    runner: ModelRunner,
    model: Decoder,
    rows: Rows,
    max_kv_len: int,
    shapes: Sequence[StepShape],
) -> None:
    """Steps as graphs capture them, of padding alone: no capture compiles a kernel afterwards, not
    even one that waits until the server is idle."""
    with model.shortened():
        for shape in shapes:
            packed = torch.from_numpy(shape.padding(rows.padding_row)).to(rows.device)
            for has_fields in rows.graph_kinds:
                runner.padded_step(shape, max_kv_len)(packed, has_fields)


@torch.inference_mode()
def warm_up_sampling(
    model: Decoder, mesh: RankMesh, device: torch.device, config: RunConfig, spec: ModelSpec
) -> None:
    """Every combination of sampling kernels once."""
    if not mesh.is_last_stage:
        return
    dtype = getattr(torch, config.dtype)
    logits_LV = model.logits(torch.zeros(2, spec.hidden_size, dtype=dtype, device=device))
    if not mesh.is_sampling_rank:
        return
    sampler = Sampler(2, spec.vocab_size, device, seed=0)
    rows = np.arange(2, dtype=np.int32)
    rows_L = torch.arange(2, device=device)
    for sampling in _SAMPLING_MODES:
        sampler.join(
            [
                RowJoin(
                    request_id=0, dp_rank=0, row=int(row), token_ids=np.zeros(1, np.int32),
                    num_computed=0, num_prompt=1, sampling=sampling, stop_ids=(),
                )
                for row in rows
            ]
        )  # fmt: skip
        sampler.sample(logits_LV, rows, rows_L, rows_L.int())
    everything_PW = np.full((2, -(-spec.vocab_size // 32)), -1, np.int32)
    late = LateInputs(positions=rows, bitmasks=everything_PW)
    sampler.sample(logits_LV, rows, rows_L, rows_L.int(), late)
