"""What a step sends to the device in one copy, and what is built of it there."""

from dataclasses import replace

import numpy as np
import torch
from graph_steps import plan_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.input_batch import Rows, all_to_device, by_token, fed_tokens
from penstock.runtime.step_layout import StepShape


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_every_array_arrives_whole_and_at_a_multiple_of_16_bytes(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.int32) + 10 * i for i, size in enumerate(sizes)]
    tensors = all_to_device(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    base = tensors[0].untyped_storage().data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in tensors if len(tensor))


def test_decodes_of_a_row_are_a_run() -> None:
    """Eagerly, and as both kinds of graphs hold them: padding is a run of one."""
    rows = Rows(4, 4, 16, torch.device("cpu"), max_drafts=3)
    texts = {row: np.arange(9, dtype=np.int32) for row in range(3)}
    plan = plan_of(0, texts, [(0, 9, 10), (1, 9, 13), (2, 9, 11)], [])
    plan = replace(plan, num_logit_rows=plan.num_tokens)
    rows.lengths_R[:3] = 9
    eager = rows.build_drafted(plan).batch
    tokens, shape = by_token(plan), StepShape(8, 16)
    packed = torch.from_numpy(shape.pack(tokens, 4, texts.__getitem__))
    padded, _ = rows.padded_batch(packed, shape, 64)
    fed, offsets = (torch.from_numpy(one) for one in fed_tokens(plan))
    decodes = rows.decode_batch(fed, 64, None, offsets)
    for batch in (eager, padded, decodes):
        assert batch.runs is not None and batch.runs.longest == 4
        assert batch.runs.offsets_N.dtype == torch.int32
        found = batch.runs.offsets_N[: batch.num_decodes].tolist()
        assert found == [0, 0, 1, 2, 3, 0, 1] + [0] * (batch.num_decodes - 7)
        behind = batch.kv_lens_N[:7] - batch.kv_lens_N[0]
        assert behind.tolist() == found[:7]
    assert rows.decode_batch(fed, 64).runs is None


def test_spans_of_a_graph_have_the_sequences_first_and_then_nothing() -> None:
    """Decodes, with drafts or not, in front of two chunks and padding."""
    rows = Rows(5, 4, 16, torch.device("cpu"), groups=(True, False), max_drafts=3)
    texts = {row: np.arange(9, dtype=np.int32) for row in range(5)}
    parts = [(0, 9, 10), (1, 9, 13), (2, 9, 11), (3, 0, 5), (4, 0, 9)]
    plan = plan_of(0, texts, parts, [1, 1])
    plan = replace(plan, num_logit_rows=np.array([1, 4, 2, 0, 1], np.int32))
    rows.apply(plan)
    eager, shape = rows.build_drafted(plan).batch, StepShape(8, 16)
    packed = torch.from_numpy(shape.pack(by_token(plan), 5, rows.prefill_ids))
    padded, _ = rows.padded_batch(packed, shape, 64)
    fed, offsets = (torch.from_numpy(one) for one in fed_tokens(plan))
    decodes = rows.decode_batch(fed, 64, None, offsets)
    assert eager.drafted.starts_E1.tolist() == [0, 1, 5, 7, 12, 21]
    assert (eager.drafted.num_single, eager.drafted.num_drafted) == (1, 2)
    # Seven tokens, one of padding; four places of further tokens; chunks, and no more of them.
    assert padded.drafted.starts_E1.tolist() == [0, 1, 5, 7, *[8] * 5, 13, *[22] * 15]
    assert (padded.drafted.num_single, padded.drafted.num_drafted) == (0, 8)
    assert decodes.drafted.starts_E1.tolist() == [0, 1, 5, *[7] * 5]
    assert rows.decode_batch(fed, 64).drafted is None
