"""Rows: what joins write, what is reused, what the host knows."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joins import join

from penstock.sampling.state import SamplingFlags, SamplingState, mix_seed

VOCAB = 11
MAX_ROWS = 6


def make_state() -> SamplingState:
    return SamplingState(max_rows=MAX_ROWS, vocab_size=VOCAB, device=torch.device("cpu"), seed=3)


def test_every_parameter_reaches_its_own_column():
    state = make_state()
    state.join(
        [
            join(4, seed=-(2**63), temperature=0.5, top_p=0.25, top_k=7, min_p=0.125),
            join(1, seed=2**63 - 1, repetition_penalty=1.5, presence_penalty=-0.5, min_tokens=9),
            join(2, frequency_penalty=0.75, top_k=VOCAB + 50),
        ]
    )
    params = state.params(torch.tensor([1, 4, 2]))
    assert params("seed")[:2].tolist() == [2**63 - 1, -(2**63)]
    assert params("temperature").tolist() == [1.0, 0.5, 1.0]
    assert params("top_p").tolist() == [1.0, 0.25, 1.0]
    assert params("top_k").tolist() == [0, 7, VOCAB]
    assert params("min_p").tolist() == [0.0, 0.125, 0.0]
    assert params("repetition").tolist() == [1.5, 1.0, 1.0]
    assert params("presence").tolist() == [-0.5, 0.0, 0.0]
    assert params("frequency").tolist() == [0.0, 0.0, 0.75]
    assert params("min_length").tolist() == [11, 2, 2]


def test_numbers_too_large_for_the_table_are_cut_not_refused():
    state = make_state()
    state.join([join(0, top_k=10**15, min_tokens=10**15)])
    params = state.params(torch.tensor([0]))
    assert params("top_k").tolist() == [VOCAB]
    assert params("min_length").tolist() == [2**31 - 1]


def test_unused_and_padding_rows_are_neutral_and_greedy():
    state = make_state()
    params = state.params(torch.arange(MAX_ROWS + 1))
    assert params("temperature").tolist() == [0.0] * (MAX_ROWS + 1)
    assert params("top_p").tolist() == [1.0] * (MAX_ROWS + 1)
    assert state.flags(np.arange(MAX_ROWS + 1)) == SamplingFlags(0)


def test_greedy_rows_ask_for_no_draw_however_greedy_is_spelled():
    state = make_state()
    state.join(
        [join(0, temperature=0.0, top_p=0.9), join(1, top_k=1, min_p=0.1), join(2, top_p=0.0)]
    )
    assert state.flags(np.array([0, 1, 2])) == SamplingFlags(0)


def test_a_row_forgets_its_last_sequence():
    state = make_state()
    state.join([join(3, logit_bias={1: 2.0}, top_k=4, logprobs=2, presence_penalty=1.0)])
    assert state.flags(np.array([3])) == (
        SamplingFlags.RANDOM
        | SamplingFlags.BIAS
        | SamplingFlags.TOP
        | SamplingFlags.LOGPROBS
        | SamplingFlags.PENALTIES
    )
    state.join([join(3)])
    assert state.flags(np.array([3])) == SamplingFlags.RANDOM


def test_an_unseeded_request_has_the_same_seed_after_a_preemption_and_on_every_rank():
    ranks = make_state(), make_state()
    ranks[0].join([join(0, request_id=1), join(1, request_id=2)])
    ranks[1].join([join(5, request_id=2)])
    first = ranks[0].params(torch.tensor([0, 1]))("seed").tolist()
    assert first[0] != first[1]
    assert ranks[1].params(torch.tensor([5]))("seed").tolist() == first[1:]


def test_drawn_seeds_differ_between_neighbors():
    seeds = {mix_seed(seed, request) for seed in range(20) for request in range(500)}
    assert len(seeds) == 20 * 500
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


sequence = st.tuples(
    st.integers(0, MAX_ROWS - 1),
    st.booleans(),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(sequence, max_size=4, unique_by=lambda joined: joined[0]), max_size=12),
)
def test_seen_tokens_of_every_penalized_row_are_its_own(steps):
    state = make_state()
    running: dict[int, tuple[list[int], list[int]]] = {}
    for step in steps:
        joins = []
        for row, penalized, tokens, num_prompt in step:
            penalty = {"presence_penalty": 1.0} if penalized else {}
            num_prompt = min(num_prompt, len(tokens))
            joins.append(join(row, tokens, num_prompt, **penalty))
            running.pop(row, None)
            if penalized:
                running[row] = tokens[:num_prompt], tokens[num_prompt:]
        state.join(joins)
        slots = state.params(torch.arange(MAX_ROWS))("slot").tolist()
        assert len({slots[row] for row in running}) == len(running)
        for row, (prompt, output) in running.items():
            in_prompt = state.seen.in_prompt_SV[slots[row]].nonzero()[:, 0].tolist()
            assert in_prompt == sorted(set(prompt))
            counts = state.seen.output_counts_SV[slots[row]].tolist()
            assert counts == np.bincount(output, minlength=VOCAB).tolist()


def test_slots_grow_with_the_rows_that_need_them_only():
    state = make_state()
    state.join([join(row) for row in range(MAX_ROWS)])
    assert state.seen.in_prompt_SV.shape[0] == 1  # the one nobody looks at
    state.join([join(row, presence_penalty=1.0) for row in range(MAX_ROWS)])
    grown = state.seen.in_prompt_SV.shape[0]
    for _ in range(5):
        state.join([join(row) for row in range(MAX_ROWS)])
        state.join([join(row, presence_penalty=1.0) for row in range(MAX_ROWS)])
    assert MAX_ROWS < state.seen.in_prompt_SV.shape[0] == grown
