"""A JSON schema in the words that llama-common's converter enforces, or the reason why it cannot be.

The converter silently ignores what it has no grammar for. So every keyword is looked at first: it is
written in a form that is enforced, or refused with its place and the reason, or, where a caller prefers a
loose grammar to none (the tools of an agent), left out and noted.

Law: a value that the converted grammar can generate satisfies the schema, unless something was noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from erllama.errors import InvalidGrammar

from .schema_facts import (
    ANYWHERE,
    CONSTRAINTS,
    FORMATS,
    SHAPES,
    TYPES,
    Json,
    exclusive,
    fits,
    implied_type,
    is_empty,
    kinds_of,
    pointed,
    same,
    with_integers,
    with_type,
    without_repeats,
)
from .schema_types import TypedSchemas

MAX_DEPTH = 64
MAX_NODES = 20_000  # $ref, type lists and alternatives multiply
MAX_OPEN = 16  # references looked at within one another


@dataclass(frozen=True, slots=True)
class Note:
    """A keyword that is not enforced."""

    path: str
    keyword: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.keyword}: {self.why}"


def canonical_schema(schema: object, *, loosen: bool = False) -> tuple[dict[str, Json], list[Note]]:
    """An equally strict (or stricter) schema that the converter enforces entirely.

    With `loosen`, what cannot be enforced is left out and noted. Raises: `InvalidGrammar` whose detail has
    `path` and `keyword`.
    """
    if not isinstance(schema, Mapping):
        raise InvalidGrammar(f"a JSON schema is an object, not {type(schema).__name__}", detail={"path": "#"})
    writer = _Writer(schema, loosen)
    return writer.write(), writer.notes


class _Writer(TypedSchemas):
    def __init__(self, root: Mapping[str, Json], loosen: bool) -> None:
        self._root = root
        self._loosen = loosen
        self._n_nodes = 0
        self._targets: dict[str, dict[str, Json]] = {}
        self._open: set[str] = set()
        self.notes: list[Note] = []

    def write(self) -> dict[str, Json]:
        made = self._node(self._root, "#", 0)
        for key in ("$defs", "definitions"):
            defs = self._root.get(key)
            if isinstance(defs, Mapping):
                made[key] = {name: self._node(each, f"#/{key}/{name}", 1) for name, each in defs.items()}
        self._check_refs(made, made)
        return made

    def _fail(self, path: str, keyword: str, why: str) -> None:
        note = Note(path, keyword, why)
        if not self._loosen:
            raise InvalidGrammar(
                f"json_schema, {note}", detail={"path": path, "keyword": keyword, "why": why}
            )
        self.notes.append(note)

    def _refuse_others(self, schema: Mapping[str, Json], path: str, allowed: set[str], beside: str) -> None:
        for keyword in sorted(schema.keys() & CONSTRAINTS - allowed):
            if not is_empty(keyword, schema[keyword]):
                self._fail(path, keyword, f"cannot be enforced beside {beside}")
        if "format" not in allowed and schema.get("format") in FORMATS:
            self._fail(path, "format", f"cannot be enforced beside {beside}")

    # --- one schema ---

    def _node(self, schema: Json, path: str, depth: int) -> dict[str, Json]:
        self._n_nodes += 1
        if self._n_nodes > MAX_NODES:
            raise InvalidGrammar(
                f"json_schema, {path}: more than {MAX_NODES} schemas come out of this one",
                detail={"path": path},
            )
        if depth > MAX_DEPTH:
            raise InvalidGrammar(
                f"json_schema, {path}: nested deeper than {MAX_DEPTH}", detail={"path": path}
            )
        if schema is True:
            return {}
        if schema is False:
            self._fail(path, "false", "no value satisfies it")
            return {}
        if not isinstance(schema, Mapping):
            raise InvalidGrammar(f"json_schema, {path}: a schema is an object", detail={"path": path})
        schema = with_integers(self._shaped(schema, path))
        if "$ref" in schema:
            return self._ref(schema, path)
        for keyword in ("not", "if", "$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                self._fail(path, keyword, "a grammar cannot express it")
        if "oneOf" in schema or "anyOf" in schema:
            return self._union(schema, path, depth)
        if "const" in schema or "enum" in schema:
            return self._values(schema, path)
        if "allOf" in schema:
            return self._all_of(schema, path, depth)
        kind = schema.get("type")
        if isinstance(kind, (list, tuple)):
            return self._kinds(schema, kind, path, depth)
        if kind is not None and kind not in TYPES:
            raise InvalidGrammar(
                f"json_schema, {path}: type: there is no type {kind!r}",
                detail={"path": path, "keyword": "type"},
            )
        return self._typed(schema, kind or implied_type(schema), path, depth)

    def _shaped(self, schema: Mapping[str, Json], path: str) -> Mapping[str, Json]:
        """The schema without the keywords whose values are of no use, all of which are told."""
        wrong = [
            key for key, (fits_shape, _) in SHAPES.items() if key in schema and not fits_shape(schema[key])
        ]
        for key in wrong:
            self._fail(path, key, f"expected {SHAPES[key][1]}")
        return {key: value for key, value in schema.items() if key not in wrong} if wrong else schema

    def _typed(self, schema: Mapping[str, Json], kind: str | None, path: str, depth: int) -> dict[str, Json]:
        match kind:
            case "object":
                return self._object(schema, path, depth)
            case "array":
                return self._array(schema, path, depth)
            case "string":
                return self._string(schema, path)
            case "integer":
                return self._integer(schema, path)
            case "number":
                return self._number(schema, path)
            case None:
                self._refuse_others(schema, path, ANYWHERE | {"type"}, "no type")
                return {}
        return {"type": kind}

    def _ref(self, schema: Mapping[str, Json], path: str) -> dict[str, Json]:
        self._refuse_others(schema, path, {"$ref"}, "$ref")
        ref = schema["$ref"]
        if self._target(ref) is None:
            self._fail(path, "$ref", f"{ref!r} does not lead to a schema in this document")
            return {}
        return {"$ref": ref}

    def _target(self, ref: Json) -> Mapping[str, Json] | None:
        """What a reference leads to, through further references; None if nowhere or in a circle."""
        seen = set()
        while True:
            if (
                not isinstance(ref, str)
                or ref in seen
                or not ref.startswith("#/")
                or "~" in ref
                or "%" in ref
            ):
                return None
            seen.add(ref)
            found = pointed(self._root, ref)
            if not isinstance(found, Mapping):
                return None
            if "$ref" not in found:
                return found
            ref = found["$ref"]

    def _check_refs(self, made: Json, root: dict[str, Json]) -> None:
        """What was written anew may lie elsewhere than before."""
        if isinstance(made, Mapping):
            ref = made.get("$ref")
            if isinstance(ref, str) and not isinstance(pointed(root, ref), Mapping):
                raise InvalidGrammar(
                    f"json_schema: $ref {ref!r}: move what it leads to into $defs",
                    detail={"path": ref, "keyword": "$ref"},
                )
            for each in made.values():
                self._check_refs(each, root)
        elif isinstance(made, list):
            for each in made:
                self._check_refs(each, root)

    # --- alternatives, values ---

    def _union(self, schema: Mapping[str, Json], path: str, depth: int) -> dict[str, Json]:
        key = "oneOf" if "oneOf" in schema else "anyOf"
        alternatives = schema[key]
        self._refuse_others(schema, path, {key, "type"} | ({"not", "if"} & schema.keys()), key)
        if not isinstance(alternatives, (list, tuple)) or not alternatives:
            self._fail(path, key, "expected a list of schemas")
            return {}
        kind = schema.get("type")
        made = [
            self._node(with_type(each, kind), f"{path}/{key}/{i}", depth + 1)
            for i, each in enumerate(alternatives)
        ]
        if kind is not None:
            self._check_kinds(made, kind, path)
        if key == "oneOf":
            self._check_exclusive(made, path)
        return {"anyOf": made}

    def _check_kinds(self, made: list[dict[str, Json]], kind: Json, path: str) -> None:
        allowed = set(kind) if isinstance(kind, (list, tuple)) else {kind}
        for each in made:
            kinds = kinds_of(self._deref(each))
            if kinds is None or not all(
                k in allowed or (k == "integer" and "number" in allowed) for k in kinds
            ):
                self._fail(path, "type", "not every alternative is of this type")
                return

    def _check_exclusive(self, made: list[dict[str, Json]], path: str) -> None:
        for i, one in enumerate(made):
            for j in range(i + 1, len(made)):
                if not exclusive(self._deref(one), self._deref(made[j])):
                    self._fail(path, "oneOf", f"alternatives {i} and {j} might both match; use anyOf")
                    return

    def _deref(self, made: dict[str, Json]) -> dict[str, Json]:
        ref = made.get("$ref")
        target = None if ref is None else self._target(ref)
        if ref is None or target is None or ref in self._open or len(self._open) >= MAX_OPEN:
            return made
        if ref not in self._targets:
            self._targets[ref] = self._quiet(target, ref)
        return self._targets[ref]

    def _quiet(self, target: Mapping[str, Json], ref: str) -> dict[str, Json]:
        """What a reference leads to, with no word about what cannot be enforced: that is told where it is."""
        loosen, notes = self._loosen, self.notes
        self._loosen, self.notes = True, []
        self._open.add(ref)
        try:
            return self._node(target, ref, 1)
        finally:
            self._loosen, self.notes = loosen, notes
            self._open.remove(ref)

    def _values(self, schema: Mapping[str, Json], path: str) -> dict[str, Json]:
        key = "const" if "const" in schema else "enum"
        values = [schema["const"]] if key == "const" else schema["enum"]
        if not isinstance(values, (list, tuple)) or not values:
            self._fail(path, "enum", "expected a list of values")
            return {}
        others = {"const", "enum", "type", "format"}  # whoever lists values knows their form
        if key == "const" and "enum" in schema:
            values = [v for v in values if any(same(v, e) for e in schema["enum"])]
        self._refuse_others(schema, path, others, key)
        values = [v for v in values if fits(v, schema.get("type"))]
        if not values:
            self._fail(path, key, "no value fits the type")
            return {}
        return {"enum": without_repeats(values)}

    def _kinds(self, schema: Mapping[str, Json], kinds: Json, path: str, depth: int) -> dict[str, Json]:
        if not kinds:
            self._fail(path, "type", "an empty list")
            return {}
        each = [self._node({**schema, "type": kind}, path, depth + 1) for kind in dict.fromkeys(kinds)]
        return {"anyOf": each}

    def _all_of(self, schema: Mapping[str, Json], path: str, depth: int) -> dict[str, Json]:
        """One schema alone, or objects whose properties come together."""
        parts = schema["allOf"]
        rest = {k: v for k, v in schema.items() if k != "allOf"}
        if not isinstance(parts, (list, tuple)) or not parts:
            self._fail(path, "allOf", "expected a list of schemas")
            return self._node(rest, path, depth)
        if len(parts) == 1 and not rest.keys() & CONSTRAINTS:
            return self._node(parts[0], f"{path}/allOf/0", depth + 1)
        merged = self._merged([rest, *parts])
        if merged is None:
            self._fail(path, "allOf", "only plain objects without common properties can be put together")
            return self._node(rest, path, depth)
        return self._object(merged, path, depth)

    def _merged(self, parts: list[Json]) -> dict[str, Json] | None:
        properties: dict[str, Json] = {}
        required: list[str] = []
        for part in parts:
            found = self._target(part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
            if not isinstance(found, Mapping) or found.get("type", "object") != "object":
                return None
            if not isinstance(found.get("properties", {}), Mapping) or not SHAPES["required"][0](
                found.get("required", [])
            ):
                return None
            if found.keys() & CONSTRAINTS - {"type", "properties", "required"}:
                return None
            for name, each in (found.get("properties", {})).items():
                if name in properties and not same(properties[name], each):
                    return None
                properties[name] = each
            required += [name for name in found.get("required", []) if name not in required]
        return {"type": "object", "properties": properties, "required": required}
