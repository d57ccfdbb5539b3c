"""JSON schema → GBNF, remembered: the same schema is converted once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erllama import llama
from erllama.errors import InvalidGrammar

from .nesting import MAX_NESTING, is_too_deep
from .remembered import Remembered
from .schema import canonical_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 8 << 20  # of grammars and schemas that are kept for one model
# The rule for the names of additional properties: its `[^"a]` admits a backslash, and with it a name that is
# spelled with escapes, or a string without an end.
_OTHER_NAMES = re.compile(r"^\S*additional-k\d* ::= .*$", re.MULTILINE)
_UNSAFE = r"\\\x7F\x00-\x1F"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversions:
    """How often a schema was found converted, and how often it had to be."""

    n_hits: int
    n_misses: int


class SchemaGrammars:
    """Converts schemas; the latest are kept. Any thread."""

    def __init__(self) -> None:
        self._converted = Remembered(_convert, _length, max_bytes=MAX_BYTES)

    def of(self, schema: Mapping[str, Any]) -> str:
        """The grammar. Raises: `InvalidGrammar` naming the place, the keyword and why it is not enforced."""
        return self._converted(schema_text(schema))[0]

    def canonical(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema in the form that the converter is given. Raises: as `of`."""
        canonical: dict[str, Any] = json.loads(self._converted(schema_text(schema))[1])
        return canonical

    def statistics(self) -> Conversions:
        """Counts since this object was made."""
        return Conversions(n_hits=self._converted.n_hits, n_misses=self._converted.n_misses)


def schema_text(schema: object) -> str:
    """The schema's bytes as text: order counts, as answers follow it. Raises: `InvalidGrammar`."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as why:
        raise InvalidGrammar(f"the JSON schema is not JSON: {why}") from None
    if is_too_deep(schema):
        raise InvalidGrammar(f"the JSON schema is nested deeper than {MAX_NESTING}")
    return text


def _length(converted: tuple[str, str]) -> int:
    return sum(map(len, converted))


def _convert(text: str) -> tuple[str, str]:
    """The grammar, and the canonical schema as text."""
    canonical, _ = canonical_schema(json.loads(text))
    grammar = sealed(llama.schema_to_grammar(canonical))
    renamed = (
        set(re.findall(r"^(root\d+) ::=", grammar, re.MULTILINE)) - canonical.get("properties", {}).keys()
    )
    if renamed:
        raise InvalidGrammar(
            "json_schema: the converter takes another rule for its root", detail={"path": "#"}
        )
    for pattern in _patterns(canonical):
        check_pattern(pattern)
    _check(grammar)
    return grammar, schema_text(canonical)


def _check(grammar: str) -> None:
    """What llama.cpp would refuse comes from counts that multiply; the rule's name is the property's path."""
    try:
        llama.check_grammar(grammar)
    except InvalidGrammar as error:
        line = error.detail["line"] if isinstance(error.detail, dict) else 1
        rule = grammar.splitlines()[line - 1].partition(" ::= ")[0]
        said = f"json_schema, the grammar of {rule!r}: {error.detail['message']}"  # type: ignore[index]
        raise InvalidGrammar(said, detail={"path": rule, "keyword": "", "why": said}) from None


def sealed(grammar: str) -> str:
    """What llama-common converted, without the hole in its rule for other names."""
    return _OTHER_NAMES.sub(lambda rule: rule[0].replace('[^"', '[^"' + _UNSAFE), grammar)


def check_pattern(pattern: str) -> None:
    """Raise `InvalidGrammar` for a pattern in whose place the converter would accept any string."""
    alone = llama.schema_to_grammar({"type": "string", "pattern": pattern})
    if re.search(r"^root ::= string\d*$", alone, re.MULTILINE):
        raise InvalidGrammar(
            f"json_schema: pattern {pattern!r} cannot be enforced", detail={"keyword": "pattern"}
        )


def _patterns(schema: object) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["pattern"]] if schema.get("type") == "string" and "pattern" in schema else []
        return own + [p for each in schema.values() for p in _patterns(each)]
    if isinstance(schema, list):
        return [p for each in schema for p in _patterns(each)]
    return []
