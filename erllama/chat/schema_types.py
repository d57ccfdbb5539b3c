"""What a JSON schema says of values of one type, in words that llama-common's converter enforces."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

from erllama.errors import InvalidGrammar

from .pattern import MAX_REPEATED, PatternError, canonical_pattern
from .schema_facts import CONSTRAINTS, FORMATS, NUMBER, Json, bounds, is_whole

MAX_INTEGER = 10**15  # the converter's integers have up to 16 digits


class TypedSchemas(ABC):
    """Objects, arrays, strings and numbers. What they hold goes back to `_node`."""

    @abstractmethod
    def _node(self, schema: Json, path: str, depth: int) -> dict[str, Json]:
        """A schema of any kind."""

    @abstractmethod
    def _fail(self, path: str, keyword: str, why: str) -> None:
        """The keyword cannot be enforced there."""

    @abstractmethod
    def _refuse_others(self, schema: Mapping[str, Json], path: str, allowed: set[str], beside: str) -> None:
        """Fail for each keyword that constrains values and is not `allowed`."""

    def _number(self, schema: Mapping[str, Json], path: str) -> dict[str, Json]:
        allowed = CONSTRAINTS - NUMBER | {"format"}
        self._refuse_others(schema, path, allowed, "type number (integers can be bounded)")
        return {"type": "number"}

    def _object(self, schema: Mapping[str, Json], path: str, depth: int) -> dict[str, Json]:
        properties = schema.get("properties")
        if properties is not None and not isinstance(properties, Mapping):
            raise InvalidGrammar(
                f"json_schema, {path}: properties: expected an object",
                detail={"path": path, "keyword": "properties"},
            )
        if properties and "" in properties:
            self._fail(path, "properties", "a property without a name cannot be enforced")
            properties = {name: each for name, each in properties.items() if name}
        made: dict[str, Json] = {"type": "object"}
        if properties is not None:
            made["properties"] = {
                name: self._node(each, f"{path}/properties/{name}", depth + 1)
                for name, each in properties.items()
            }
        made["required"] = self._required(schema, properties or {}, path)
        made["additionalProperties"] = self._additional(schema, properties, path, depth)
        self._check_object_rest(schema, made, path)
        return {k: v for k, v in made.items() if k != "required" or v}

    def _required(self, schema: Mapping[str, Json], properties: Mapping[str, Json], path: str) -> list[str]:
        required = schema.get("required", [])
        if not isinstance(required, (list, tuple)) or not all(isinstance(name, str) for name in required):
            self._fail(path, "required", "expected a list of names")
            return []
        for name in required:
            if name not in properties:
                self._fail(path, "required", f"{name!r} is not among the properties")
        return [name for name in dict.fromkeys(required) if name in properties]

    def _additional(
        self, schema: Mapping[str, Json], properties: Mapping[str, Json] | None, path: str, depth: int
    ) -> Json:
        given = schema.get("additionalProperties", properties is None)
        if given is False:
            return False
        if given is not True:
            given = self._node(given, f"{path}/additionalProperties", depth + 1) or True
        for name in properties or ():
            # json-schema-to-grammar.cpp puts names into character classes as they are.
            if not name or any(char in ']^-\\"' or ord(char) < 0x20 for char in name):
                self._fail(
                    path, "additionalProperties", f"cannot be enforced beside a property named {name!r}"
                )
                return False
        return given

    def _check_object_rest(self, schema: Mapping[str, Json], made: dict[str, Json], path: str) -> None:
        is_closed = made["additionalProperties"] is False
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        if least > len(made["required"]):
            self._fail(path, "minProperties", "more than are required cannot be enforced")
        if most != math.inf and (not is_closed or most < len(made.get("properties", ()))):
            self._fail(path, "maxProperties", "fewer than there may be cannot be enforced")
        if not is_closed and schema.get("unevaluatedProperties", True) is not True:
            self._fail(path, "unevaluatedProperties", "a grammar cannot express it")
        for keyword in (
            "patternProperties",
            "propertyNames",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        ):
            if schema.get(keyword) not in (None, {}, True):
                self._fail(path, keyword, "a grammar cannot express it")

    def _array(self, schema: Mapping[str, Json], path: str, depth: int) -> dict[str, Json]:
        items = schema.get("items")
        key = "items" if isinstance(items, (list, tuple)) else "prefixItems"
        listed = schema.get(key)
        if isinstance(listed, (list, tuple)) and listed:
            return self._tuple(schema, key, listed, path, depth)
        if items is None and schema.get("unevaluatedItems", True) is not True:
            self._fail(path, "unevaluatedItems", "a grammar cannot express it")
        least, most = self._counts(schema, "minItems", "maxItems", MAX_REPEATED + 1, path)
        made: dict[str, Json] = {"type": "array"}
        if items is False:
            most = 0
        elif items is not None and items is not True:
            made["items"] = self._node(items, f"{path}/items", depth + 1)
        self._check_array_rest(schema, most, path)
        return {**made, **bounds("minItems", least, "maxItems", most)}

    def _tuple(
        self, schema: Mapping[str, Json], key: str, listed: Json, path: str, depth: int
    ) -> dict[str, Json]:
        """Exactly the listed items: the converter knows no others."""
        made = [self._node(each, f"{path}/{key}/{i}", depth + 1) for i, each in enumerate(listed)]
        if schema.get("minItems", 0) > len(made):
            self._fail(
                path, "minItems", f"more than the {len(made)} items that are listed cannot be enforced"
            )
        if schema.get("maxItems", math.inf) < len(made):
            self._fail(
                path, "maxItems", f"fewer than the {len(made)} items that are listed cannot be enforced"
            )
        self._check_array_rest(schema, len(made), path)
        return {"type": "array", "prefixItems": made}

    def _check_array_rest(self, schema: Mapping[str, Json], most: int | None, path: str) -> None:
        if schema.get("uniqueItems") is True and (most is None or most > 1):
            self._fail(path, "uniqueItems", "a grammar cannot express it")
        for keyword in ("contains", "minContains", "maxContains"):
            if keyword in schema:
                self._fail(path, keyword, "a grammar cannot express it")

    def _string(self, schema: Mapping[str, Json], path: str) -> dict[str, Json]:
        made: dict[str, Json] = {"type": "string"}
        allowed = CONSTRAINTS - {"minLength", "maxLength"}
        if "pattern" in schema:
            beside = "pattern"
            try:
                if not isinstance(schema["pattern"], str):
                    raise PatternError("expected a regular expression")
                made["pattern"] = canonical_pattern(schema["pattern"])
            except PatternError as why:
                self._fail(path, "pattern", f"{schema['pattern']!r}: {why}")
        elif schema.get("format") in FORMATS:
            beside = f"format {schema['format']}"
            made["format"] = schema["format"]
            allowed |= {"format"}
        if len(made) > 1:
            self._refuse_others(schema, path, allowed, beside)
            return made
        least, most = self._counts(schema, "minLength", "maxLength", MAX_REPEATED, path)
        return {**made, **bounds("minLength", least, "maxLength", most)}

    def _counts(
        self, schema: Mapping[str, Json], low_key: str, high_key: str, limit: int, path: str
    ) -> tuple[int, int | None]:
        low, high = schema.get(low_key, 0), schema.get(high_key)
        for key, value in ((low_key, low), (high_key, high)):
            if value is None:
                continue
            if not is_whole(value):
                raise InvalidGrammar(
                    f"json_schema, {path}: {key}: expected a whole number",
                    detail={"path": path, "keyword": key},
                )
            if value < 0 or value > limit:
                self._fail(
                    path, key, f"{value} is not in the range from 0 to {limit} that a grammar can count"
                )
        low = int(low) if 0 <= low <= limit else 0
        high = int(high) if high is not None and 0 <= high <= limit else None
        if high is not None and high < low:
            self._fail(path, high_key, f"less than {low_key}")
            return 0, None
        return low, high

    def _integer(self, schema: Mapping[str, Json], path: str) -> dict[str, Json]:
        if "multipleOf" in schema:  # but 1, which is gone by now
            self._fail(path, "multipleOf", "a grammar cannot express it")
        low = self._bound(schema, "minimum", "exclusiveMinimum", path, lowest=True)
        high = self._bound(schema, "maximum", "exclusiveMaximum", path, lowest=False)
        if low is not None and high is not None and high < low:
            self._fail(path, "maximum", "less than the minimum")
            low = high = None
        return {"type": "integer", **bounds("minimum", low, "maximum", high)}

    def _bound(
        self, schema: Mapping[str, Json], key: str, exclusive: str, path: str, *, lowest: bool
    ) -> int | None:
        """The tighter of both bounds, as a whole number that is allowed."""
        found: list[int] = []
        for name in (key, exclusive):
            value = schema.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                self._fail(path, name, "expected a number")
                continue
            if abs(value) > MAX_INTEGER:
                self._fail(path, name, f"beyond {MAX_INTEGER:.0e} it cannot be enforced")
                continue
            if lowest:
                found.append(math.ceil(value) + (name == exclusive and value == math.ceil(value)))
            else:
                found.append(math.floor(value) - (name == exclusive and value == math.floor(value)))
        return (max if lowest else min)(found, default=None)
