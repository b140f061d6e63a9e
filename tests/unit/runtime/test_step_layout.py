"""How a step of any mix is packed for a captured one."""

import numpy as np
import torch
from graph_steps import plan_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.step_layout import MAX_CHUNKS, StepShape
from penstock.types.step import FROM_DEVICE

PADDING_ROW = 99
CHUNK = st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 3))  # before, now, after


@given(
    num_decodes=st.integers(0, 6),
    chunks=st.lists(CHUNK, min_size=1, max_size=MAX_CHUNKS),
    more=st.tuples(st.integers(0, 5), st.integers(0, 40)),
)
def test_every_entry_and_token_is_there_and_padding_shares_none(num_decodes, chunks, more):
    texts = {row: np.zeros(3, np.int32) for row in range(num_decodes)}
    parts = [(row, 3, 4) for row in texts]
    for row, (before, now, after) in enumerate(chunks, start=num_decodes):
        texts[row] = np.arange(before + now + after, dtype=np.int32) + 100 * row
        parts.append((row, before, before + now))
    plan = plan_of(0, texts, parts, [])
    num_prompt_tokens = sum(now for _, now, _ in chunks)
    shape = StepShape(num_decodes + more[0] * (num_decodes > 0), num_prompt_tokens + more[1])
    packed = shape.pack(plan, PADDING_ROW, texts.__getitem__)
    assert len(packed) == shape.packed_size
    tensors, logit_entries = shape.unpack(torch.from_numpy(packed))
    assert all(tensor.storage_offset() % 4 == 0 for tensor in (*tensors, logit_entries))
    rows, starts, counts, query_starts, ids, entries, offsets = (t.tolist() for t in tensors)
    assert len(rows) == shape.num_entries and len(ids) == shape.num_tokens

    first = shape.num_decodes
    assert rows[:num_decodes] == list(range(num_decodes))
    assert rows[num_decodes:first] == [PADDING_ROW] * (first - num_decodes)
    assert starts[:first] == [FROM_DEVICE] * first and counts[:first] == [1] * first
    assert query_starts == [0, *np.cumsum(counts)] and query_starts[first] == first
    for i, (before, now, _) in enumerate(chunks):
        entry, token = first + i, query_starts[first + i]
        assert (rows[entry], starts[entry], counts[entry]) == (num_decodes + i, before, now)
        assert ids[token : token + now] == texts[num_decodes + i][before : before + now].tolist()
        assert entries[token : token + now] == [entry] * now
        assert offsets[token : token + now] == list(range(now))
    assert entries[:first] == list(range(first)) and not any(offsets[:first])
    num_real = first + num_prompt_tokens
    assert set(entries[num_real:]) <= {shape.num_entries - 1}
    assert counts[first + len(chunks) :] == [0] * (MAX_CHUNKS + 1 - len(chunks))

    sampling = [row for row, *_ in parts[:num_decodes]] + [
        num_decodes + i for i, (_, _, after) in enumerate(chunks) if after == 0
    ]
    assert [rows[entry] for entry in logit_entries[: len(sampling)]] == sampling


def test_a_step_of_padding_alone_is_what_packing_leaves_without_entries():
    tensors, _ = StepShape(3, 8).unpack(torch.from_numpy(StepShape(3, 8).padding(PADDING_ROW)))
    rows, starts, counts, query_starts, ids, entries, offsets = (t.tolist() for t in tensors)
    assert set(rows) == {PADDING_ROW} and set(ids) == set(offsets) == {0}
    assert starts == [FROM_DEVICE] * 3 + [0] * 16 and counts == [1] * 3 + [0] * 16
    assert query_starts == [0, 1, 2] + [3] * 17
    assert entries == [0, 1, 2] + [18] * 8


def test_prompts_alone_take_no_shape_with_decodes():
    assert StepShape(0, 4).holds(0, 4) and not StepShape(1, 4).holds(0, 4)
    assert not StepShape(0, 4).holds(1, 3) and not StepShape(0, 4).holds(0, 5)
