"""Outputs that must match a grammar, or reason within a budget, are drafted like others: the same
tokens with and without, from each kind of drafter."""

import itertools
import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from local_engine import LocalEngine
from test_drafted_texts import EAGLE3, SIBLINGS, SMALL, TINY, prompts

from penstock import GuidedDecodingParams, SamplingParams
from penstock.ipc.messages import Submit
from penstock.text.grammars.output_grammar import AnswerStart, output_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import Grammar, Request, ThinkingBudget, request_id

FIXED = {"max_draft_len": 3, "adaptive_draft_len": False}
COLORS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4, "maxItems": 6}
FORM = {
    "type": "object",
    "properties": {
        "the_name_of_it": {"type": "string", "maxLength": 12},
        "measured_value": {"type": "integer", "minimum": 0, "maximum": 9999},
        "colors": COLORS,
    },
    "required": ["the_name_of_it", "measured_value", "colors"],
}
TEXT = {"regex": "[^#]{80,}"}  # a grammar that leaves a model what it is good at
DRAWN = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
ASKED = [
    ({"json": FORM}, {}),
    ({"json": FORM}, DRAWN | {"frequency_penalty": 0.3}),
    # With log-probabilities each token is drawn, also those that must come.
    ({"json": COLORS}, DRAWN | {"logprobs": 0}),
    (TEXT, {"logprobs": 0}),
    (TEXT, DRAWN | {"logprobs": 0}),
    (TEXT, {"repetition_penalty": 1.05}),
    ({"regex": "(yes|no)( [a-z]{2,6}){6}"}, DRAWN),
    ({}, {}),
    (None, {}),  # reasons, and closes with the tokens that it must
    (None, DRAWN),
]
DRAFTERS = {
    "ngram": (TINY, {"decoding_type": "NGram"}),
    "eagle3": (TINY, EAGLE3),
    "small": (TINY, SMALL),
    "mtp of deepseek": (SIBLINGS / "deepseek_v3", {"decoding_type": "MTP"}),
    "mtp of qwen3-next": (SIBLINGS / "qwen3_next", {"decoding_type": "MTP"}),
}
_serial = itertools.count()
tokenizer_of, prompts_of = cache(Tokenizer.from_folder), cache(prompts)


def request(folder: Path, guided: dict | None, sampling: dict) -> Request:
    tokenizer = tokenizer_of(folder)
    prompt_ids = tokenizer.encode("Write a form: red, green, red, green.")
    if guided is TEXT:
        prompt_ids = prompts_of(folder)[3]
    grammar = budget = None
    if guided is None:
        ending = tuple(tokenizer.encode(" so", add_special_tokens=False)) * 2
        budget = ThinkingBudget(
            num_tokens=5, is_open=True, opening=(9,), closing=ending[-1:], ending=ending
        )
    elif guided:
        text = output_grammar(tokenizer, AnswerStart(), GuidedDecodingParams(**guided))
        grammar = Grammar(text=text)
    return Request(
        id=request_id(2, next(_serial)),
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        max_tokens=160 if guided and guided is not TEXT else 40,
        stop_ids=tokenizer.eos_ids,
        late_inputs=bool(guided) or guided is None,
        grammar=grammar,
        thinking=budget,
    )


def answers(folder: Path, depth: int, drafting: dict | None = None):
    """Tokens and log-probabilities of each request, and in how many steps it was written."""
    engine = LocalEngine(
        folder, speculative_config=None if drafting is None else FIXED | drafting,
        device="cpu", dtype="float32", max_seq_len=256, max_batch_size=8,
        disable_overlap_scheduler=depth == 1,
    )  # fmt: skip
    requests = [request(folder, *asked) for asked in ASKED]
    engine.inbox.append(Submit(requests=tuple(requests)))
    engine.run()
    found, steps = [], []
    for one in requests:
        deltas = engine.deltas[one.id]
        logprobs = [each.logprob for delta in deltas for each in delta.logprobs]
        found.append((engine.tokens(one.id), logprobs))
        steps.append(deltas[-1].num_steps)
    assert engine.counters.known_tokens > 20
    assert engine.engine.grammars.num_matchers == 0
    return found, steps


plain = cache(answers)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_grammar_and_drafts_give_the_tokens_of_the_grammar_alone(name, depth):
    folder, drafting = DRAFTERS[name]
    expected, _ = plain(folder, 2)
    found, steps = answers(folder, depth, drafting)
    for (tokens, logprobs), (own, own_logprobs) in zip(expected, found, strict=True):
        assert own == tokens and own_logprobs == pytest.approx(logprobs, abs=1e-4)
    for (guided, _), (tokens, _), num_steps in zip(ASKED, found, steps, strict=True):
        if guided and "json" in guided:
            jsonschema.validate(json.loads(tokenizer_of(folder).decode(tokens)), guided["json"])
        if guided is TEXT:
            assert num_steps < 0.9 * len(tokens), "no draft was kept"
