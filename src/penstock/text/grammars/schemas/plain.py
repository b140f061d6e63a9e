"""A schema of any draft -> one of draft 2020-12 in which every reference is a name.

Identifiers, anchors and pointers are resolved within the request; a schema elsewhere is not
fetched. What the schema's draft ignores is left out, but `dependencies`, which many still mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock.text.grammars.schemas.forms import TYPES, Schema, UnsupportedSchema

_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_DEFINITIONS = ("$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames"),
    *("if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
_IDENTIFIERS = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"}
# Said to a reader or checked by nobody.
_NOTES = {
    *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly"),
    *("writeOnly", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema"),
    *("discriminator", "nullable", "example", "externalDocs", "xml", "strict"),
}
_TYPES = [*TYPES, "integer"]
_MAX_NODES = 10_000


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    "type": lambda value: all(
        one in _TYPES for one in (value if isinstance(value, list) else [value])
    ),
    "enum": lambda value: isinstance(value, list),
    "required": _are_texts,
    "uniqueItems": lambda value: isinstance(value, bool),
    "multipleOf": _is_number,
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), lambda v: type(v) in (int, float, bool)
    ),
    **dict.fromkeys(("pattern", "format"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_count),
    **dict.fromkeys((*BY_NAME, "dependentRequired"), lambda value: isinstance(value, dict)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), lambda v: isinstance(v, list)),
}


@dataclass(slots=True)
class Target:
    """What a reference names."""

    path: str
    schema: Schema


@dataclass(slots=True)
class PlainSchema:
    root: Schema
    draft: int
    targets: dict[str, Target] = field(default_factory=dict)  # by the value of `$ref`


def plain(schema: dict[str, Any]) -> PlainSchema:
    """Without `$defs`: those that are used are targets."""
    return _Plain(schema).result


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _draft_of(schema: dict[str, Any]) -> int:
    named = str(schema.get("$schema", ""))
    return next((number for name, number in _DRAFTS.items() if name in named), 2020)


class _Plain:
    def __init__(self, root: dict[str, Any]) -> None:
        self._draft = _draft_of(root)
        self._num_nodes = 0
        self._root = root
        self._resources: dict[str, tuple[Any, str]] = {"": (root, "#")}
        self._anchors: dict[tuple[str, str], tuple[Any, str]] = {}
        self._dynamic: dict[str, list[tuple[Any, str]]] = {}
        self._bases: dict[int, str] = {}
        self._names: dict[str, str] = {}  # of targets, by their path
        self._pending: list[tuple[str, Any, str]] = []
        self._index(root, "#", "")
        self.result = PlainSchema(self._converted(root, "#", ""), self._draft)
        while self._pending:
            name, node, path = self._pending.pop()
            self.result.targets[name] = Target(path, self._converted(node, path, ""))

    # Where what can be referred to is

    def _index(self, node: Any, path: str, base: str) -> None:
        if not isinstance(node, dict):
            return
        base = self._identify(node, path, base)
        self._bases[id(node)] = base
        for step, child in _parts(node):
            self._index(child, f"{path}/{step}", base)

    def _identify(self, node: dict[str, Any], path: str, base: str) -> str:
        """Its base URI."""
        if self._draft <= 7 and "$ref" in node:
            return base
        identifier = node.get("id" if self._draft <= 4 else "$id")
        if isinstance(identifier, str):
            uri, fragment = urldefrag(_joined(base, identifier))
            if fragment:  # an anchor of draft 7
                self._anchors[uri, fragment] = node, path
            if uri and not identifier.startswith("#"):
                base = uri
                self._resources.setdefault(base, (node, path))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(keyword), str):
                self._anchors[base, anchor] = node, path
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append((node, path))
        if node.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("#", []).append((node, path))
        return base

    def _target(self, keyword: str, ref: Any, base: str, path: str) -> str:
        found = self._find(ref, base) if isinstance(ref, str) else None
        if found is None:
            why = f"names {str(ref)[:80]!r}, which is not in the request"
            raise UnsupportedSchema(keyword, path, why)
        node, where = found
        if keyword != "$ref":
            node, where = self._dynamic_target(keyword, ref, node, where, path)
        if where not in self._names:
            self._names[where] = name = f"#/$defs/{len(self._names)}"
            self._pending.append((name, node, where))
        return self._names[where]

    def _find(self, ref: str, base: str) -> tuple[Any, str] | None:
        uri, fragment = urldefrag(_joined(base, ref))
        fragment = unquote(fragment)
        found = self._resources.get(uri)
        if found is None or not fragment:
            return found
        if not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        node, path = found
        for step in fragment[1:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                base_of = node[int(name)]
            elif isinstance(node, dict) and name in node:
                base_of = node[name]
            else:
                return None
            if isinstance(base_of, dict):
                self._bases.setdefault(id(base_of), self._bases.get(id(node), uri))
            elif isinstance(base_of, list):
                self._bases[id(base_of)] = self._bases.get(id(node), uri)
            node, path = base_of, f"{path}/{step}"
        return node, path

    def _dynamic_target(
        self, keyword: str, ref: str, node: Any, where: str, path: str
    ) -> tuple[Any, str]:
        """The one place that it may mean, whoever has come here from where."""
        anchor = "#" if keyword == "$recursiveRef" else urldefrag(ref)[1]
        places = self._dynamic.get(anchor, [])
        if not any(place[0] is node for place in places):
            return node, where  # as `$ref`
        if len(places) > 1:
            raise UnsupportedSchema(keyword, path, "may mean several places")
        return places[0]

    # In other words

    def _converted(self, node: Any, path: str, base: str) -> Schema:
        if not isinstance(node, dict):
            if isinstance(node, bool):
                return node
            raise UnsupportedSchema("type", path, f"is of an object, not of {str(node)[:40]!r}")
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise UnsupportedSchema("$ref", path, "makes this schema too large")
        base = self._bases.get(id(node), base)
        if self._draft <= 7 and "$ref" in node:
            return {"$ref": self._target("$ref", node["$ref"], base, path)}
        made: dict[str, Any] = {}
        ways: list[Schema] = []
        for keyword, value in node.items():
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                if self._is_known(keyword):
                    ways.append({"$ref": self._target(keyword, value, base, path)})
            elif keyword in _DEFINITIONS or keyword in _IDENTIFIERS or keyword in _NOTES:
                continue
            elif self._is_known(keyword):
                made[keyword] = self._value(keyword, value, f"{path}/{keyword}", base)
        self._rename(made)
        if len(ways) == 1:
            return made | ways[0] if isinstance(ways[0], dict) else made
        return made | ({"allOf": [*made.get("allOf", []), *ways]} if ways else {})

    def _is_known(self, keyword: str) -> bool:
        return _SINCE.get(keyword, 0) <= self._draft

    def _value(self, keyword: str, value: Any, path: str, base: str) -> Any:
        has_shape = _SHAPES.get(keyword, lambda value: True)(value)
        if keyword == "dependentRequired" and has_shape:
            has_shape = all(map(_are_texts, value.values()))
        if not has_shape:
            where = path.removesuffix(f"/{keyword}")
            raise UnsupportedSchema(keyword, where, f"cannot be {str(value)[:40]!r}")
        if keyword in BY_NAME:
            return {
                name: one
                if keyword == "dependencies" and _are_texts(one)
                else self._converted(one, f"{path}/{escaped(name)}", base)
                for name, one in value.items()
            }
        if keyword in LISTS and isinstance(value, list):
            return [self._converted(one, f"{path}/{i}", base) for i, one in enumerate(value)]
        if keyword in SINGLE:
            return self._converted(value, path, base)
        return value

    def _rename(self, made: dict[str, Any]) -> None:
        if self._draft < 2020:
            others = made.pop("additionalItems", True)
            if isinstance(made.get("items"), list):
                made["prefixItems"] = made.pop("items")
                if others is not True:
                    made["items"] = others
        for name, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(made.get(name), bool):  # of draft 4
                is_exclusive = made.pop(name)
                if is_exclusive and limit in made:
                    made[name] = made.pop(limit)
        for name, one in made.pop("dependencies", {}).items():
            keyword = "dependentRequired" if isinstance(one, list) else "dependentSchemas"
            made[keyword] = {**made.get(keyword, {}), name: one}


def _parts(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in (*BY_NAME, *_DEFINITIONS):
        if isinstance(by_name := node.get(keyword), dict):
            yield from ((f"{keyword}/{escaped(name)}", one) for name, one in by_name.items())
    for keyword in LISTS:
        if isinstance(several := node.get(keyword), list):
            yield from ((f"{keyword}/{i}", one) for i, one in enumerate(several))
    for keyword in SINGLE:
        if isinstance(one := node.get(keyword), dict):
            yield keyword, one


def _joined(base: str, ref: str) -> str:
    return base + ref if ref.startswith("#") else urljoin(base, ref)
