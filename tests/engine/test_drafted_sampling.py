"""Sampled tokens have the target's distribution where drafts are checked: chi-square of the second
and third token against exact probabilities of transformers' logits."""

import itertools

import numpy as np
import pytest
import torch
from local_engine import LocalEngine
from tiny_models import make_checkpoint, reference_model

PROMPT = [5, 9, 3, 7, 5, 9]
TOKENS = (4, 8, 12, 20, 33)  # the others are too unlikely to be drawn
BIAS = dict.fromkeys(TOKENS, 80.0)
NUM_SAMPLES = 600
SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.75},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.8, "frequency_penalty": 1.0, "top_k": 4},
}


def probabilities(logits_V: torch.Tensor, output: list[int], asked: dict) -> np.ndarray:
    """Of TOKENS, by the definitions of the settings."""
    logits_V = logits_V.double().clone()
    for token in set(output):
        logits_V[token] -= asked.get("presence_penalty", 0.0)
        logits_V[token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
    scores = logits_V[list(TOKENS)] / asked["temperature"]
    probs = scores.softmax(0)
    order = probs.argsort(descending=True)
    keep = torch.ones(len(TOKENS), dtype=torch.bool)
    if "top_k" in asked:
        keep[order[asked["top_k"] :]] = False
    if "top_p" in asked:
        before = probs[order].cumsum(0) - probs[order]
        keep[order[before >= asked["top_p"]]] = False
    if "min_p" in asked:
        keep &= probs >= asked["min_p"] * probs.max()
    probs = torch.where(keep, probs, 0.0)
    return (probs / probs.sum()).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint(folder, "llama", max_position_embeddings=256) or folder


@pytest.fixture(scope="module")
def drafted(folder):
    """A model that drafts for itself: greedy drafts of sampled text, some right and some wrong."""
    drafting = {
        "decoding_type": "Draft_Target", "speculative_model": str(folder), "max_draft_len": 3,
        "adaptive_draft_len": False,
    }  # fmt: skip
    return LocalEngine(
        folder, speculative_config=drafting, dtype="float32", device="cpu", max_seq_len=64,
        max_batch_size=64, disable_overlap_scheduler=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def logits(folder):
    """Of every text that there can be, by transformers."""
    model = reference_model(folder).float()
    texts = [[]] + [list(t) for n in (1, 2) for t in itertools.product(TOKENS, repeat=n)]
    with torch.no_grad():
        return {tuple(text): model(torch.tensor([PROMPT + text])).logits[0, -1] for text in texts}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_distribution_is_the_targets(drafted, logits, name):
    asked, counters = SETTINGS[name], drafted.counters
    before = counters.accepted_tokens, counters.drafted_tokens
    # The small model does not know of the bias: it drafts what is likely without.
    drafter = drafted.runner.drafting.drafter
    plain_logits = drafter._logits
    bias_V = torch.zeros(logits[()].shape)
    bias_V[list(TOKENS)] = 80.0
    drafter._cpu_graphs = None
    drafter._logits = lambda batch: plain_logits(batch) + bias_V
    try:
        ids = [
            drafted.submit(PROMPT, 6, seed=seed, logit_bias=BIAS, ignore_eos=True, **asked)
            for seed in range(NUM_SAMPLES)
        ]
        drafted.run()
    finally:
        drafter._logits = plain_logits
    texts = [tuple(drafted.tokens(rid)[:3]) for rid in ids]
    accepted, fed = (
        now - then
        for now, then in zip(
            (counters.accepted_tokens, counters.drafted_tokens), before, strict=True
        )
    )
    assert 0.1 < accepted / fed < 0.95
    expected = {
        text: np.prod(
            [
                probabilities(logits[text[:n]], list(text[:n]), asked)[TOKENS.index(text[n])]
                for n in range(3)
            ]
        )
        for text in itertools.product(TOKENS, repeat=3)
    }
    assert sum(expected.values()) == pytest.approx(1)
    assert not [text for text in texts if expected[text] == 0]
    likely = [text for text, p in expected.items() if p * NUM_SAMPLES >= 5]
    counts = [texts.count(text) for text in likely]
    rest = NUM_SAMPLES - sum(counts)
    wanted = [expected[text] * NUM_SAMPLES for text in likely]
    if (left := NUM_SAMPLES - sum(wanted)) >= 5:
        counts, wanted = [*counts, rest], [*wanted, left]
    else:
        wanted = [one * sum(counts) / sum(wanted) for one in wanted]
    assert len(counts) > 3
    chi2 = sum((count - want) ** 2 / want for count, want in zip(counts, wanted, strict=True))
    freedom, half = torch.tensor((len(counts) - 1) / 2), torch.tensor(chi2 / 2)
    assert torch.special.gammaincc(freedom, half) > 1e-3
