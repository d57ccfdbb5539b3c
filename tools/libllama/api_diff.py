"""What of the C API that we use differs between two llama.cpp trees. Pure: header texts in, a report out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.libllama.wrappers import functions, strip_comments

if TYPE_CHECKING:
    from collections.abc import Iterable

# Decorations in upstream's headers that say nothing about how to call.
_DECORATIONS = re.compile(r"\b(LLAMA_API|GGML_API|GGML_BACKEND_API|GGML_CALL|extern)\b")
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_SEPARATOR = re.compile(r"([;{}])")
_CALL = re.compile(r"\b(\w+)\s*\(")
_TYPE = re.compile(r"\b(struct|enum)\s+(\w+)\s*\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDiff:
    """Names we use: gone, declared differently (name, old, new), and how many stayed as they were."""

    gone: list[str]
    changed: list[tuple[str, str, str]]
    n_same: int

    def describe(self) -> str:
        """The report for a person."""
        lines = [f"{self.n_same} declarations that we use are unchanged."]
        lines += [f"GONE     {name}" for name in self.gone]
        for name, old, new in self.changed:
            lines += [f"CHANGED  {name}", *_side_by_side(old, new)]
        return "\n".join(lines)


def used_names(cdef_headers: Iterable[str]) -> list[str]:
    """The functions, structs and enums of upstream's that our declarations name."""
    headers = list(cdef_headers)
    names = [f.name for f in functions(headers) if not f.name.startswith("shim_")]
    types = [found[2] for text in headers for found in _TYPE.finditer(strip_comments(text))]
    return sorted({*names, *(name for name in types if not name.startswith("el_"))})


def compare_api(names: Iterable[str], old_headers: str, new_headers: str) -> ApiDiff:
    """Compare the declarations of `names` in two sets of headers (each joined to one text)."""
    before, after = declarations(old_headers), declarations(new_headers)
    gone, changed, n_same = [], [], 0
    for name in names:
        old, new = before.get(name), after.get(name)
        if new is None:
            gone.append(name)
        elif old is not None and old != new:
            changed.append((name, old, new))
        else:
            n_same += 1
    return ApiDiff(gone=gone, changed=changed, n_same=n_same)


def declarations(headers: str) -> dict[str, str]:
    """Name → declaration, on one line, of every struct, enum and function; the first one of a name counts.

    One pass over the text: a search per name takes minutes on upstream's headers.
    """
    text = _clean(headers)
    found: dict[str, str] = {}
    for start in _TYPE.finditer(text):
        found.setdefault(start[2], _one_line(text[start.start() : _closing_brace(text, start.end())]))
    parts = _SEPARATOR.split(text)  # text, separator, text, separator, …
    for statement, end in zip(parts[::2], parts[1::2], strict=False):
        for called in _CALL.finditer(statement) if end == ";" else ():
            found.setdefault(called[1], _one_line(statement + end))
    return found


def _clean(text: str) -> str:
    # Texts first: one of them holds a URL, whose // is no comment, and others name functions.
    return _DECORATIONS.sub(" ", strip_comments(_STRING.sub('""', text)))


def _closing_brace(text: str, at: int) -> int:
    depth = 1
    while depth and at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def _one_line(text: str) -> str:
    return re.sub(r"\s*([(),;*{}])\s*", r"\1", re.sub(r"\s+", " ", text.strip())).replace(",", ", ")


def _side_by_side(old: str, new: str) -> list[str]:
    """Old and new, cut at separators into lines, only the lines that differ."""
    before, after = (re.split(r"(?<=[;{},])\s*", side) for side in (old, new))
    lost, gained = ([x for x in a if x and x not in b] for a, b in ((before, after), (after, before)))
    if not lost and not gained:
        return ["  (the same parts in another order)"]
    return [*(f"  - {part}" for part in lost), *(f"  + {part}" for part in gained)]
