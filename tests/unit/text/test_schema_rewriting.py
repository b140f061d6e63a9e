"""Schemas in other keywords: what they allow is allowed by the schema itself, by jsonschema's
verdict."""

import json

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.text.grammars.schemas.forms import UnsupportedSchema
from penstock.text.grammars.schemas.rewriting import rewritten

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 1.5, 2, "", "a", "b", "ab"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
COUNTS = st.integers(0, 2)
LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda one: {"type": one}, TYPES),
    st.builds(lambda several: {"type": several}, st.lists(TYPES, min_size=1, max_size=3)),
    st.builds(lambda one: {"const": one}, VALUES),
    st.builds(lambda several: {"enum": several}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(
        lambda key, one: {key: one},
        st.sampled_from(
            [
                *("minLength", "maxLength", "minItems", "maxItems", "minProperties"),
                *("maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            ]
        ),
        COUNTS,
    ),
    st.builds(lambda some: {"required": some}, st.lists(NAMES, max_size=2, unique=True)),
    st.just({"pattern": "^a"}),
)
REFERENCES = st.sampled_from(
    [{"$ref": "#/$defs/one"}, {"$ref": "#two"}, {"properties": {"c": {"$ref": "#"}}}]
)


def _of_schemas(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    by_name = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    keywords = {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("not", "if", "then", "else", "contains", "items"), inner),
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), inner),
        "additionalProperties": inner,
        **dict.fromkeys(("properties", "dependentSchemas"), by_name),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
        "propertyNames": st.sampled_from([{"maxLength": 1}, {"enum": ["a", "b"]}, False]),
        **dict.fromkeys(("minContains", "maxContains", "minProperties", "maxProperties"), COUNTS),
        "uniqueItems": st.booleans(),
        "type": TYPES,
        "required": st.lists(NAMES, max_size=2, unique=True),
    }
    names = st.lists(st.sampled_from([*keywords]), min_size=1, max_size=3, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({one: keywords[one] for one in some}))


SIMPLE = LEAVES | _of_schemas(LEAVES)


@st.composite
def whole_schemas(draw):
    leaves = LEAVES | REFERENCES
    schema = draw(_of_schemas(leaves | _of_schemas(leaves))) | draw(_of_schemas(leaves))
    schema["$defs"] = {"one": draw(SIMPLE), "x": {"$anchor": "two", "items": draw(SIMPLE)}}
    return schema


def _validator(schema):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_schemas(), st.lists(VALUES, min_size=5, max_size=20))
def test_nothing_is_allowed_that_the_schema_forbids(schema, instances):
    try:
        made = rewritten(json.loads(json.dumps(schema)))
    except UnsupportedSchema as refusal:
        assert refusal.path.startswith("#")
        return
    before, after = _validator(schema), jsonschema.Draft202012Validator(made)
    for instance in instances:
        if after.is_valid(instance):
            assert before.is_valid(instance), (schema, made, instance)
