"""One line of the table: a figure, what it is compared with, and the bar it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .spread import Spread, paired

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach: at least (`>=`) or at most (`<=`) a limit, as `ratio` or as `value`."""

    sign: Literal["<=", ">="]
    limit: float
    on: Literal["ratio", "value"] = "ratio"

    def met(self, found: float) -> bool:
        """Whether the figure reaches it."""
        return found <= self.limit if self.sign == "<=" else found >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.sign == '<=' else '≥'} {self.limit:g}{' ×' if self.on == 'ratio' else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured under one name, in `unit`.

    `other` is the same of whom it is compared with, `other_name`; `ratio` is ours / other, or the other
    way round where the name says "faster". `at` places the figure on the x axis of a plot.
    """

    name: str
    unit: str
    ours: Spread
    other: Spread | None = None
    other_name: str = ""
    ratio: Spread | None = None
    bar: Bar | None = None
    at: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without a bar, or without what it is compared with."""
        judged = self.ratio if self.bar is not None and self.bar.on == "ratio" else self.ours
        return None if self.bar is None or judged is None else self.bar.met(judged.median)


def single(
    name: str, unit: str, values: Sequence[float], bar: Bar | None = None, at: float | None = None
) -> Figure:
    """A figure that is compared with nothing but its bar."""
    return Figure(name=name, unit=unit, ours=Spread.of(values), bar=bar, at=at)


def against(
    name: str,
    unit: str,
    ours: Sequence[float],
    others: Sequence[float],
    other_name: str,
    bar: Bar | None = None,
    *,
    at: float | None = None,
    inverted: bool = False,
) -> Figure:
    """A comparison, run by run. No `others`: only our side was run. `inverted`: the ratio is other / ours."""
    if not others:
        return Figure(name=name, unit=unit, ours=Spread.of(ours), bar=bar, other_name=other_name, at=at)
    above, below = (others, ours) if inverted else (ours, others)
    ratio = paired(above, below) if all(below) else None  # less than the clock tells has no ratio
    return Figure(
        name=name,
        unit=unit,
        ours=Spread.of(ours),
        other=Spread.of(others),
        other_name=other_name,
        ratio=ratio,
        bar=bar,
        at=at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything one workload found. `failure`: why it ended early; `figures` are those it had until then."""

    id: str
    title: str
    compared: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: str | None = None

    @property
    def complaint(self) -> str | None:
        """The failure as a line of the table."""
        if self.failure is None:
            return None
        return f"{'ended early' if self.figures else 'not measured'}: {self.failure}"
