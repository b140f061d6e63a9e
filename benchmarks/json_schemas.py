"""JSON Schemas through the engine: what is refused, and is every output of the others valid?

    python benchmarks/json_schemas.py --suite JSON-Schema-Test-Suite/tests --random 500
    python benchmarks/json_schemas.py --random 100 --show      # no suite; prints what fails
    python benchmarks/json_schemas.py --random 100 --model smollm2 --bias 0

Each schema is asked for once, every other one greedily, the others with temperature 1.5; what is
written is checked by jsonschema. Invalid outputs are failures, and so are those that `--max_tokens`
cuts. The built-in model does not find the end of a text by itself: `--bias` is added to the logits
of a quotation mark and of the end, two thirds of it to those of brackets that close, and tokens
that come again get a penalty.

suite: the distinct schemas of the drafts 2020-12, 2019-09 and 7. Its folder `tests` comes with the
source archive of the package jsonschema, as `json/tests`.
random: nested objects, lists and choices of bounded leaves, of keywords that are all supported.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from referencing.exceptions import Unresolvable

from penstock import LLM, GuidedDecodingParams, SamplingParams
from penstock.errors import RequestError
from penstock.types.outputs import RequestOutput

DRAFTS = ("draft2020-12", "draft2019-09", "draft7")
# In patterns, as JSON writes them: classes that jsonschema, which has Python's `re`, cannot read.
PYTHONS = {r"\\p{Letter}": r"[^\\W\\d_]", r"\\p{digit}": r"\\d"}
REFUSED, VALID, CUT, INVALID = "refused", "valid", "cut by length", "invalid"
Schema = dict[str, Any] | bool


_NAMES = st.sampled_from(["a", "name", "größe", 'quo"te', "x y"])


def _of_schemas(inner):
    objects = st.builds(
        lambda properties, num, more: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num],
            "additionalProperties": more,
            **({"maxProperties": len(properties)} if more else {}),
        },
        st.dictionaries(_NAMES, inner, min_size=1, max_size=3),
        st.integers(0, 3),
        st.just(False),
    )
    arrays = st.builds(
        lambda items, few, more: {
            "type": "array", "items": items, "minItems": few, "maxItems": few + more
        },
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})
    return objects | arrays | choices


_LEAVES = (
    st.builds(
        lambda few, more: {"type": "string", "minLength": few, "maxLength": few + more},
        st.integers(0, 3),
        st.integers(0, 5),
    )
    | st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-200, 200),
        st.integers(0, 5000),
    )
    | st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"const": {"k": [1, None, "ü"]}},
            {"enum": ["red", 7, None, 2.5, "\n"]},
            {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
        ]
    )
)
SCHEMAS = st.recursive(_LEAVES, _of_schemas, max_leaves=6)


def suite_schemas(folder: Path) -> Iterator[Schema]:
    for draft in DRAFTS:
        for path in sorted((folder / draft).rglob("*.json")):
            for group in json.loads(path.read_text()):
                yield group["schema"]


def random_schemas(count: int) -> list[Schema]:
    """The same ones every time."""
    found: list[Schema] = []

    @seed(0)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(SCHEMAS)
    def collect(schema: Schema) -> None:
        found.append(schema)

    collect()
    return found


def distinct(schemas: Iterable[Schema]) -> list[Schema]:
    """Of those that differ in `$schema` alone the first."""
    found: dict[str, Schema] = {}
    for schema in schemas:
        bare = schema
        if isinstance(schema, dict):
            bare = {key: value for key, value in schema.items() if key != "$schema"}
        found.setdefault(json.dumps(bare, sort_keys=True), schema)
    return list(found.values())


def verdict(schema: Schema, output: RequestOutput) -> str:
    choice = output.outputs[0]
    if choice.finish_reason == "length":
        return CUT
    text = json.dumps(schema)
    for theirs, pythons in PYTHONS.items():
        text = text.replace(theirs, pythons)
    return VALID if is_valid(json.loads(text), json.loads(choice.text)) else INVALID


def is_valid(schema: Schema, instance: Any) -> bool:
    """One that does not name its draft is of the newest by which its references lead anywhere."""
    for draft in (jsonschema.Draft202012Validator, jsonschema.Draft7Validator):
        kind = jsonschema.validators.validator_for(schema, draft)
        try:
            return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(instance))
        except Unresolvable as error:
            unresolved = error
    raise unresolved


class Outputs:
    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self._llm, self._args = llm, args

    def count(self, schemas: list[Schema]) -> tuple[Counter[str], Counter[str]]:
        """How often what happened, and why schemas were refused."""
        asked = [self._ask(number, schema) for number, schema in enumerate(schemas)]
        counts, reasons = Counter[str](), Counter[str]()
        for schema, request in zip(schemas, asked, strict=True):
            try:
                output = request.result(timeout=3600)
            except RequestError as error:
                counts[REFUSED] += 1
                reasons[reason(error)] += 1
                continue
            found = verdict(schema, output)
            counts[found] += 1
            if self._args.show and found in {CUT, INVALID}:
                print(f"{found}: {json.dumps(schema)}\n    {output.outputs[0].text[:200]!r}")
        return counts, reasons

    def _ask(self, number: int, schema: Schema) -> Any:
        sampling = SamplingParams(
            max_tokens=self._args.max_tokens,
            temperature=1.5 * (number % 2),
            seed=number,
            frequency_penalty=0.5,
            logit_bias=self._bias(),
            guided_decoding=GuidedDecodingParams(json=json.dumps(schema)),
        )
        prompt = f"JSON that matches the schema {json.dumps(schema)[:400]} is for example "
        return self._llm.generate_async(prompt, sampling)

    def _bias(self) -> dict[int, float]:
        if not self._args.bias:
            return {}
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None
        ends = dict.fromkeys([tokenizer.encode('"')[-1], *tokenizer.eos_ids], self._args.bias)
        brackets = [tokenizer.encode(text)[-1] for text in "]}"]
        return ends | dict.fromkeys(brackets, self._args.bias * 2 / 3)


def reason(error: RequestError) -> str:
    """The keyword of a refusal, or the beginning of what it says."""
    message = re.sub(r"'http[^']*'", "...", str(error).partition(": ")[2])
    keyword = re.search(r'["\'](\$?[a-z]\w+)["\']', message)
    return keyword[1] if keyword else message[:60].partition("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", type=Path, help="folder `tests` of JSON-Schema-Test-Suite")
    parser.add_argument("--random", type=int, default=0, help="so many random schemas")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--bias", type=float, default=12.0, help="of tokens that end something")
    parser.add_argument("--max_tokens", type=int, default=400)
    parser.add_argument("--show", action="store_true", help="print schemas that fail")
    args = parser.parse_args()
    sets = {
        "suite": distinct(suite_schemas(args.suite)) if args.suite else [],
        "random": distinct(random_schemas(args.random)) if args.random else [],
    }
    num_failed = 0
    with LLM(args.model, max_batch_size=64) as llm:
        for name, schemas in sets.items():
            counts, reasons = Outputs(llm, args).count(schemas)
            num_failed += counts[CUT] + counts[INVALID]
            print(f"{name}: {len(schemas)} schemas")
            for what, count in counts.most_common():
                print(f"{count:>8}  {what}")
            for why, count in reasons.most_common():
                print(f"{count:>12}  {why}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
