"""The tables of docs/performance.md come out of the bench's JSON, and out of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from performance_table import BEGIN, END, PAGE, replaced, table

from erllama.bench.figure import Bar, Outcome, against, single
from erllama.bench.report import as_json
from erllama.bench.settings import Settings


def a_run():
    """A bench run of two workloads, one of which failed."""
    settings = Settings(model=Path("smol.gguf"), folder=Path("."), n_threads=2)
    facts = {
        "machine": {"processor": "A | B", "usable_cpus": 2, "load_before": 0.1},
        "versions": {"commit": "abc"},
    }
    figures = (
        against("one", "tokens/s", [90.0, 92.0], [100.0, 100.0], "llama-server", Bar(">=", 1.0)),
        single("two", "s", [0.01], Bar("<=", 0.02, "value")),
    )
    outcomes = [
        Outcome(id="P1", title="decode", compared="x", figures=figures, notes=("A note.",)),
        Outcome(id="P2", title="prefill", compared="x", failure="no program"),
        Outcome(id="P3", title="warm", compared="x", figures=figures[1:], failure="interrupted"),
    ]
    return as_json(settings, "2026-01-02T03:04:05+00:00", facts, outcomes)


def test_a_table_says_what_was_missed_and_what_was_not_measured():
    """A missed bar, a met one, a failure and a note each have their line."""
    lines = table(a_run()).splitlines()
    assert lines[0].startswith("**smol.gguf**, 2026-01-02, commit abc, A | B, 2 usable CPUs")
    one = "| P1 | one | 91 tokens/s ± 0.5 | 100 tokens/s llama-server | 0.91 ± 0.005 | ≥ 1 × | **missed** |"
    assert one in lines
    assert "| P1 | two | 10 ms |  |  | ≤ 0.02 | met |" in lines
    assert any(line.startswith("| P2 | not measured: no program |") for line in lines)
    assert "| P3 | two | 10 ms |  |  | ≤ 0.02 | met |" in lines
    assert any(line.startswith("| P3 | ended early: interrupted |") for line in lines)
    assert "- P1: A note." in lines


def test_only_what_stands_between_the_marks_is_replaced():
    """Text around the tables stays; a page without marks is refused."""
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\n\nnew\n{END}\nb"
    with pytest.raises(ValueError, match="needs the lines"):
        replaced("a page", "new")


def test_the_page_has_its_marks():
    """The real page can be written."""
    assert replaced(PAGE.read_text(encoding="utf-8"), "")
