"""Grammars are made once for the same schema and tools, and only those that can be one are kept."""

import pytest

from penstock.errors import RequestError
from penstock.frontend import output_grammars
from penstock.frontend.output_grammars import OutputGrammars
from penstock.hub.folder import local_folder
from penstock.text.grammars.output_grammar import AnswerStart, output_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types.guided_decoding import GuidedDecodingParams
from penstock.types.request import ToolRule

START = AnswerStart()


@pytest.fixture
def made(monkeypatch):
    """What has been made."""
    made = []

    def make(tokenizer, *asked):
        made.append(asked)
        return output_grammar(tokenizer, *asked)

    monkeypatch.setattr(output_grammars, "output_grammar", make)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(local_folder("tiny"))


def tool(kind: str) -> dict:
    return {"function": {"name": "f", "parameters": {"properties": {"a": {"type": kind}}}}}


def test_the_same_schema_is_made_once(made, tokenizer, run):
    grammars = OutputGrammars(tokenizer)
    schemas = [{"type": "integer"}, {"type": "string"}, {"type": "integer"}]
    asked = [GuidedDecodingParams(json=one, param=f"p{i}") for i, one in enumerate(schemas)]
    texts = [run(grammars.get(START, one, (), None, True)) for one in asked]
    assert texts == [output_grammar(tokenizer, START, one) for one in asked]
    assert len(made) == 2


def test_tools_and_rules_are_told_apart(made, tokenizer, run):
    grammars = OutputGrammars(tokenizer)
    rule, start = ToolRule(names=("f",)), AnswerStart(tools="hermes")
    wanted = [
        ([tool(kind)], several) for kind in ("integer", "string") for several in (True, False)
    ]
    for _ in range(2):
        for tools, several in wanted:
            text = run(grammars.get(start, None, tools, rule, several))
            assert text == output_grammar(tokenizer, start, None, tools, rule, several)
    assert len(made) == len(wanted)


def test_what_is_no_schema_is_refused_each_time(made, tokenizer, run):
    grammars = OutputGrammars(tokenizer)
    for name in ("response_format", "guided_json"):
        asked = GuidedDecodingParams(json={"type": "nonsense"}, param=name)
        with pytest.raises(RequestError, match=name):
            run(grammars.get(START, asked, (), None, True))
    assert len(made) == 2


def test_those_asked_for_last_are_kept(made, tokenizer, run, monkeypatch):
    monkeypatch.setattr(output_grammars, "_MAX_KEPT", 2)
    grammars = OutputGrammars(tokenizer)
    for number in (1, 2, 1, 3, 1, 2):
        asked = GuidedDecodingParams(json={"const": number})
        run(grammars.get(START, asked, (), None, True))
    assert [one[1].json for one in made] == [f'{{"const": {n}}}' for n in (1, 2, 3, 2)]
