"""Outcomes as a table: drawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .figure import Figure, Outcome
    from .spread import Spread

HEADS = ("figure", "ours", "compared with", "ratio", "bar", "")
N_UNJUDGED = 4  # columns without bars


def print_outcome(outcome: Outcome, *, judge: bool) -> None:
    """One workload: what is compared, its figures, its notes. Without `judge` no bar is held against them."""
    print(f"\n{outcome.id}  {outcome.title} ({outcome.seconds:.0f} s)\n    {outcome.compared}")
    if outcome.figures:
        n = len(HEADS) if judge else N_UNJUDGED
        _print_rows(HEADS[:n], [row(figure, judge=judge)[:n] for figure in outcome.figures])
    for note in outcome.notes:
        print(f"    {note}")
    if outcome.complaint is not None:
        print(f"    {outcome.complaint}")


def row(figure: Figure, *, judge: bool) -> tuple[str, ...]:
    """The cells of one figure."""
    ratio = "" if figure.ratio is None else _spread(figure.ratio)
    other = "" if figure.other is None else f"{_amount(figure.other, figure.unit)} {figure.other_name}"
    verdict = {None: "", True: "met", False: "MISSED"}[figure.met if judge else None]
    bar = "" if figure.bar is None else str(figure.bar)
    return figure.name, _amount(figure.ours, figure.unit), other, ratio, bar, verdict


def _amount(spread: Spread, unit: str) -> str:
    if unit == "s" and spread.median < 1:
        return f"{_number(spread.median * 1000)} ms" + _half(spread.half * 1000)
    return f"{_number(spread.median)} {unit}".rstrip() + _half(spread.half)


def _spread(spread: Spread) -> str:
    return _number(spread.median) + _half(spread.half)


def _half(half: float) -> str:
    return f" ± {_number(half)}" if half else ""


def _number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def _print_rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        _draw(heads, rows)
        return
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for line in _lines((heads, *rows), widths):
        print(line)


def _lines(rows: tuple[tuple[str, ...], ...], widths: list[int]) -> Iterator[str]:
    for cells in rows:
        yield (
            "    " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        )


def _draw(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*heads)
    for cells in rows:
        drawn.add_row(*cells, style="red" if cells[-1] == "MISSED" else None)
    Console().print(drawn)
