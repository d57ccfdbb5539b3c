"""Tables and bar charts on stdout: drawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

BAR_CELLS: Final = 48


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is a name, the others are aligned to the right."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in (heads, *rows):
            name, *others = (cell.ljust(widths[0]) if i == 0 else cell for i, cell in enumerate(row))
            print(name + "".join(f"  {cell:>{n}}" for cell, n in zip(others, widths[1:], strict=True)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_bars(title: str, values: Sequence[tuple[str, float]]) -> None:
    """A bar a row, as long as its seconds; the longest fills the width, the shortest is still seen."""
    longest = max(seconds for _, seconds in values)
    shown = [(name, max(seconds / longest, 1 / BAR_CELLS), _duration(seconds)) for name, seconds in values]
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in values)
        print(title)
        for name, share, duration in shown:
            print(f"{name:<{width}}  {'#' * round(share * BAR_CELLS)} {duration}")
        return
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, share, duration in shown:
        grid.add_row(name, Bar(1.0, 0.0, share, width=BAR_CELLS, color="green"), duration)
    Console().print(grid)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
