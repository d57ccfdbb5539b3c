"""Write the tables of docs/performance.md from the JSON files of `erllama bench --json`.

    python tools/performance_table.py bench.json gemma.json

Each file becomes one table with its machine, commit and flags on top, put between the two marks in the page.
So no figure there was typed by hand, and a newer run replaces them all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from erllama.bench.figure import Bar, Figure
from erllama.bench.spread import Spread
from erllama.bench.table import row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- written by tools/performance_table.py: begin -->", "<!-- end -->"
HEADS = ("", "figure", "erllama", "compared with", "ratio", "bar", "")


def main(files: list[str]) -> int:
    """Replace what stands between the marks. Raises: ValueError if the page lost one of them."""
    text = PAGE.read_text(encoding="utf-8")
    tables = [table(json.loads(Path(name).read_text(encoding="utf-8"))) for name in files]
    PAGE.write_text(replaced(text, "\n".join(tables)), encoding="utf-8")
    return 0


def replaced(page: str, tables: str) -> str:
    """The page with other tables between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def table(run: dict[str, Any]) -> str:
    """One run as Markdown."""
    lines = [heading(run), "", _cells(HEADS), _cells(["---"] * len(HEADS))]
    for workload in run["workloads"]:
        for data in workload["figures"]:
            figure = read_figure(data)
            judge = data["met"] is not None
            verdict = row(figure, judge=judge)
            last = "**missed**" if verdict[-1] == "MISSED" else verdict[-1]
            lines.append(_cells([workload["id"], *verdict[:-1], last]))
        if workload["failure"] is not None:
            how = "ended early" if workload["figures"] else "not measured"
            lines.append(_cells([workload["id"], f"{how}: {workload['failure']}", *[""] * 5]))
    notes = [f"- {w['id']}: {note}" for w in run["workloads"] for note in w["notes"]]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def heading(run: dict[str, Any]) -> str:
    """What the figures were measured on, in one sentence."""
    machine, versions, flags = run["machine"], run["versions"], run["flags"]
    peer = "" if flags["peer"] is None else f" beside {flags['peer']} from the same tree"
    return (
        f"**{flags['model']}**, {run['started'][:10]}, commit {versions['commit']}, {machine['processor']}, "
        f"{machine['usable_cpus']} usable CPUs, load {machine['load_before']:.1f} before; "
        f"{flags['n_threads']} threads{peer}, batch {flags['n_batch']}, {flags['type_kv']} KV, "
        f"flash attention {'on' if flags['flash_attn'] else 'off'}, up to {flags['n_runs']} runs a side."
    )


def read_figure(data: dict[str, Any]) -> Figure:
    """A figure as it was before it became JSON."""
    ours = _spread(data["ours"])
    if ours is None:
        raise ValueError(f"{data['name']} has no figure of ours")
    return Figure(
        name=data["name"],
        unit=data["unit"],
        ours=ours,
        other=_spread(data["other"]),
        other_name=data["other_name"] or "",
        ratio=_spread(data["ratio"]),
        bar=None if data["bar"] is None else Bar(**data["bar"]),
        at=data["at"],
    )


def _spread(data: dict[str, Any] | None) -> Spread | None:
    return None if data is None else Spread(**data)


def _cells(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
