"""What a grammar forces, in the vocabularies of real models: the tokens of the text itself; and the
ids that close harmony's analysis."""

import json

import llguidance
import pytest

from penstock.text.grammars.output_grammar import AnswerStart, output_grammar
from penstock.text.reasoning.budget import thinking_budget
from penstock.types.guided_decoding import GuidedDecodingParams

FIELDS = ("measured_value", "Größe", "unit of measure", "has_more")
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "integer", "maximum": 99} for name in FIELDS},
    "required": list(FIELDS),
}


@pytest.mark.parametrize("name", ["llama-3", "qwen3", "gpt-oss"])
def test_forced_tokens_are_those_of_the_text(load_tokenizer, load_vocabulary, name):
    """So a model sees what it would have written itself."""
    tokenizer, vocabulary = load_tokenizer(name), load_vocabulary(name)
    params = GuidedDecodingParams(json=SCHEMA, whitespace_pattern="")
    matcher = llguidance.LLMatcher(vocabulary, output_grammar(tokenizer, AnswerStart(), params))
    text = json.dumps(dict.fromkeys(FIELDS, 7), ensure_ascii=False, separators=(",", ":"))
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    num_forced = at = 0
    while at < len(ids):
        forced = matcher.compute_ff_tokens()
        assert forced == ids[at : at + len(forced)], tokenizer.decode(forced, False)
        num_forced += len(forced)
        step = forced or [ids[at]]
        assert matcher.consume_tokens(step), matcher.get_error()
        at += len(step)
    assert matcher.is_accepting() and num_forced > 8


def test_harmony_is_closed_by_its_own_tokens(load_tokenizer):
    tokenizer, start = load_tokenizer("gpt-oss"), AnswerStart(reasoning="harmony")

    def written(ids: tuple[int, ...]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    budget = thinking_budget(tokenizer, start, 5, has_tools=False)
    assert written(budget.opening) == "<|channel|>analysis<|message|>"
    assert written(budget.closing) == "<|end|>" and budget.not_next is None
    assert written(budget.ending) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    budget = thinking_budget(tokenizer, start, 5, has_tools=True)
    assert written(budget.ending) == "<|end|><|start|>assistant<|channel|>"
    assert written((budget.not_next,)) == "analysis"
    for name in ("qwen3",):
        tokenizer = load_tokenizer(name)
        budget = thinking_budget(tokenizer, AnswerStart(reasoning="think"), 5, has_tools=False)
        assert written(budget.ending) == "</think>"
