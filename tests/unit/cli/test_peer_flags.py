"""Flags of peers: what is said of one leads to something that there is."""

from typing import get_args

import pytest
from pydantic import BaseModel

from penstock.cli.flags import add_serve_flags
from penstock.cli.parser import Parser
from penstock.cli.peer_flags import _HERE, _SAID, peer_hint
from penstock.config.schema import EngineConfig


@pytest.fixture(scope="module")
def serve_flags() -> set[str]:
    parser = Parser()
    add_serve_flags(parser)
    return parser.flag_names


def is_field(path: str) -> bool:
    model: type = EngineConfig
    for name in path.split("."):
        if not issubclass(model, BaseModel) or name not in model.model_fields:
            return False
        kind = model.model_fields[name].annotation
        model = next((one for one in (kind, *get_args(kind)) if isinstance(one, type)), object)
    return True


@pytest.mark.parametrize("name", _HERE)
def test_what_stands_for_a_flag_is_a_flag_of_serve_or_a_field(serve_flags, name):
    assert name not in serve_flags
    hint = peer_hint(name, serve_flags)
    assert hint.startswith("; here it is --")
    if "--set" in hint:
        assert is_field(hint.partition("--set ")[2].partition("=")[0])


def test_what_needs_no_flag_has_none(serve_flags):
    assert not serve_flags & _SAID.keys()
    assert peer_hint("--model", serve_flags) == "; give the model without a flag"


def test_a_command_without_such_a_flag_does_not_name_it():
    assert peer_hint("--max_num_seqs", {"--url"}) == ""
    assert peer_hint("--something_else", {"--max_batch_size"}) == ""
