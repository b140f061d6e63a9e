"""The table of TensorRT-LLM's fields: complete, and in step with the schema."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import ALIASES, FIELDS, Verdict, ruling_of

FACTS = Path(__file__).parents[4] / "shared" / "design" / "trtllm_facts.md"
# Words in backticks that are values or other things than fields.
NOT_FIELDS = {"rpc", "ray", "rocket", "dsa", "skip_softmax", "response_format"}
SECTION_OF_HEADING = {
    "2.1": "",
    "2.2": "kv_cache_config",
    "2.3": "cuda_graph_config",
    "2.4": "moe_config",
    "2.5": "attention_dp_config",
    "2.6": "speculative_config",
}


def listed_fields() -> list[tuple[str, str]]:
    """(section, name) of every field the fact sheet lists; names as it writes them."""
    text = FACTS.read_text(encoding="utf-8")
    chapter = text[text.index("## 2. YAML") : text.index("### 2.8")]
    found = []
    section = ""
    for line in chapter.splitlines():
        if heading := re.match(r"### (2\.\d)", line):
            section = SECTION_OF_HEADING.get(heading[1], "")
            continue
        names = [name.partition(":")[0] for name in re.findall(r"`([^`]+)`", line)]
        if line.startswith("- `") and names[0].endswith("_config"):  # 2.7: one section a line
            section = names[0]
        for name in names:
            if not name.startswith("/") and name not in NOT_FIELDS:
                found.append((section, name))
    return found


def known(section: str, name: str) -> bool:
    paths = {*FIELDS, *ALIASES}
    inside = [path for path in paths if not section or path.startswith(section + ".")]
    if name.startswith("..."):
        return any(path.endswith(name[3:]) for path in inside)
    if name.startswith("begin/end_"):
        return all(known(section, word + name[9:]) for word in ("begin", "end"))
    if name in paths:
        return True
    return any(path.endswith("." + name) for path in inside)


@pytest.mark.skipif(not FACTS.exists(), reason="the fact sheet is not here")
def test_every_field_of_the_fact_sheet_has_a_verdict():
    listed = listed_fields()
    assert len(listed) > 190
    assert [item for item in listed if not known(*item)] == []


def schema_paths(model: type[BaseModel] = EngineConfig, prefix: str = "") -> set[str]:
    paths = set()
    for name, info in model.model_fields.items():
        paths.add(prefix + name)
        for arm in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(arm, type) and issubclass(arm, BaseModel):
                paths |= schema_paths(arm, prefix + name + ".")
    return paths


def test_supported_fields_are_exactly_those_the_schema_has():
    supported = {path for path, ruling in FIELDS.items() if ruling.verdict is Verdict.SUPPORTED}
    assert supported - schema_paths() == set()
    assert {path for path in schema_paths() if path in FIELDS} == supported


def test_every_refusal_and_every_warning_has_a_reason():
    for path, ruling in FIELDS.items():
        assert (ruling.verdict is Verdict.SUPPORTED) != bool(ruling.reason), path


def test_aliases_lead_to_fields_and_hide_none():
    for alias, target in ALIASES.items():
        assert target in FIELDS or target in EngineConfig.model_fields
        assert alias not in FIELDS


def test_a_pattern_covers_every_name_that_begins_like_it():
    assert ruling_of("use_cute_dsl_anything") is FIELDS["use_cute_dsl_*"]
    assert ruling_of("use_cute") is None
