"""A schema's `pattern` in the words that llama-common's converter has for it.

The converter wants anchors at both ends, knows few escapes, and writes a character into a JSON string as
it is, so that `.` or `[^a]` would let a quote end the string. Here a pattern is read and written again:
unanchored ends admit anything before and behind, classes are spelled out, and no class holds what JSON
must escape.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_REPEATED = 2000  # llama-grammar.cpp: MAX_REPETITION_THRESHOLD
MAX_DIGITS = 6  # of a count: Python refuses numbers of thousands of digits
MAX_NESTING = 32
MUST_ESCAPE = (
    (0x00, 0x1F),
    (0x22, 0x22),
    (0x5C, 0x5C),
    (0x7F, 0x7F),
)  # RFC 8259 s7, and what upstream excludes
DIGITS = ((0x30, 0x39),)
WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = ((0x20, 0x20), (0xA0, 0xA0), (0x2000, 0x200A), (0x202F, 0x202F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
CLASSES = {"d": DIGITS, "w": WORD, "s": ((0x09, 0x0D), *SPACE, (0x2028, 0x2029))}
CONTROLS = {"t": 0x09, "n": 0x0A, "r": 0x0D, "f": 0x0C, "v": 0x0B, "0": 0x00}

Ranges = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """The pattern cannot be enforced, or is none; the text says why."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """Code points, or with `negated` all others; written without what JSON must escape."""

    ranges: Ranges
    negated: bool = False

    def __str__(self) -> str:
        if self.negated:
            return "[^" + _spelled((*self.ranges, *MUST_ESCAPE)) + "]"
        kept = _without_escaped(self.ranges)
        if not kept:
            raise PatternError("it needs a character that JSON writes as an escape")
        return "[" + _spelled(kept) + "]"


def canonical_pattern(pattern: str) -> str:
    """The pattern with all of it spelled out. Every string it accepts matches `pattern`.

    Raises: `PatternError`.
    """
    reader = _Reader(pattern)
    alternatives = reader.alternatives(0)
    if reader.rest:
        raise PatternError("unbalanced parentheses")
    rest = f"{CharSet((), negated=True)}*"
    whole = [("" if begins else rest) + body + ("" if ends else rest) for begins, body, ends in alternatives]
    return f"^(?:{'|'.join(whole)})$"


class _Reader:
    """Recursive descent over ECMAScript's regular expressions, as far as a grammar can follow."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def alternatives(self, depth: int) -> list[tuple[bool, str, bool]]:
        """Each as (anchored at its beginning, text, anchored at its end); until `)` or the end."""
        if depth > MAX_NESTING:
            raise PatternError(f"groups nested deeper than {MAX_NESTING}")
        found = [self._alternative(depth)]
        while self._peek() == "|":
            self._take()
            found.append(self._alternative(depth))
        return found

    def _alternative(self, depth: int) -> tuple[bool, str, bool]:
        begins = self._peek() == "^"
        if begins:
            self._take()
        parts: list[str] = []
        ends = False
        while (char := self._peek()) and char not in "|)":
            if ends or char == "^":
                raise PatternError("an anchor inside the pattern")
            if char == "$":
                self._take()
                ends = True
                continue
            parts.append(self._quantified(self._atom(depth)))
        if depth and (begins or ends):
            raise PatternError("an anchor inside a group")
        return begins, "".join(parts), ends

    def _atom(self, depth: int) -> str:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return str(self._char_class())
        if char == ".":
            return str(CharSet(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)), negated=True))
        if char == "\\":
            return str(self._escape())
        if char in "*+?{":
            raise PatternError(f"nothing to repeat before {char!r}")
        return str(CharSet(((ord(char), ord(char)),)))

    def _group(self, depth: int) -> str:
        if self._peek() == "?":
            self._take()
            if self._take() != ":":
                raise PatternError("look-around and named groups cannot be enforced")
        inside = "|".join(body for _, body, _ in self.alternatives(depth + 1))
        if self._peek() != ")":
            raise PatternError("unbalanced parentheses")
        self._take()
        return f"(?:{inside})"

    def _quantified(self, atom: str) -> str:
        char = self._peek()
        if char and char in "*+?":
            self._take()
            self._skip_lazy()
            return atom + char
        if char != "{":
            return atom
        low, high = self._counts()
        self._skip_lazy()
        if high == 0:
            return ""
        return atom + (f"{{{low}}}" if high == low else f"{{{low},{'' if high is None else high}}}")

    def _skip_lazy(self) -> None:
        """`*?` accepts what `*` accepts."""
        if self._peek() == "?":
            self._take()

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        inside = self._text[self._at + 1 : end] if end >= 0 else ""
        low, comma, high = inside.partition(",")
        if not low.isascii() or not low.isdigit() or (high and not (high.isascii() and high.isdigit())):
            raise PatternError(f"{{{inside}}} is no repetition")
        if max(len(low), len(high)) > MAX_DIGITS:
            raise PatternError(f"more than {MAX_REPEATED} repetitions")
        self._at = end + 1
        least, most = int(low), int(high) if high else (None if comma else int(low))
        if most is not None and most < least:
            raise PatternError(f"{{{inside}}} repeats at least {least} and at most {most} times")
        if max(least, most or 0) > MAX_REPEATED:
            raise PatternError(f"more than {MAX_REPEATED} repetitions")
        return least, most

    def _escape(self) -> CharSet:
        char = self._take()
        if char in CLASSES:
            return CharSet(CLASSES[char])
        if char.lower() in CLASSES:
            return CharSet(CLASSES[char.lower()], negated=True)
        point = self._escaped_point(char)
        return CharSet(((point, point),))

    def _escaped_point(self, char: str) -> int:
        if char in CONTROLS:
            return CONTROLS[char]
        if char in "xu":
            n = 2 if char == "x" else 4
            digits = self._text[self._at : self._at + n]
            if len(digits) != n or not all(d in "0123456789abcdefABCDEF" for d in digits):
                raise PatternError(f"\\{char} needs {n} hexadecimal digits")
            self._at += n
            return int(digits, 16)
        if char.isalnum():
            raise PatternError(f"\\{char} cannot be enforced")
        return ord(char)

    def _char_class(self) -> CharSet:
        negated = self._peek() == "^"
        if negated:
            self._take()
        ranges: list[tuple[int, int]] = []
        while (char := self._take()) != "]":
            low = self._class_item(char)
            is_range = self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")
            if not is_range:
                ranges += low
                continue
            self._take()
            high = self._class_item(self._take())
            if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                raise PatternError("a range between classes")
            if high[0][0] < low[0][0]:
                raise PatternError("a range that ends before it begins")
            ranges.append((low[0][0], high[0][0]))
        if not ranges and not negated:
            raise PatternError("an empty character class")
        return CharSet(tuple(ranges), negated)

    def _class_item(self, char: str) -> Ranges:
        if char != "\\":
            return ((ord(char), ord(char)),)
        kind = self._take()
        if kind == "b":
            return ((0x08, 0x08),)
        if kind in CLASSES:
            return CLASSES[kind]
        if kind.lower() in CLASSES:
            raise PatternError(f"\\{kind} inside a character class cannot be enforced")
        point = self._escaped_point(kind)
        return ((point, point),)


def _without_escaped(ranges: Ranges) -> Ranges:
    for low, high in MUST_ESCAPE:
        ranges = tuple(
            part
            for begin, end in ranges
            for part in ((begin, min(end, low - 1)), (max(begin, high + 1), end))
            if part[0] <= part[1]
        )
    return tuple(sorted(set(ranges)))


def _spelled(ranges: Ranges) -> str:
    return "".join(_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in sorted(set(ranges)))


def _point(code: int) -> str:
    """As both the converter and GBNF read it."""
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
