"""Outputs that match a grammar, in the real engine, whatever happens to requests meanwhile."""

import itertools
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from test_drafted_grammars import FIXED
from test_drafted_texts import EAGLE3

from penstock import LLM, GuidedDecodingParams, SamplingParams
from penstock.hub.folder import local_folder
from penstock.ipc.messages import Submit
from penstock.text.grammars.output_grammar import AnswerStart, output_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import FinishReason, Grammar, Request, request_id

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from json_schemas import SCHEMAS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "tags", "size"],
}
TOKENIZER = Tokenizer.from_folder(local_folder("tiny"))
_serial = itertools.count()


def submit(engine: LocalEngine, prompt: str, max_tokens: int = 200, **asked) -> int:
    sampling = SamplingParams(**({"temperature": 0.0} | asked.pop("sampling", {})))
    guided = GuidedDecodingParams(**asked) if asked else None
    grammar = None
    if guided is not None:
        text = output_grammar(TOKENIZER, AnswerStart(), guided)
        grammar = Grammar(text=text, min_tokens=sampling.min_tokens)
    rid = request_id(2, next(_serial))
    request = Request(
        id=rid,
        prompt_ids=tuple(TOKENIZER.encode(prompt)),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_ids=TOKENIZER.eos_ids,
        late_inputs=grammar is not None,
        grammar=grammar,
    )
    engine.inbox.append(Submit(requests=(request,)))
    return rid


def text_of(engine: LocalEngine, rid: int) -> str:
    return TOKENIZER.decode(engine.tokens(rid))


@pytest.fixture(scope="module", params=[True, False], ids=["depth 1", "depth 2"])
def engine(request) -> LocalEngine:
    return LocalEngine("tiny", disable_overlap_scheduler=request.param, max_batch_size=8)


def test_rows_with_and_without_a_grammar_share_steps(engine):
    plain_alone = submit(engine, "Once there was a", max_tokens=30)
    engine.run()
    plain = submit(engine, "Once there was a", max_tokens=30)
    guided = [submit(engine, f"Tell me {i}", json=SCHEMA) for i in range(3)]
    drawn = submit(engine, "Say", regex="[xyz]{8}", sampling={"temperature": 1.0, "top_p": 0.8})
    engine.run()
    assert engine.tokens(plain) == engine.tokens(plain_alone)
    for rid in guided:
        jsonschema.validate(json.loads(text_of(engine, rid)), SCHEMA)
        assert engine.deltas[rid][-1].finish is FinishReason.STOP
    assert re.fullmatch("[xyz]{8}", text_of(engine, drawn))
    assert engine.engine.grammars.num_matchers == 0


FORTY = {
    "type": "object",
    "properties": {f"measured_value_{i}": {"type": "integer", "maximum": 999} for i in range(40)},
    "required": [f"measured_value_{i}" for i in range(40)],
}


def test_tokens_that_the_grammar_leaves_no_choice_of_are_computed_together(engine, monkeypatch):
    asked = {"json": FORTY, "max_tokens": 1500}
    kinds = ({}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3}, {"logprobs": 1})

    def outputs() -> tuple[list[list[int]], list[int], int]:
        counters = engine.counters
        tokens, steps, num_known = [], [], counters.known_tokens
        for sampling in kinds:
            before = counters.steps
            rid = submit(engine, "Tell me all", sampling=sampling, **asked)
            engine.run()
            jsonschema.validate(json.loads(text_of(engine, rid)), FORTY)
            tokens.append(engine.tokens(rid))
            steps.append(counters.steps - before)
            if "logprobs" in sampling:
                num_logprobs = sum(len(delta.logprobs) for delta in engine.deltas[rid])
                assert num_logprobs == len(tokens[-1])
        return tokens, steps, counters.known_tokens - num_known

    tokens, steps, num_known = outputs()
    assert all(few < len(ids) / 2 for few, ids in zip(steps[:2], tokens, strict=False)), steps
    assert steps[2] >= len(tokens[2])  # each has its log-probability
    assert num_known > (len(tokens[0]) + len(tokens[1])) / 2
    monkeypatch.setattr(type(engine.engine.grammars), "known_tokens", lambda *_: ())
    assert outputs()[0] == tokens


def test_an_aborted_request_leaves_no_matcher(engine):
    rids = [submit(engine, "Say", max_tokens=300, regex="(ab|cd){300}e") for _ in range(3)]
    while sum(bool(engine.tokens(rid)) for rid in rids) < 3:
        engine.turn()
    assert engine.engine.grammars.num_matchers == 3
    engine.abort(*rids)
    engine.run()
    assert engine.engine.grammars.num_matchers == 0
    assert all(engine.deltas[rid][-1].finish is FinishReason.ABORT for rid in rids)


def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine):
    other = submit(engine, "Say", regex="ok")
    good = engine.inbox.pop()
    bad = Request(
        id=request_id(2, next(_serial)),
        prompt_ids=(5,),
        sampling=SamplingParams(),
        max_tokens=5,
        late_inputs=True,
        grammar=Grammar(text="start: @nowhere"),
    )
    engine.inbox += [Submit(requests=(bad,)), good]
    engine.run()
    [end] = engine.deltas[bad.id]
    assert end.finish is FinishReason.ERROR and "nowhere" in end.error
    assert text_of(engine, other) == "ok"


def test_preempted_requests_go_on_where_their_grammar_was():
    settings_ = {"max_batch_size": 4, "disable_overlap_scheduler": False}
    roomy = LocalEngine("tiny", **settings_)
    tight = LocalEngine(
        "tiny",
        **settings_,
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        kv_cache_config={"max_tokens": 192, "tokens_per_block": 16, "enable_block_reuse": False},
    )
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 9, "maxItems": 9}
    outputs = []
    for engine in (roomy, tight):
        rids = [
            submit(engine, f"Number {i} is here", max_tokens=160, json=schema) for i in range(4)
        ]
        engine.run()
        outputs.append([engine.tokens(rid) for rid in rids])
        for rid in rids:
            jsonschema.validate(json.loads(text_of(engine, rid)), schema)
        assert engine.engine.grammars.num_matchers == 0
    assert tight.counters.preemptions > 0 == roomy.counters.preemptions
    assert outputs[0] == outputs[1]


def test_the_end_comes_only_where_the_grammar_allows_it(engine):
    [eos] = TOKENIZER.eos_ids
    wants_end = {"logit_bias": {eos: 100.0}, "temperature": 0.0}
    rid = submit(engine, "Say", regex="(ab){3}(cd)?", sampling=wants_end)
    engine.run()
    assert text_of(engine, rid) == "ababab"


@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4))
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_outputs_of_any_schema_are_valid(engine, schemas):
    hot = {"temperature": 1.5, "seed": 1}
    rids = [
        submit(engine, "{", max_tokens=400, json=schema, sampling=hot if i % 2 else {})
        for i, schema in enumerate(schemas)
    ]
    engine.run()
    for rid, schema in zip(rids, schemas, strict=True):
        assert engine.deltas[rid][-1].finish is FinishReason.STOP, (schema, text_of(engine, rid))
        jsonschema.validate(
            json.loads(text_of(engine, rid)), schema, format_checker=jsonschema.FormatChecker()
        )


def test_two_ranks_with_drafts_write_what_one_does_without(engine):
    if engine.engine.config.depth == 2:
        pytest.skip("once is enough")
    asked = ({"json": SCHEMA}, {"regex": "[a-f]{9}"}, {"choice": ["left", "right"]})
    rids = [submit(engine, "Tell me", **one) for one in asked]
    engine.run()
    params = [
        SamplingParams(max_tokens=200, temperature=0, guided_decoding=GuidedDecodingParams(**one))
        for one in asked
    ]
    settings = {"tensor_parallel_size": 2, "speculative_config": EAGLE3 | FIXED}
    with LLM("tiny", device="cpu", num_threads=1, **settings) as llm:
        outputs = llm.generate(["Tell me"] * 3, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [text_of(engine, rid) for rid in rids]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch("[a-f]{9}", texts[1]) and texts[2] in ("left", "right")
