"""Plots for the docs, as SVG written by hand: lines with their points, two series at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .figure import Outcome

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 48, 56  # room for labels around the plot
COLOURS = ("#1f6feb", "#d1242f", "#57606a")
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series by name over one x axis; `log_y` for values that differ by orders of magnitude."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, Points]
    log_y: bool = False

    def svg(self) -> str:
        """The picture. All values are above 0; there is at least one point."""
        points = [point for series in self.series.values() for point in series]
        x_top = max(x for x, _ in points)
        low, high = self._y_range([y for _, y in points])

        def at(x: float, y: float) -> tuple[float, float]:
            share = (math.log10(y / low) / math.log10(high / low)) if self.log_y else (y - low) / (high - low)
            return (
                LEFT + (WIDTH - LEFT - RIGHT) * x / x_top,
                HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share,
            )

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif" font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(WIDTH / 2, 20, self.title, "middle", 15),
            _text(WIDTH / 2, HEIGHT - 14, self.x_label, "middle"),
            _text(LEFT, TOP - 10, self.y_label, "start"),
        ]
        for y in self._ticks(low, high):
            _, py = at(0, y)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" stroke="#d0d7de"/>'
            )
            parts.append(_text(LEFT - 8, py + 4, f"{y:g}", "end"))
        places = sorted({x for x, _ in points})
        parts += [_text(at(x, low)[0], HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in places]
        for i, (name, series) in enumerate(self.series.items()):
            placed = [at(x, y) for x, y in sorted(series)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[i]}"/>' for x, y in placed]
            parts.append(_text(WIDTH - RIGHT - 4, TOP + 4 + 18 * i, name, "end", colour=COLOURS[i]))
        return "\n".join([*parts, "</svg>\n"])

    def _y_range(self, values: Sequence[float]) -> tuple[float, float]:
        if not self.log_y:
            return 0.0, max(values) * 1.1
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return 10.0**low, 10.0 ** max(high, low + 1)

    def _ticks(self, low: float, high: float) -> list[float]:
        if self.log_y:
            first, last = round(math.log10(low)), round(math.log10(high))
            return [10.0**n for n in range(first, last + 1)]
        step = 10.0 ** math.floor(math.log10(high / 2))
        step *= next(n for n in (1, 2, 5, 10) if high / (step * n) <= 6)
        return [step * n for n in range(int(high / step) + 1)]


def charts(outcomes: Sequence[Outcome]) -> dict[str, Chart]:
    """The plots that these outcomes have figures for, by file name."""
    found = {}
    for outcome in outcomes:
        placed = [f for f in outcome.figures if f.at is not None and f.ours.median > 0]
        if outcome.id == "P3" and placed:
            found["first-token.svg"] = Chart(
                title="Time to first token",
                x_label="tokens of the prompt",
                y_label="seconds",
                log_y=True,
                series={
                    "cold": [(f.at or 0, f.other.median) for f in placed if f.other],
                    "restored from RAM": [(f.at or 0, f.ours.median) for f in placed],
                },
            )
        if outcome.id == "P1" and placed:
            series = {"erllama": [(f.at or 0.0, f.ours.median) for f in placed]}
            theirs = [(f.at or 0.0, f.other.median) for f in placed if f.other]
            found["throughput.svg"] = Chart(
                title="Decode throughput",
                x_label="concurrent requests",
                y_label="tokens/s, all together",
                series=series | ({"llama-server": theirs} if theirs else {}),
            )
    return found


def _text(x: float, y: float, text: str, anchor: str, size: int = 13, colour: str = "#1f2328") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
