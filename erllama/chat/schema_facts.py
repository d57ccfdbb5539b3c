"""What is plain to see of a JSON schema: keywords by type, types of values, whether two can overlap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

OBJECT = {
    *(
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
    ),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
}
ARRAY = {
    *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems"),
    *("maxItems", "uniqueItems", "unevaluatedItems"),
}
STRING = {"pattern", "minLength", "maxLength"}
NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ANYWHERE = {"allOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
OTHERS = {"$ref", "oneOf", "anyOf", "const", "enum", "type"}
CONSTRAINTS = OBJECT | ARRAY | STRING | NUMBER | ANYWHERE | OTHERS
TYPES: dict[str, set[str]] = {
    "object": OBJECT, "array": ARRAY, "string": STRING, "integer": NUMBER, "number": NUMBER,
    "boolean": set(), "null": set(),
}  # fmt: skip
INDEX = re.compile("0|[1-9][0-9]{0,5}")  # RFC 6901 s4; Python refuses numbers of thousands of digits
FORMATS = {"date", "time", "date-time", "uuid", *(f"uuid{n}" for n in range(1, 6))}

Json = Any


def is_whole(value: Json) -> bool:
    """Whether it is a whole number, 3.0 included."""
    return kind_of(value) == "integer"


def _is_names(value: Json) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


_COUNT: tuple[Callable[[Json], bool], str] = (is_whole, "a whole number")
SHAPES: dict[str, tuple[Callable[[Json], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _is_names(value), "a type or a list of types"),
    "format": (lambda value: isinstance(value, str), "the name of a format"),
    "enum": (lambda value: isinstance(value, (list, tuple)), "a list of values"),
    "required": (_is_names, "a list of names"),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), _COUNT
    ),
}


def is_empty(keyword: str, value: Json) -> bool:
    """A constraint that constrains nothing."""
    return (keyword, value) in (
        ("required", []), ("properties", {}), ("uniqueItems", False), ("minLength", 0), ("minItems", 0),
        ("minProperties", 0), ("additionalProperties", True), ("patternProperties", {}),
    )  # fmt: skip


def implied_type(schema: Mapping[str, Json]) -> str | None:
    """What the keywords speak of; json-schema.cpp decides in the same order."""
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if schema.keys() & STRING or schema.get("format") in FORMATS:
        return "string"
    return None


def with_integers(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """The same schema, with the type integer for numbers that are multiples of 1."""
    kinds = schema.get("type")
    multiple = schema.get("multipleOf")
    if kinds is None or not is_whole(multiple) or multiple != 1:
        return schema
    integer = {"number": "integer"}
    made = integer.get(kinds, kinds) if isinstance(kinds, str) else [integer.get(k, k) for k in kinds]
    return {**{key: value for key, value in schema.items() if key != "multipleOf"}, "type": made}


def pointed(root: Json, ref: str) -> Json:
    """What a reference within the document leads to, or None."""
    found = root
    for part in ref.split("/")[1:]:
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, (list, tuple)) and INDEX.fullmatch(part) and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def with_type(schema: Json, kind: Json) -> Json:
    """The schema, with the type that its parent gives it."""
    if kind is None or not isinstance(schema, Mapping) or schema.keys() & {"type", "$ref", "oneOf", "anyOf"}:
        return schema
    return {**schema, "type": kind}


def bounds(low_key: str, low: int | None, high_key: str, high: int | None) -> dict[str, int]:
    """The two keywords that are needed to say it."""
    made = {} if low is None or (low == 0 and low_key != "minimum") else {low_key: low}
    return made if high is None else {**made, high_key: high}


def same(one: Json, other: Json) -> bool:
    """Equal as JSON: 1.0 is 1, True is not."""
    return _key(one) == _key(other)


def _key(value: Json) -> str:
    return json.dumps(_by_value(value), sort_keys=True)


def _by_value(value: Json) -> Json:
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case Mapping():
            return {name: _by_value(each) for name, each in value.items()}
        case list() | tuple():
            return [_by_value(each) for each in value]
    return value


def without_repeats(values: list[Json]) -> list[Json]:
    """Each value once, in order."""
    return list({_key(v): v for v in values}.values())


def kind_of(value: Json) -> str:
    """The JSON type of a value; whole numbers are integers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def fits(value: Json, kind: Json) -> bool:
    """Whether a value is of one of the types; None is any."""
    if kind is None:
        return True
    kinds = kind if isinstance(kind, (list, tuple)) else [kind]
    actual = kind_of(value)
    return actual in kinds or (actual == "integer" and "number" in kinds)


def kinds_of(made: dict[str, Json]) -> set[str] | None:
    """The types a canonical schema allows; None where that is not known."""
    if "enum" in made:
        return {kind_of(v) for v in made["enum"]}
    if "anyOf" in made:
        each = [kinds_of(m) for m in made["anyOf"]]
        return None if None in each else {k for kinds in each if kinds for k in kinds}
    return {made["type"]} if "type" in made else None


def exclusive(one: dict[str, Json], other: dict[str, Json]) -> bool:
    """Whether no value of one can be valid for the other, as far as that is plain to see."""
    kinds = kinds_of(one), kinds_of(other)
    if None not in kinds:
        left, right = ({"number" if k == "integer" else k for k in each or ()} for each in kinds)
        if not left & right:
            return True
    if "enum" in one and "enum" in other:
        return not any(same(a, b) for a in one["enum"] for b in other["enum"])
    if one.get("type") == other.get("type") == "object":
        return told_apart(one, other) or (lacks(one, other) and lacks(other, one))
    return False


def told_apart(one: dict[str, Json], other: dict[str, Json]) -> bool:
    """A property that both require has values that only one of them allows."""
    common = set(one.get("required", ())) & set(other.get("required", ()))
    return any(exclusive(one["properties"][name], other["properties"][name]) for name in common)


def lacks(one: dict[str, Json], other: dict[str, Json]) -> bool:
    """What is generated for `one` lacks something that `other` requires."""
    is_closed = one["additionalProperties"] is False
    return is_closed and not set(other.get("required", ())) <= set(one.get("properties", ()))
