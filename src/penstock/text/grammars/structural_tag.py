"""Structural tags: free text in which a trigger opens a tagged part with a schema of its own.

`{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [..]}`.
"""

import json
from typing import Any

from penstock.errors import RequestError
from penstock.text.grammars.json_schema import schema_grammar
from penstock.text.grammars.rules import ANY_TEXT, Rules


def structural_tag(text: str, rules: Rules, param: str) -> str:
    """What stands for it in a rule."""
    structures, triggers = _read(text, param)
    alternatives = []
    for i, trigger in enumerate(triggers):
        bodies = []
        for number, one in enumerate(structures):
            if one["begin"].startswith(trigger):
                where = f"{param}.structures[{number}].schema"
                schema = rules.part(schema_grammar(json.dumps(one["schema"]), where))
                rest = one["begin"].removeprefix(trigger)
                words = (rules.words(rest) if rest else "", rules.words(one["end"] or ""))
                bodies.append(f"{words[0]} {schema} {words[1] if one['end'] else ''}")
        alternatives.append(f"{rules.up_to(f'until{i}', trigger)} ({' | '.join(bodies)})")
    return f"({' | '.join(alternatives)})* {rules.rule('TEXT', ANY_TEXT)}"


def _read(text: str, param: str) -> tuple[list[dict[str, Any]], list[str]]:
    def refuse(what: str) -> RequestError:
        return RequestError("invalid_value", f"{param}: {what}", param)

    try:
        tag = json.loads(text)
    except (ValueError, RecursionError):
        raise refuse("a structural tag is JSON") from None
    if isinstance(tag, dict) and "format" in tag:
        raise refuse(
            "'format' is xgrammar's own notation, which is not supported; give structures and "
            "triggers"
        )
    structures = tag.get("structures") if isinstance(tag, dict) else None
    triggers = tag.get("triggers") if isinstance(tag, dict) else None
    if not structures or not isinstance(structures, list):
        raise refuse("structures must be a list of {begin, schema, end}")
    if not triggers or not isinstance(triggers, list) or not all(map(_is_text, triggers)):
        raise refuse("triggers must be a list of texts")
    for i, one in enumerate(structures):
        is_one = isinstance(one, dict) and _is_text(one.get("begin"))
        if not is_one or not isinstance(one.get("end"), str) or "schema" not in one:
            raise refuse(f"structures[{i}] must have the texts begin and end, and a schema")
        if not any(one["begin"].startswith(trigger) for trigger in triggers):
            raise refuse(f"structures[{i}].begin starts with none of the triggers")
    for trigger in triggers:
        if not any(one["begin"].startswith(trigger) for one in structures):
            raise refuse(f"no structure begins with the trigger '{trigger[:80]}'")
    return structures, triggers


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
