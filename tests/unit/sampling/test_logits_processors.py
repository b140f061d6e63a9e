"""Each stage against the reference library's processors, or plain numpy where it has none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from joins import join
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.config import entry_points
from penstock.errors import ConfigError
from penstock.sampling import logits_processors
from penstock.sampling.logits_processors import make_stages
from penstock.sampling.sampler import Sampler
from penstock.sampling.stage import StepRows
from penstock.sampling.state import SamplingState
from penstock.types.step import LateInputs, RowJoin

VOCAB = 97
CPU = torch.device("cpu")


class State(SamplingState):
    joins: tuple[RowJoin, ...]


def make_state(*joins: RowJoin) -> State:
    state = State(max_rows=8, vocab_size=VOCAB, device=CPU, seed=0)
    state.join(joins)
    state.joins = joins
    return state


def process(
    state: State,
    logits: torch.Tensor,
    rows: list[int],
    lengths: list[int],
    late: LateInputs = LateInputs(),
):
    rows_L = torch.tensor(rows)
    lengths_L = torch.tensor(lengths, dtype=torch.int32)
    flags = state.flags(np.array(rows, np.int32))
    step = StepRows(np.array(rows, np.int32), rows_L, lengths_L, state.params(rows_L))
    stages = make_stages(state)
    for stage in stages:
        stage.join(state.joins)
    wanted = [stage for stage in stages if stage.is_wanted(flags, late)]
    return logits_processors.process(logits, step, wanted, late)


def kept(state: SamplingState, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Mask of the tokens that may be drawn."""
    thresholds = logits_processors.thresholds(
        logits, np.array(rows, np.int32), state.params(torch.tensor(rows)), state
    )
    return logits >= thresholds[:, None]


def some_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1 + 1},
        {"top_k": 40},
        {"top_k": 10_000},
        {"top_p": 0.1},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_filters_keep_what_the_reference_warpers_keep(temperature, filters):
    logits = some_logits(4)
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k := filters.get("top_k"):
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p := filters.get("top_p"):
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p := filters.get("min_p"):
        warped = MinPLogitsWarper(min_p)(None, warped)
    state = make_state(*(join(row, temperature=temperature, **filters) for row in range(4)))
    assert torch.equal(kept(state, logits, [0, 1, 2, 3]), warped.isfinite())


def test_rows_with_different_filters_do_not_disturb_each_other():
    logits = some_logits(5)
    state = make_state(
        join(0, top_k=3),
        join(1),
        join(2, top_p=0.5),
        join(3, temperature=0.0),
        join(4, min_p=0.2),
    )
    mask = kept(state, logits, [0, 1, 2, 3, 4])
    assert mask[0].sum() == 3
    assert mask[1].all()
    assert torch.equal(mask[2], TopPLogitsWarper(0.5)(None, logits[2:3])[0].isfinite())
    assert mask[3].all()
    assert torch.equal(mask[4], MinPLogitsWarper(0.2)(None, logits[4:5])[0].isfinite())
    # The same row alone, where fewer candidates have to be looked at.
    assert torch.equal(kept(state, logits[:1], [0])[0], mask[0])


def test_equals_of_the_last_kept_token_are_kept():
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    assert kept(make_state(join(0, top_k=2)), logits, [0]).sum() == 4


def test_top_p_shares_the_mass_of_exactly_k_tokens():
    # Of k = 2 tokens with mass 2:1 the first alone holds 0.66; with all equals counted it would
    # hold 0.4.
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, :4] = torch.tensor([np.log(2.0), 0.0, 0.0, 0.0])
    assert kept(make_state(join(0, top_k=2, top_p=0.6)), logits, [0]).sum() == 1


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_equals_the_reference_processor(penalty):
    logits = some_logits(2)
    tokens = [[3, 3, 9, 50], [7, 0, 96, 1]]
    state = make_state(
        *(join(row, tokens[row], num_prompt=2, repetition_penalty=penalty) for row in range(2))
    )
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), logits.clone())
    torch.testing.assert_close(process(state, logits, [0, 1], [4, 4]), expected)


def test_presence_and_frequency_look_at_the_output_only():
    logits = some_logits(1)
    state = make_state(
        join(2, [3, 3, 9, 9, 9, 20], num_prompt=2, presence_penalty=0.7, frequency_penalty=-0.3)
    )
    expected = logits.numpy().copy()
    for token, count in {9: 3, 20: 1}.items():
        expected[0, token] -= 0.7 + count * -0.3
    np.testing.assert_allclose(process(state, logits, [2], [6]).numpy(), expected, rtol=1e-6)


def test_min_tokens_equals_the_reference_processor():
    logits = some_logits(1)
    state = make_state(join(1, [5, 6, 7], min_tokens=2, stop_ids=(11, 40)))
    reference = MinNewTokensLengthLogitsProcessor(3, 2, torch.tensor([11, 40]), device="cpu")
    for num_tokens in (3, 4, 5, 6):
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        expected = reference(ids, logits.clone())
        assert torch.equal(process(state, logits, [1], [num_tokens]), expected), num_tokens


def test_logit_bias_is_added_to_its_tokens():
    logits = some_logits(3)
    bias = {i: (i - 20) / 2 for i in range(40)}  # wider than a row of the table was at first
    state = make_state(join(0, logit_bias={0: -100.0}), join(1), join(2, logit_bias=bias))
    expected = logits.numpy().copy()
    expected[0, 0] += -100.0
    expected[2, :40] += np.array(list(bias.values()), np.float32)
    np.testing.assert_allclose(process(state, logits, [0, 1, 2], [2, 2, 2]).numpy(), expected)


def test_a_bias_ends_with_its_sequence():
    logits = some_logits(2)
    state = make_state(join(0, logit_bias={3: 9.0}), join(1, logit_bias={4: 1.0}))
    state.join([join(0)])
    expected = logits.clone()
    expected[1, 4] += 1.0
    assert torch.equal(process(state, logits, [0, 1], [2, 2]), expected)


def test_a_bias_outside_the_vocabulary_changes_nothing():
    logits = some_logits(1)
    state = make_state(join(0, logit_bias={VOCAB: 5.0, 10**9: 5.0, 4: 1.0}))
    expected = logits.clone()
    expected[0, 4] += 1.0
    assert torch.equal(process(state, logits, [0], [2]), expected)


def test_editing_leaves_the_models_logits_alone():
    for dtype in (torch.float32, torch.bfloat16):
        logits = some_logits(1).to(dtype)
        before = logits.clone()
        processed = process(make_state(join(0, logit_bias={1: 4.0})), logits, [0], [2])
        assert processed.dtype == torch.float32
        assert torch.equal(logits, before)


def test_stages_add_up_in_their_order():
    logits = some_logits(1)
    params = {"logit_bias": {9: 2.5, 3: 1.0}, "repetition_penalty": 1.5, "presence_penalty": 0.4}
    state = make_state(join(0, [3, 9], num_prompt=1, min_tokens=5, stop_ids=(8,), **params))
    expected = logits.numpy().astype(np.float64)[0]
    expected[9] += 2.5
    expected[3] += 1.0
    expected[8] = -np.inf
    for token in (3, 9):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[9] -= 0.4
    np.testing.assert_allclose(process(state, logits, [0], [2])[0].numpy(), expected, rtol=1e-5)


def test_a_bitmask_forbids_tokens_of_the_rows_it_names_whatever_their_bias_says():
    state = make_state(join(0), join(1, logit_bias={7: 100.0}), join(2))
    logits, allowed = some_logits(3), [[3, 40, 96], [5]]
    bits = np.zeros((2, 128), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, ids] = 1
    bitmasks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    late = LateInputs(positions=np.array([2, 1], np.int32), bitmasks=bitmasks)
    processed = process(state, logits, [0, 1, 2], [2, 2, 2], late)
    assert torch.equal(processed[0], logits[0])
    assert processed[2].isfinite().nonzero()[:, 0].tolist() == allowed[0]
    assert processed[1].isfinite().nonzero()[:, 0].tolist() == allowed[1]
    assert torch.equal(processed[2, allowed[0]], logits[2, allowed[0]])


def test_only_allowed_tokens_are_left():
    logits = some_logits(3)
    allowed = (0, 31, 32, 64, VOCAB - 1)
    state = make_state(join(0, allowed_token_ids=allowed), join(1), join(2, allowed_token_ids=(5,)))
    out = process(state, logits, [0, 1, 2], [2, 2, 2])
    assert out[0].isfinite().nonzero()[:, 0].tolist() == list(allowed)
    assert torch.equal(out[0, list(allowed)], logits[0, list(allowed)])
    assert torch.equal(out[1], logits[1])
    assert out[2].isfinite().nonzero()[:, 0].tolist() == [5]


def test_bad_words_are_what_the_reference_forbids():
    """Word by word, over the tokens of a running request, beside rows that have other words."""
    words = ((7,), (1, 2), (2, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8))
    reference = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    prompt = (4, 1, 2, 2)
    state = make_state(
        join(0, prompt, bad_words_token_ids=words),
        join(1, prompt),
        join(2, prompt, bad_words_token_ids=((9,),) * 9),
    )
    stages = make_stages(state)
    for stage in stages:
        stage.join([join(1, prompt, bad_words_token_ids=((3,),))])  # it has left
        stage.join(state.joins)
    rows, rows_L = np.array([0, 1, 2], np.int32), torch.arange(3)
    step = StepRows(rows, rows_L, rows_L, state.params(rows_L))
    written = list(prompt)
    for token in (3, 1, 2, 2, 1, 2, 3, 4, 5, 6, 7, 0, 2, 2):
        logits = some_logits(3, seed=token)
        wanted = [stage for stage in stages if stage.is_wanted(state.flags(rows), LateInputs())]
        out = logits_processors.process(logits, step, wanted, LateInputs())
        expected = reference(torch.tensor([written]), logits[:1].clone())
        assert torch.equal(out[:1], expected)
        assert torch.equal(out[1], logits[1])
        assert (~out[2].isfinite()).nonzero()[:, 0].tolist() == [9]
        for stage in wanted:
            stage.on_commit(step, torch.tensor([token] * 3))
        written.append(token)


class Shift:
    """A plug-in: moves the logit of `only` by the number of tokens it has seen."""

    def __init__(self, vocab_size, device):
        self.rows = {}

    def join(self, row, args, prompt_ids, output_ids):
        self.rows[row] = [args["only"], len(prompt_ids) + len(output_ids)]

    def apply(self, logits_PV, rows):
        for logits_V, row in zip(logits_PV, rows, strict=True):
            only, num_tokens = self.rows[row]
            logits_V[only] += num_tokens

    def on_tokens(self, rows, token_ids_P):
        for row in rows:
            self.rows[row][1] += 1


def test_a_plugin_changes_its_rows_and_a_broken_one_ends_its_own(monkeypatch):
    installed = [SimpleNamespace(name="shift", load=lambda: Shift)]
    monkeypatch.setattr(entry_points, "entry_points", lambda group: installed)
    sampler = Sampler(4, VOCAB, CPU, 0, ["shift"])
    sampler.join(
        [
            join(0, temperature=0, logits_processors={"shift": {"only": 5}}),
            join(1, temperature=0),
            join(2, temperature=0, logits_processors={"shift": {"wrong": 5}}),
        ]
    )
    logits = torch.zeros(3, VOCAB)
    logits[:, 9] = 2.5
    rows, rows_L = np.arange(3, dtype=np.int32), torch.arange(3)
    for expected in ([9, 9], [5, 9]):  # 2 tokens of the prompt, then 3
        drawn, is_token = sampler.sample(logits, rows, rows_L, rows_L).drawn_2L.tolist()
        assert (drawn[:2], is_token) == (expected, [1, 1, 0])
    with pytest.raises(ConfigError, match=r"'other'.*there are: shift"):
        Sampler(4, VOCAB, CPU, 0, ["other"])
