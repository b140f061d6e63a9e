"""Schemas with keywords that the library lacks -> without them, allowing the same or less.

`Rewriting.kept(schema)` allows only what the schema allows, `Rewriting.denied(schema)` only what
it does not. The library merges `allOf` and `anyOf` by itself, so a keyword becomes one more part of
an `allOf`. Where less is allowed, a writer can live with it: an item that `contains` asks for
stands among the first four; a value that tells the branches of a `oneOf` apart is always written.
What cannot be said is refused with its path.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from math import comb
from typing import Any

from penstock.text.grammars.schemas.branches import (
    Branches,
    Test,
    listed,
    names_of,
    tag_of_all,
    test_of,
)
from penstock.text.grammars.schemas.denials import DENIALS, other_values
from penstock.text.grammars.schemas.evaluated import sealed
from penstock.text.grammars.schemas.forms import (
    TYPES,
    Schema,
    UnsupportedSchema,
    absent,
    all_of,
    any_of,
    canonical,
    of_other_types,
    parts_of,
)
from penstock.text.grammars.schemas.patterns import exactly, with_length
from penstock.text.grammars.schemas.plain import PlainSchema, escaped, plain

_MAX_NODES = 20_000  # schemas that are read or made on the way
_MAX_WAYS = 64  # to have so few or so many properties
_MAX_UNIQUE = 256  # lists of different values that are written out
_MAX_FIRST = 4  # places in which an item that must be contained may be
_MAX_COUNT = 16  # of items that must be contained
# Kept as they are.
_LITERAL = (
    *("type", "const", "enum", "pattern", "format", "minLength", "maxLength", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "required"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)
_OF_OBJECTS = {"type", "properties", "required", "maxProperties"}
# Beside these another schema may speak of the same properties or items.
_SHARING = {
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "contains"),
    *("patternProperties", "unevaluatedProperties", "unevaluatedItems"),
}
_OPENING = ("additionalProperties", "patternProperties", "minProperties", "unevaluatedProperties")


_Make = Callable[[Schema, str], Schema]


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Raises `UnsupportedSchema`."""
    try:
        made = Rewriting(plain(schema)).whole()
    except RecursionError:
        raise UnsupportedSchema("$ref", "#", "leads too deep") from None
    if made is False:
        raise UnsupportedSchema("not", "#", "leaves nothing that is allowed")
    return {} if made is True else made


class Rewriting:
    def __init__(self, source: PlainSchema) -> None:
        self.source = source
        self.targets = source.targets
        self.branches = Branches(source.targets)
        self._num_nodes = self._num_shared = 0
        self.made: dict[str, Schema] = {}
        self._pending: list[tuple[str, str, _Make]] = []

    def whole(self) -> Schema:
        root = self._place(self.source.root, "#")
        while self._pending:
            name, ref, make = self._pending.pop()
            target = self.targets[ref]
            self.made[name] = make(target.schema, target.path)
        return root if not self.made else {**_as_dict(root), "$defs": self.made}

    def _reference(self, ref: str, what: str, make: "_Make") -> Schema:
        name = f"{ref.removeprefix('#/$defs/')}_{what}"
        if name not in self.made:
            self.made[name] = False  # until it is its turn
            self._pending.append((name, ref, make))
        return {"$ref": f"#/$defs/{name}"}

    def shared(self, schema: Schema) -> Schema:
        """For what is said in several places: repeated in each, it would grow with every level."""
        if isinstance(schema, bool) or all(isinstance(v, str | int) for v in schema.values()):
            return schema
        self._num_shared += 1
        name = f"part{self._num_shared}"
        self.made[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def count(self, path: str) -> None:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise UnsupportedSchema("allOf", path, "makes this schema too large")

    # What a schema allows

    def _place(self, schema: Schema, path: str, is_alone: bool = True) -> Schema:
        """Of a value. `is_alone`: no other schema speaks of it; its objects have the properties
        that are named then and no others, unless it says which: what it allows besides, a model
        fills with anything."""
        made = self.kept(schema, path, is_alone)
        names: dict[str, bool] = {}
        if not is_alone or _is_choice(schema) or not self._named(schema, names, set()):
            return made
        if not names or not all(names.values()):
            return made
        closed = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        if isinstance(made, dict) and made.keys() <= _OF_OBJECTS:
            return {**made, "additionalProperties": False}
        return all_of(made, closed)

    def _named(self, schema: Schema, names: dict[str, bool], seen: set[str]) -> bool:
        """Collects the names of its properties, and whether they are described or only required.
        False: it says itself which others there may be."""
        if not isinstance(schema, dict):
            return True
        is_open = any(keyword in schema for keyword in _OPENING)
        is_open = is_open or ("propertyNames" in schema and "properties" not in schema)
        names |= dict.fromkeys(schema.get("properties", {}), True)
        for name in names_of(schema.get("required")):
            names.setdefault(name, False)
        for name, needed in schema.get("dependentRequired", {}).items():
            for one in (name, *names_of(needed)):
                names.setdefault(one, False)
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
        parts += [schema[key] for key in ("if", "then", "else") if key in schema]
        parts += schema.get("dependentSchemas", {}).values()
        if (ref := schema.get("$ref")) is not None and ref not in seen:
            seen.add(ref)
            parts.append(self.targets[ref].schema)
        return all([self._named(part, names, seen) for part in parts]) and not is_open

    def kept(self, schema: Schema, path: str, is_alone: bool = False) -> Schema:
        if isinstance(schema, bool):
            return schema
        self.count(path)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            return any_of(*(way for way, _ in sealed(self, schema, path, ())))
        own = {key: schema[key] for key in _LITERAL if key in schema}
        inner = is_alone and not schema.keys() & _SHARING
        for key in ("properties", "patternProperties"):
            if key in schema:
                own[key] = {
                    name: self._place(one, f"{path}/{key}/{escaped(name)}", inner)
                    for name, one in schema[key].items()
                }
        for key in ("additionalProperties", "items"):
            if key in schema:
                own[key] = self._place(schema[key], f"{path}/{key}", inner)
        if "prefixItems" in schema:
            own["prefixItems"] = [
                self._place(one, f"{path}/prefixItems/{i}", inner)
                for i, one in enumerate(schema["prefixItems"])
            ]
        if "patternProperties" in own:
            own["patternProperties"] = _joined_patterns(own)
        if _is_choice(schema) and is_alone:
            make: _Make = self._place
        else:
            make = self.kept
        parts: list[Schema] = []
        for keyword, rule in _RULES:
            if keyword in schema:
                parts += rule(self, schema, path, own, make)
        return all_of(own, *parts)

    # What it does not allow

    def denied(self, schema: Schema, path: str, is_lenient: bool = False) -> Schema:
        """`is_lenient`: what a keyword of its own forbids may be left out if others are denied."""
        if isinstance(schema, bool):
            return not schema
        self.count(path)
        ways: list[Schema] = []
        refused: UnsupportedSchema | None = None
        for deny in dict.fromkeys(DENIALS.get(keyword) for keyword in schema):
            try:
                ways += () if deny is None else deny(self, schema, path)
            except UnsupportedSchema as error:
                refused = error
                if not is_lenient:
                    raise
        if refused is not None and not ways:
            raise refused
        return any_of(*ways)

    # Rules of single keywords. `own`: what is kept of the schema's own words; a rule may change it.

    def _keep_ref(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        what = "kept" if make == self.kept else "place"
        yield self._reference(schema["$ref"], what, make)

    def _keep_all(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        parts = parts_of(schema, "allOf", path)
        tests: dict[str, list[Test]] = {}
        for one, where in parts:
            if (test := test_of(one)) is not None:
                tests.setdefault(test.name, []).append(replace(test, path=where))
        by_value = {name: several for name, several in tests.items() if len(several) > 1}
        seen = {test.path for several in by_value.values() for test in several}
        for name, several in by_value.items():
            yield any_of(*self._by_value(name, several))
        yield from (self.kept(one, where) for one, where in parts if where not in seen)

    def _by_value(self, name: str, tests: list[Test]) -> Iterator[Schema]:
        """`if`s that all ask for the value of one property, value by value: as many ways as there
        are values, where one by one they double."""
        values = {text: one for test in tests for text, one in test.values.items()}
        for text, one in values.items():
            has_value = {"type": "object", "properties": {name: {"const": one}}, "required": [name]}
            yield all_of(has_value, *(self._outcome(test, text in test.values) for test in tests))
        others = any_of(*other_values([*values.values()], tests[0].path))
        has_other = {"type": "object", "properties": {name: others}, "required": [name]}
        yield all_of(has_other, *(self._outcome(test, False) for test in tests))
        has_none = {"type": "object", **absent(name)}
        yield all_of(has_none, *(self._outcome(test, not test.is_required) for test in tests))
        yield all_of(of_other_types("object"), *(self._outcome(test, True) for test in tests))

    def _outcome(self, test: Test, is_met: bool) -> Schema:
        keyword = "then" if is_met else "else"
        if keyword not in test.schema:
            return True
        return self.case(test.schema, test.path, keyword, True)

    def _keep_any(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        yield any_of(*(make(one, where) for one, where in parts_of(schema, "anyOf", path)))

    def _keep_one(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        branches = parts_of(schema, "oneOf", path)
        conditions = self.conditions([one for one, _ in branches], path)
        made = [make(one, where) for one, where in branches]
        if conditions is None:
            yield {"oneOf": made}  # which the library refuses, unless it knows better
        else:
            yield any_of(*map(all_of, made, conditions))

    def _keep_not(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        yield self.denied(schema["not"], f"{path}/not")

    def _keep_if(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        ways = self._cases(schema)
        if ways:
            yield any_of(
                *(all_of(*(self.case(schema, path, *case) for case in way)) for way in ways)
            )

    def _cases(self, schema: Any) -> list[list[tuple[str, bool]]]:
        """Keywords that hold together, and whether each is kept or denied."""
        if "then" not in schema and "else" not in schema:
            return []
        if "then" not in schema:
            return [[("if", True)], [("else", True)]]
        if "else" not in schema:
            return [[("if", True), ("then", True)], [("if", False)]]
        return [[("if", True), ("then", True)], [("if", False), ("else", True)]]

    def case(self, schema: Any, path: str, keyword: str, is_kept: bool) -> Schema:
        make = self.kept if is_kept else self.denied
        return make(schema[keyword], f"{path}/{keyword}")

    def _keep_dependent_required(
        self, schema: Any, path: str, own: Any, make: _Make
    ) -> Iterator[Schema]:
        for name, needed in schema["dependentRequired"].items():
            has_all = {"properties": dict.fromkeys((name, *needed), True), "required": [*needed]}
            yield any_of(absent(name), has_all if needed else True)

    def _keep_dependent_schemas(
        self, schema: Any, path: str, own: Any, make: _Make
    ) -> Iterator[Schema]:
        for name, one in schema["dependentSchemas"].items():
            where = f"{path}/dependentSchemas/{escaped(name)}"
            # The library writes properties that have no schema behind those that have one.
            has = {"properties": {name: True}}
            kept = self.kept(one, where)
            yield any_of(absent(name), kept if isinstance(kept, bool) else all_of(has, kept))

    def _keep_names(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        where = f"{path}/propertyNames"
        found = self._names_pattern(schema["propertyNames"], where)
        if found is False:
            yield {"maxProperties": 0}
        elif found is not True:
            yield {"patternProperties": {found: True}, "additionalProperties": False}

    def _names_pattern(self, schema: Schema, path: str) -> bool | str:
        """True: any name. False: none."""
        while isinstance(schema, dict) and "$ref" in schema and len(schema) == 1:
            target = self.targets[schema["$ref"]]
            schema, path = target.schema, target.path
        if isinstance(schema, bool):
            return schema
        words = {key: value for key, value in schema.items() if key != "type"}
        if "string" not in listed(schema.get("type", "string")):
            return False
        if not words:
            return True
        if words.keys() <= {"enum", "const"}:
            values = listed(words.get("enum", [words.get("const")]))
            texts = [one for one in values if isinstance(one, str)]
            if "enum" in words and "const" in words:
                texts = [one for one in texts if one == words["const"]]
            return exactly(texts) if texts else False
        if words.keys() <= {"minLength", "maxLength"}:
            return with_length(words.get("minLength", 0), words.get("maxLength"))
        if words.keys() == {"pattern"}:
            return str(words["pattern"])
        raise UnsupportedSchema("propertyNames", path, "is supported with one keyword alone")

    def _keep_contains(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        one, where = schema["contains"], f"{path}/contains"
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if least > _MAX_COUNT or (most is not None and most - least > _MAX_COUNT):
            raise UnsupportedSchema("contains", path, f"is supported up to {_MAX_COUNT} items")
        wanted = self.shared(self.kept(one, where))
        ways: list[dict[str, Any]] = []
        if most is not None:  # they come first, and none behind them
            other = self.shared(self.denied(one, where))
            first = [[wanted] * count for count in range(least, most + 1)]
            ways += [{"prefixItems": has, "items": other, "minItems": len(has)} for has in first]
        elif least == 1:
            first = [[*[True] * count, wanted] for count in range(_MAX_FIRST)]
            ways += [{"prefixItems": has, "minItems": len(has)} for has in first]
        elif least:
            ways.append({"prefixItems": [wanted] * least, "minItems": least})
        else:
            return
        yield any_of(of_other_types("array"), *({"type": "array", **way} for way in ways))

    def _keep_unique(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        most, least = schema.get("maxItems"), schema.get("minItems", 0)
        if schema["uniqueItems"] is not True or (most is not None and most <= 1):
            return
        values = None
        if "prefixItems" not in schema and "contains" not in schema:
            values = self.branches.few_values(schema.get("items", True))
        if values is None:
            raise UnsupportedSchema("uniqueItems", path, "is supported for items of an enum alone")
        sizes = range(least, min(len(values), len(values) if most is None else most) + 1)
        lists = _different(list(values.values()), sizes)
        if lists is None:
            raise UnsupportedSchema("uniqueItems", path, "is supported for a few values alone")
        yield any_of(of_other_types("array"), {"enum": lists} if lists else False)

    def _keep_fewest(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        """The library counts properties only where all that are named are required."""
        optional = _optional(schema)
        missing = schema["minProperties"] - len(names_of(schema.get("required")))
        if optional and 0 < missing <= len(optional) and comb(len(optional), missing) <= _MAX_WAYS:
            del own["minProperties"]
            yield any_of(*({"required": [*some]} for some in combinations(optional, missing)))
        elif optional and missing <= 0:
            del own["minProperties"]

    def _keep_most(self, schema: Any, path: str, own: Any, make: _Make) -> Iterator[Schema]:
        optional, required = _optional(schema), names_of(schema.get("required"))
        spare = schema["maxProperties"] - len(required)
        if not optional or spare < 0:
            return
        spare = min(spare, len(optional))
        if comb(len(optional), spare) <= _MAX_WAYS:
            del own["maxProperties"]
            yield any_of(
                *(
                    {
                        "properties": dict.fromkeys((*some, *required), True),
                        "additionalProperties": False,
                    }
                    for some in combinations(optional, spare)
                )
            )

    # Branches that exclude each other

    def conditions(self, branches: list[Schema], path: str) -> list[Schema] | None:
        """Of each branch, what it takes beside it for the others not to match. None: not known."""
        kinds = [self.branches.types(one) for one in branches]
        rivals = [
            [j for j in range(len(branches)) if j != i and kinds[i] & kinds[j]]
            for i in range(len(branches))
        ]
        if not any(rivals):
            return [True] * len(branches)
        tags = [self.branches.tags(one) for one in branches]
        if name := tag_of_all(tags):  # anything but an object may match several
            return [{"type": "object", "required": [name]}] * len(branches)
        wanted = [self.branches.required(one) for one in branches]
        conditions: list[Schema] = []
        try:
            for i, own in enumerate(rivals):
                named: dict[str, bool] = {}
                self._named(branches[i], named, set())
                parts: list[Schema] = []
                for j in own:
                    missing = sorted(wanted[j] - named.keys())
                    if missing and kinds[i] & kinds[j] == {"object"}:
                        parts.append(absent(missing[0]))
                    elif missing and kinds[i] & kinds[j] == {*TYPES}:
                        parts.append({"type": "object", **absent(missing[0])})
                    else:
                        parts.append(self._denied_branch(branches[j], f"{path}/oneOf/{j}"))
                conditions.append(all_of(*parts))
        except UnsupportedSchema:
            return None
        return conditions

    def _denied_branch(self, branch: Schema, path: str) -> Schema:
        while isinstance(branch, dict) and branch.keys() == {"$ref"}:
            self.count(path)
            target = self.targets[branch["$ref"]]
            branch, path = target.schema, target.path
        return self.denied(branch, path, is_lenient=True)


def _as_dict(schema: Schema) -> dict[str, Any]:
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return schema


def _is_choice(schema: Schema) -> bool:
    """It says nothing but which other schemas there are for the value."""
    return isinstance(schema, dict) and any(
        schema.keys() <= {key, "type"} and key in schema for key in ("anyOf", "oneOf", "$ref")
    )


def _optional(schema: dict[str, Any]) -> list[str]:
    return [
        one for one in schema.get("properties", ()) if one not in names_of(schema.get("required"))
    ]


def _joined_patterns(own: dict[str, Any]) -> dict[str, Any]:
    """The library wants patterns of which a name matches one at most: those that ask for the same
    are one, and those that ask for nothing are none, unless they are all that is allowed."""
    is_open = own.get("additionalProperties", True) is True
    found: dict[str, tuple[list[str], Any]] = {}
    for pattern, one in own["patternProperties"].items():
        if not (is_open and one is True):
            found.setdefault(canonical(one), ([], one))[0].append(pattern)
    return {
        patterns[0] if len(patterns) == 1 else "|".join(f"(?:{p})" for p in patterns): one
        for patterns, one in found.values()
    }


def _different(values: list[Any], sizes: range) -> list[list[Any]] | None:
    """All lists of different values; where there are too many, those in the given order."""
    for choose in (permutations, combinations):
        found: list[list[Any]] = []
        for size in sizes:
            found += map(list, choose(values, size))
            if len(found) > _MAX_UNIQUE:
                break
        else:
            return found
    return None


_Rule = Callable[[Rewriting, Any, str, dict[str, Any], _Make], Iterator[Schema]]
_RULES: tuple[tuple[str, _Rule], ...] = (
    ("$ref", Rewriting._keep_ref),
    ("allOf", Rewriting._keep_all),
    ("anyOf", Rewriting._keep_any),
    ("oneOf", Rewriting._keep_one),
    ("not", Rewriting._keep_not),
    ("if", Rewriting._keep_if),
    ("dependentRequired", Rewriting._keep_dependent_required),
    ("dependentSchemas", Rewriting._keep_dependent_schemas),
    ("propertyNames", Rewriting._keep_names),
    ("contains", Rewriting._keep_contains),
    ("uniqueItems", Rewriting._keep_unique),
    ("minProperties", Rewriting._keep_fewest),
    ("maxProperties", Rewriting._keep_most),
)
