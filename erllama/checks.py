"""The one mechanism that checks options: classes of checked fields, and the checks themselves.

An option class may have `ELSEWHERE`: names that are not its options, and what to write instead.
An option class is a frozen, keyword-only dataclass whose fields carry a *check*: a function that
returns the accepted value or raises `Rejected` with what was expected. A wrong name raises
`UnknownOption` with the nearest right one, a wrong value `InvalidOption`; both before any native
work begins.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from numbers import Real
from typing import Any, TypeGuard, TypeVar, cast, dataclass_transform

from .errors import InvalidOption, MissingOption, UnknownOption

Check = Callable[[object], object]
T = TypeVar("T")


class Rejected(Exception):
    """Raised by a check; its text completes "expected …"."""


def option(*, default: Any, check: Check, secret: bool = False) -> Any:
    """A dataclass field with its check. A `secret` one is in no repr and no error."""
    return dataclasses.field(default=default, repr=not secret, metadata={"check": check})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make `cls` a frozen keyword-only dataclass that checks names and values.

    Raises (when instantiated): `UnknownOption`, `InvalidOption`.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    generated = made.__init__
    fields = {f.name: f for f in dataclasses.fields(made)}  # type: ignore[arg-type]  # made a dataclass above

    elsewhere: Mapping[str, str] = getattr(cls, "ELSEWHERE", {})

    def __init__(self: Any, *unnamed: object, **values: object) -> None:
        if unnamed:
            example = f"{cls.__name__}({next(iter(fields))}=…)"
            raise InvalidOption(
                f"{cls.__name__}({unnamed[0]!r}): options are given by name, as in {example}",
                detail={"key": None, "value": unnamed[0]},
            )
        for name in values:
            if name not in fields:
                raise unknown_option(name, fields, where=cls.__name__, instead=elsewhere.get(name))
        generated(self, **values)
        for name, field in fields.items():
            value = getattr(self, name)
            try:
                accepted = field.metadata["check"](value)
            except Rejected as why:
                detail: dict[str, object] = {"key": name}
                if field.repr:
                    detail["value"] = value
                shown = f"={value!r}" if field.repr else ""
                raise InvalidOption(f"{cls.__name__}.{name}{shown}: expected {why}", detail=detail) from None
            object.__setattr__(self, name, accepted)
        together = getattr(self, "check_together", None)
        if together is not None:
            together()

    made.__init__ = __init__  # type: ignore[method-assign]  # the generated one runs inside it
    return made


def checked_arguments(cls: type[T]) -> type[T]:
    """Make a dataclass whose fields may be given by place name what is unknown, missing or too much.

    Raises (when instantiated): `UnknownOption`, `MissingOption`, `InvalidOption`.
    """
    generated = cls.__init__
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass

    def __init__(self: Any, *placed: object, **named: object) -> None:
        kind = type(self).__name__
        for name in named:
            if name not in fields:
                raise unknown_option(name, fields, where=kind)
        if len(placed) > len(fields):
            raise InvalidOption(
                f"{kind} takes {len(fields)} arguments, not {len(placed)}: {', '.join(fields)}",
                detail={"key": None, "value": placed[len(fields)]},
            )
        by_place = list(fields)[: len(placed)]
        for name in by_place:
            if name in named:
                raise InvalidOption(
                    f"{kind}: {name} is given twice, by place and by name",
                    detail={"key": name, "value": named[name]},
                )
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in named and name not in by_place:
                raise MissingOption(f"{kind} needs {name}, as in {kind}({name}=…)", detail={"key": name})
        generated(self, *placed, **named)

    cls.__init__ = __init__  # type: ignore[method-assign]  # the generated one runs inside it
    return cls


def unknown_option(
    name: str, known: Iterable[str], *, where: str, instead: str | None = None
) -> UnknownOption:
    """The error for an option that does not exist, with what to write `instead`, or the nearest that does."""
    known = sorted(known)
    near = [] if instead else difflib.get_close_matches(name, known, n=1)
    others = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known) or 'none'}"
    return UnknownOption(
        f"{where} has no option {name!r}; {instead or others}",
        detail={"key": name, "nearest": near[0] if near else None},
    )


def integer(low: int, high: int | None = None) -> Check:
    """A whole number in [low, high]; booleans are refused."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise Rejected(wanted)
        number = int(value.__index__())
        if number < low or (high is not None and number > high):
            raise Rejected(wanted)
        return number

    return check


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a double can hold: NaN compares false, whole numbers may be too large."""
    limit = sys.float_info.max
    return not isinstance(value, bool) and isinstance(value, Real) and -limit <= cast("float", value) <= limit


def number(low: float, high: float = math.inf, *, above_low: bool = False) -> Check:
    """A finite number in [low, high], or (low, high] with `above_low`."""
    border = "above" if above_low else "of at least"
    wanted = f"a finite number {border} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")

    def check(value: object) -> float:
        if not is_finite(value):
            raise Rejected(wanted)
        if value < low or value > high or (above_low and value == low):
            raise Rejected(wanted)
        return float(value)

    return check


def boolean(value: object) -> bool:
    """True or False, nothing else."""
    if not isinstance(value, bool):
        raise Rejected("True or False")
    return value


def choice(*allowed: object) -> Check:
    """One of a few literal values."""
    wanted = "one of " + ", ".join(repr(a) for a in allowed)

    def check(value: object) -> object:
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return value
        raise Rejected(wanted)

    return check


def optional(inner: Check) -> Check:
    """None, or what `inner` accepts."""

    def check(value: object) -> object:
        if value is None:
            return None
        try:
            return inner(value)
        except Rejected as why:
            raise Rejected(f"None or {why}") from None

    return check


def string(value: object) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise Rejected("a string")
    return value


def hashable(value: object) -> Hashable:
    """Any value that can be a key."""
    try:
        hash(value)
    except TypeError:
        raise Rejected("a hashable value") from None
    return value
