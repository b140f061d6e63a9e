"""A step of prompts as graphs capture it, padded and built on the device, gives the same as alone.

There is no capture without a GPU: what would be captured runs anew for each replay.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_checkpoint
from torch import Tensor

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.graphs import ChunkGraphs, GraphStep, Outputs
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.rank import finish_rank, load_rank
from penstock.runtime.timeline import Timeline
from penstock.types.sampling import SamplingParams
from penstock.types.step import BlockGrowth, LateInputs, RowJoin, StepPlan

BLOCK, BLOCKS_EACH = 16, 4
ARCHITECTURES = ("llama", "gpt_oss", "qwen3_next", "deepseek_v3")


@dataclass
class Replayed:
    step: GraphStep

    def replay(self, inputs: np.ndarray) -> Outputs:
        return self.step(torch.from_numpy(inputs))


class Repeats:
    """Stands for a pool of graphs."""

    def capture(self, step: GraphStep, inputs: Tensor) -> Replayed:
        step(inputs)
        return Replayed(step)


def make_runner(folder: Path) -> ModelRunner:
    asked = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        attn_backend="reference",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": 1024},
    )
    spec = parse_model_spec(folder)
    config = resolve(asked, spec, probe(), str(folder))
    timeline = Timeline()
    loaded = load_rank(config, spec, RankMesh.single(), timeline)
    return finish_rank(loaded, config, spec, loaded.memory.size, timeline)


def plan_of(
    step_id: int,
    texts: dict[int, np.ndarray],
    parts: list[tuple[int, int, int]],
    blocks_each: list[int],
) -> StepPlan:
    """Of parts (row, start, end); a row joins with its first part and samples with its last."""
    rows, starts, ends = (np.array(column, np.int32) for column in zip(*parts, strict=True))
    joining = [row for row, start, _ in parts if start == 0]
    grown = [
        (group, row, index)
        for row in joining
        for group, num_blocks in enumerate(blocks_each)
        for index in range(num_blocks)
    ]
    columns = [np.array(column, np.int32) for column in zip(*grown, strict=True)] or [
        np.zeros(0, np.int32)
    ] * 3
    return StepPlan(
        step_id=step_id,
        joins=tuple(
            RowJoin(
                request_id=row, dp_rank=0, row=row, token_ids=texts[row], num_computed=0,
                num_prompt=len(texts[row]), sampling=SamplingParams(temperature=0), stop_ids=(),
            )
            for row in joining
        ),
        growth=BlockGrowth(
            dp_ranks=np.zeros_like(columns[0]),
            groups=columns[0],
            rows=columns[1],
            indices=columns[2],
            block_ids=1 + columns[1] * np.array(blocks_each, np.int32)[columns[0]] + columns[2],
        ),
        cache_ops=(),
        dp_ranks=np.zeros_like(rows),
        rows=rows,
        starts=starts,
        num_tokens=ends - starts,
        num_logit_rows=np.array([end == len(texts[row]) for row, _, end in parts], np.int32),
        max_kv_lens=ends,
        num_decodes=0,
        needs_late_inputs=False,
    )  # fmt: skip


STEPS = [
    [(0, 0, 16)],  # as large as the graph
    [(2, 0, 5), (1, 0, 7), (0, 16, 20)],  # one that does not sample yet
    [(1, 7, 21), (3, 0, 9)],
    [(4, 0, 3), (5, 0, 3), (6, 0, 3), (3, 9, 11)],  # more than a graph has entries for
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_steps_give_the_same_logits(architecture, tmp_path):
    make_checkpoint(tmp_path, architecture)
    torch.manual_seed(1)
    lengths = {0: 20, 1: 21, 2: 5, 3: 11, 4: 3, 5: 3, 6: 3}
    random = np.random.default_rng(0)
    texts = {row: random.integers(3, 90, num, np.int32) for row, num in lengths.items()}
    plain, padded = make_runner(tmp_path), make_runner(tmp_path)
    if not all(layer.captures_chunks for layer in padded._model.cache_layers()):
        assert architecture == "deepseek_v3"
        return
    graphs = ChunkGraphs(padded.chunk_step(64), (16, 32), padded._rows)
    graphs.capture(Repeats())
    padded._chunk_graphs = graphs
    blocks_each = [min(BLOCKS_EACH, table.shape[1]) for table in plain._rows.block_tables]
    for number, parts in enumerate(STEPS):
        for runner in (plain, padded):
            runner.forward(plan_of(number, texts, parts, blocks_each))
        want, got = plain._forwarded[number], padded._forwarded[number]
        assert graphs.fits(want.plan) == (number < 3)
        assert np.array_equal(want.rows, got.rows)
        assert torch.equal(want.rows_L, got.rows_L) and torch.equal(want.kv_lens_L, got.kv_lens_L)
        if len(want.rows):
            torch.testing.assert_close(got.logits_LV, want.logits_LV, atol=1e-5, rtol=1e-5)
        tokens = [r.sample(number, LateInputs()).wait().token_ids for r in (plain, padded)]
        assert np.array_equal(*tokens)
    assert torch.equal(plain._rows.lengths_R, padded._rows.lengths_R)
