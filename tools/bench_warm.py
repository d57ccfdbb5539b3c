"""What the cache is worth on real models: rows P3-P8, P11, P12 and P15-P18 with their bars.

    python tools/bench_warm.py [ROW …] [--runs 3] [--quick] [--json FILE] [--model PATH] [--gemma PATH]

Prints a table (row, what, bar, figure, met or missed). Exit code 1 if a bar is missed. With `--quick` sizes
are tiny and timings are not judged. Comparisons with llama-server are not made here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from make_tiny_gguf import make_tiny_gguf
from warm_bench import Bench, Figure
from warm_rows import ROWS, measure

from erllama import models

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS = ("row", "what", "bar", "figure", "")


def verdict(figure: Figure) -> str:
    """One word, or none where there is nothing to judge."""
    return "" if figure.met is None else "met" if figure.met else "MISSED"


def report(figures: Sequence[Figure], load: float) -> None:
    """The table, and a word of warning where others were computing too."""
    if load > 0.5:
        print(f"The machine was not idle (load {load:.1f}): its timings say little.\n")
    lines = [HEADS, *((f.row, f.what, f.bar, f.figure, verdict(f)) for f in figures)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip())
    for figure in figures:
        if "why" in figure.details:
            print(f"{figure.row}: {figure.details['why']}")


async def bench(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The chosen rows, one after the other."""
    setting = Bench(
        path=args.model or models.default_model(),
        gemma=args.gemma or models.fetch(models.GEMMA3_270M),
        hybrid=make_tiny_gguf("hybrid", folder / "hybrid.gguf"),
        folder=folder,
        runs=args.runs,
        quick=args.quick,
    )
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    for name in args.rows or ROWS:
        print(f"{name} …", file=sys.stderr, flush=True)
        figures += await measure(name, setting)
    report(figures, load)
    return {
        "models": [setting.path.name, setting.gemma.name],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_before": load,
        "n_runs": setting.n_runs,
        "quick": setting.quick,
        "figures": [asdict(figure) for figure in figures],
    }


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the cache is worth, row by row.")
    parser.add_argument("rows", nargs="*", metavar="ROW", type=str.upper, help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each timing (3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--gemma", type=Path, help="a sliding-window model (default: gemma-3-270m)")
    args = parser.parse_args(argv)
    if unknown := [row for row in args.rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="erllama-bench-") as folder:
        result = trio.run(bench, args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    figures = result["figures"]
    assert isinstance(figures, list)
    return int(any(figure["met"] is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
