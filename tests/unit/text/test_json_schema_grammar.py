"""JSON Schemas as grammars: what they allow, by jsonschema's verdict; what is refused, where."""

import functools
import json
from datetime import date, datetime, time

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.hub.folder import local_folder
from penstock.text.grammars.json_schema import schema_grammar
from penstock.text.grammars.library import MAX_GRAMMAR_CHARS, make_vocabulary
from penstock.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "format": "person-name"},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "maxItems": 2},
        "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["name", "id"],
    "$defs": {"pet": {"type": "object", "properties": {"legs": {"enum": [0, 2, 4]}}}},
}
INSTANCES = [
    {"name": "Ann", "id": 3},
    {"name": "Ann", "pets": [{"legs": 4}, {}], "id": None},
    {"name": "much too long", "id": 3},
    {"name": "Ann", "pets": [{"legs": 3}], "id": 3},
    {"name": "Ann", "pets": [{}, {}, {}], "id": 3},
    {"name": "Ann"},
    {"name": 5, "id": "x"},
    [],
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(local_folder("tiny"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.fixture(scope="module")
def allows(tokenizer, vocabulary):
    def check(schema, text: str) -> bool:
        part = {"name": "main", **schema_grammar(json.dumps(schema), "schema")}
        matcher = llguidance.LLMatcher(vocabulary, json.dumps({"grammars": [part]}))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
@pytest.mark.parametrize("indent", [None, 2])
def test_instances_are_allowed_as_far_as_they_are_valid(allows, instance, indent):
    is_valid = jsonschema.Draft202012Validator(PERSON).is_valid(instance)
    assert allows(PERSON, json.dumps(instance, indent=indent)) == is_valid


def test_blanks_are_bounded(allows):
    assert allows(PERSON, '{ "name": "Ann",\n\t"id":1 }')
    assert not allows(PERSON, '{"name": ' + " " * 3 + '"Ann", "id": 1}')


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "2023-12-31", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2023-04-31", False),
        ("date", "0000-01-01", False),
        ("time", "11:11:11.25+01:00", True),
        ("time", "11:11:60Z", False),
        ("date-time", "2024-02-29T11:11:11Z", True),
        ("date-time", "2023-02-29T11:11:11Z", False),
        ("date-time", "2023-02-28T11:11:60Z", False),
    ],
)
def test_times_are_those_that_python_reads(allows, name, text, is_allowed):
    assert _is_read({"date": date, "time": time, "date-time": datetime}[name], text) == is_allowed
    assert allows({"type": "string", "format": name}, json.dumps(text)) == is_allowed
    before_noon = {"type": "string", "format": name, "allOf": [{"pattern": "^[^T]*$|T0"}]}
    assert allows(before_noon, json.dumps(text)) == (is_allowed and "T1" not in text)


def _is_read(kind: type[date] | type[time], text: str) -> bool:
    try:
        kind.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_count_may_be_written_with_a_point(allows):
    schema = {"type": "array", "items": {"type": "null"}, "maxItems": 1.0}
    assert allows(schema, "[null]")
    assert not allows(schema, "[null, null]")


def test_objects_are_closed_unless_the_schema_opens_them(allows):
    more = '{"name": "Ann", "id": 3, "more": 1}'
    assert not allows(PERSON, more)
    assert allows(PERSON | {"additionalProperties": True}, more)
    spread = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {"type": "integer"}}}]}
    assert allows({"type": "object"} | spread, '{"a": 1, "b": 2}')
    assert allows({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"b": 2}')


OBJECTS = [
    *({}, {"a": 1}, {"a": 2}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}),
    *({"c": 1}, {"a": 1, "c": 2}, {"ab": 1}, {"a": 1, "b": 2, "c": 3}, 5, "x", None),
]
LISTS = [[], [1], ["a"], [1, "a"], ["a", 1], ["a", "b", 1], [1, 1], ["a", "a"], {}, 3]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CAT = {"properties": {"a": {"const": 1}, "b": {"type": "integer"}}, "required": ["b"]}
DOG = {"properties": {"a": {"const": "x"}, "c": {}}, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "instances", "num_fewer"),
    [
        ({"not": {"type": "object"}}, OBJECTS, 0),
        ({"not": {"enum": [5, "x", "xy", None, True]}}, [5, 6, 5.5, "x", "y", "xyz", None, ""], 0),
        (
            {
                "properties": {"a": {}, "b": {}, "c": {}},
                "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
                "then": {"required": ["b"]},
                "else": {"required": ["c"]},
            },
            OBJECTS,
            0,
        ),
        (
            {
                "properties": {"b": {}, "c": {}},
                "allOf": [
                    {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
                    {"if": {"properties": {"a": {"const": 2}}}, "then": {"required": ["c"]}},
                ],
            },
            OBJECTS,
            3,  # with properties that the schema does not name
        ),
        (
            {"dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}, "c": {}}},
            OBJECTS,
            1,
        ),
        ({"$schema": DRAFT_7, "dependencies": {"a": {"required": ["b"]}}}, OBJECTS, 0),
        (
            {
                "properties": {"a": {}},
                "anyOf": [
                    {"properties": {"b": {"const": 2}}, "required": ["b"]},
                    {"required": ["c"]},
                ],
                "unevaluatedProperties": False,
            },
            OBJECTS,
            0,
        ),
        (
            {"$ref": "#/$defs/x", "unevaluatedProperties": False, "$defs": {"x": CAT}},
            OBJECTS,
            0,
        ),
        ({"oneOf": [CAT, DOG]}, OBJECTS, 7),  # where nothing tells them apart
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"p": {"pattern": "x"}, n: {}},
                        "required": [n],
                    }
                    for n in "abcdefghijkl"
                ]
            },
            OBJECTS,
            0,
        ),
        ({"propertyNames": {"maxLength": 1}, "additionalProperties": True}, OBJECTS, 0),
        (
            {"minProperties": 2, "maxProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}},
            OBJECTS,
            0,
        ),
        ({"contains": {"type": "integer"}}, LISTS, 0),
        ({"contains": {"type": "integer"}, "maxContains": 1}, LISTS, 2),  # it comes first
        (
            {"prefixItems": [{}], "contains": {"type": "string"}, "unevaluatedItems": False},
            LISTS,
            0,
        ),
        (  # which no list depends on
            {"dependentSchemas": {"a": {"items": {}}}, "unevaluatedItems": False},
            LISTS,
            0,
        ),
        ({"items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "type": "array"}, LISTS, 0),
        (
            {
                "$id": "http://a/b",
                "properties": {"a": {"$ref": "c#one"}, "b": True},
                "$defs": {"x": {"$id": "c", "$defs": {"y": {"$anchor": "one", "type": "integer"}}}},
            },
            OBJECTS,
            4,
        ),
    ],
    ids=str,
)
def test_keywords_that_the_library_lacks_are_kept(allows, schema, instances, num_fewer):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema)
    valid = [one for one in instances if validator.is_valid(one)]
    let_through = [one for one in instances if allows(schema, json.dumps(one))]
    assert let_through and len(let_through) < len(instances)
    assert [one for one in let_through if one not in valid] == []
    assert len(valid) - len(let_through) == num_fewer


@pytest.mark.parametrize("pattern", ["cole", "a|cole$", "^.*cole", "[a-z]cole"])
def test_a_search_ends(allows, pattern):
    """A model that never comes to the word could write on for ever."""
    schema = {"type": "string", "pattern": pattern}
    assert allows(schema, '"xcole"') and allows(schema, f'"{" " * 200}xcole"')
    assert not allows(schema, f'"{" " * 300}xcole"')
    keys = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    assert allows(keys, '{"xcole": 1}')
    assert not allows(keys, json.dumps({" " * 80 + "xcole": 1}))


@pytest.mark.parametrize("pattern", [r"\S", "^a", "^.*$", r"a\$", "(?i)a"])
def test_texts_that_are_no_search_may_be_long(allows, pattern):
    assert allows({"type": "string", "pattern": pattern}, f'"{"a" * 500}$"')


def test_a_long_key_that_a_pattern_asks_something_of_is_not_let_through(allows):
    """Where other keys may be anything, none is taken from the pattern."""
    schema = {"patternProperties": {"cole": {"type": "integer"}}, "type": "object"}
    assert not allows(schema, json.dumps({" " * 80 + "cole": "x"}))


@pytest.mark.parametrize(
    "schema",
    [
        functools.reduce(lambda inner, _: {"contains": inner}, range(60), {"type": "string"}),
        functools.reduce(lambda inner, _: {"oneOf": [inner] * 2}, range(9), {"minimum": 1}),
        {
            "$defs": {
                "d40": {"type": "integer"},
                **{f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            },
            "$ref": "#/$defs/d0",
        },
        {
            "$defs": {
                "d40": {"type": "integer"},
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            },
            "$ref": "#/$defs/d0",
            "unevaluatedProperties": False,
        },
        {"not": {"const": "x" * 100_000}},
    ],
    ids=["contains", "oneOf", "references", "unevaluated", "const"],
)
def test_what_doubles_with_every_level_is_bounded(schema):
    """These took for ever, or the memory of the machine."""
    try:
        assert len(json.dumps(schema_grammar(json.dumps(schema), "schema"))) < 100_000
    except RequestError as refusal:
        assert "at #" in refusal.message


@pytest.mark.parametrize(
    ("schema", "path", "said"),
    [
        ({"not": {"pattern": "a"}}, "#/not", "pattern"),
        (
            {"properties": {"a/b": {"items": {"uniqueItems": True}}}},
            "#/properties/a~1b/items",
            "un",
        ),
        ({"anyOf": [{}, {"type": "strin"}]}, "#/anyOf/1", "strin"),
        (
            {"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}},
            "#/$defs/x",
            "un",
        ),
        ({"not": {"$ref": "http://a/b"}}, "#/not", "not in the request"),
        ({"not": 5}, "#/not", "not"),
        ({"allOf": [{"not": {}, "properties": 5}]}, "#/allOf/0", "cannot be"),
        ({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, "#/properties/p", "look"),
        ({"prefixItems": [{"$ref": "#/nowhere"}]}, "#/prefixItems/0", "nowhere"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#", "greater"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_with_its_path(schema, path, said):
    with pytest.raises(RequestError) as refusal:
        schema_grammar(json.dumps(schema), "response_format")
    assert f"at {path};" in refusal.value.message and said in refusal.value.message
    assert refusal.value.param.startswith("response_format")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '"text"',
        "[" * 5000,
        '{"items": ' * 90 + "{}" + "}" * 90,
        '{"items": {"$ref": "#/$defs/a", "$id": "x"}, "$defs": {"a": {}}}',
        json.dumps({"const": "a" * MAX_GRAMMAR_CHARS}),
        json.dumps({"items": {"properties": {f"p{i}": {} for i in range(1025)}}}),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_schema_or_too_large_is_refused(text):
    with pytest.raises(RequestError):
        schema_grammar(text, "response_format")


_KEYWORDS = (
    *("type", "properties", "items", "required", "allOf", "anyOf", "$ref", "format", "enum"),
    *("const", "minProperties", "additionalProperties", "pattern", "$defs"),
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(_KEYWORDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(schema=_VALUES)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_is_a_grammar_or_refused(schema):
    try:
        assert "json_schema" in schema_grammar(json.dumps(schema), "response_format")
    except RequestError as refusal:
        assert refusal.message
