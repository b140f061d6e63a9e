"""Beam search: the same tokens and scores as transformers' `generate(num_beams=...)`."""

import random
from collections.abc import Iterator

import pytest
import torch
import transformers
from tiny_models import reference_model

from penstock import LLM, SamplingParams
from penstock.errors import RequestError
from penstock.frontend.beams import BeamSearch
from penstock.hub.folder import local_folder
from penstock.types.outputs import TokenLogprob
from penstock.types.request import FinishReason

PROMPT = "<|im_start|>assistant\nOnce there was a"


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return reference_model(local_folder("tiny"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_seq_len=128, num_threads=1, max_queued_requests=64) as llm:
        yield llm


def generated(model, ids, eos_ids, max_tokens, width, **changes) -> list[tuple[list[int], float]]:
    """Tokens up to the end, with the stop token, and the score of each of transformers' beams."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **changes,
        )
    beams = []
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        tokens = sequence[len(ids) :].tolist()
        ends = [i for i, token in enumerate(tokens) if token in eos_ids]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score.item()))
    return beams


def test_the_search_keeps_what_transformers_keeps():
    """Of random models and settings, on the logits of transformers itself."""
    rng = random.Random(0)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    num_stopped = 0
    for _ in range(24):
        model = transformers.LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.7)
        ids = [rng.randrange(24) for _ in range(4)]
        eos_ids = tuple(rng.sample(range(24), rng.choice((1, 1, 3))))
        width, max_tokens = rng.randint(1, 5), rng.randint(1, 9)
        rules = {
            "length_penalty": rng.choice((-0.5, 0.0, 1.0, 2.0)),
            "early_stopping": rng.choice((True, False, "never")),
        }
        if width == 1:
            continue  # transformers takes its greedy way then
        search = BeamSearch(width, eos_ids, max_tokens, **rules)
        while not search.is_done:
            batch = torch.tensor([[*ids, *beam.token_ids] for beam in search.running])
            with torch.no_grad():
                logprobs = model(batch).logits[:, -1].float().log_softmax(-1)
            best = logprobs.topk(search.num_candidates)
            search.step(
                [
                    TokenLogprob(0, 0.0, 1, tuple(zip(top_ids, values, strict=True)))
                    for top_ids, values in zip(
                        best.indices.tolist(), best.values.tolist(), strict=True
                    )
                ]
            )
        expected = generated(model, ids, eos_ids, max_tokens, width, **rules)
        found = [(list(one.beam.token_ids), one.score) for one in search.finished]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [s for _, s in found] == pytest.approx([s for _, s in expected], abs=1e-4)
        num_stopped += sum(one.stop_id is not None for one in search.finished)
    assert num_stopped > 10


@pytest.mark.parametrize(
    ("width", "max_tokens", "rules"),
    [(4, 24, {}), (3, 12, {"length_penalty": 2.0, "early_stopping": True})],
)
def test_the_engine_finds_the_beams_of_transformers(llm, model, width, max_tokens, rules):
    asked = SamplingParams(
        use_beam_search=True, n=2, best_of=width, max_tokens=max_tokens, temperature=0, logprobs=1,
        **rules,
    )  # fmt: skip
    output = llm.generate(PROMPT, asked)
    ids = list(output.prompt_token_ids)
    expected = generated(model, ids, (2,), max_tokens, width, **rules)[:2]
    for sample, (tokens, score) in zip(output.outputs, expected, strict=True):
        has_stopped = tokens[-1] == 2
        assert list(sample.token_ids) == (tokens[:-1] if has_stopped else tokens)
        assert sample.beam_score == pytest.approx(score, abs=1e-4)
        assert (sample.finish_reason is FinishReason.STOP) == has_stopped
        assert len(sample.logprobs) == len(sample.token_ids) and sample.text
        assert all(len(one.top) == 1 for one in sample.logprobs)


def test_a_search_can_be_left_and_others_go_on(llm):
    asked = SamplingParams(use_beam_search=True, n=4, max_tokens=100, ignore_eos=True)
    pending = llm.generate_async(PROMPT, asked)
    pending.abort()
    ended = pending.result(60)
    assert {one.finish_reason for one in ended.outputs} == {FinishReason.ABORT}
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    alone = llm.generate(PROMPT, SamplingParams(use_beam_search=True, max_tokens=4))
    assert alone.outputs[0].token_ids == greedy.outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ("x",)}, "stop does not work"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"length_penalty": 1000.0}, "length_penalty"),
    ],
)
def test_what_beams_do_not_have_is_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(use_beam_search=True, n=2, **fields)


def test_more_beams_than_alternatives_are_looked_at_are_refused(llm):
    with pytest.raises(RequestError, match="20 beams and 1 stop ids"):
        llm.generate(PROMPT, SamplingParams(use_beam_search=True, n=20, max_tokens=4))
