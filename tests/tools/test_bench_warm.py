"""The warm benchmark runs, counts what the engine counts, and calls a missed bar missed."""

from __future__ import annotations

import json

import bench_warm
import pytest
import warm_rows
from warm_bench import Bench, Figure, NotWarm, counted, timed


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(path=tmp_path, gemma=tmp_path, hybrid=tmp_path, folder=tmp_path)


@pytest.mark.model
@pytest.mark.slow
def test_quick_rows_on_the_real_model(tmp_path, capsys, smollm2_path, gemma_path):
    """Restores, counts and comparisons come out, as a table and as JSON; counts meet their bars."""
    file = tmp_path / "result.json"
    rows = ["P3", "p4", "P5", "P15"]
    assert bench_warm.main([*rows, "--quick", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    figures = result["figures"]
    assert {figure["row"] for figure in figures} == {"P3", "P4", "P5", "P15", "P16"}
    assert all(figure["met"] is not False for figure in figures)
    by_row = {figure["row"]: figure for figure in figures}
    assert by_row["P16"]["figure"] == "20"  # what is behind the chat, and nothing else
    assert 0.9 < float(by_row["P5"]["figure"]) <= 1.1
    out = capsys.readouterr().out
    assert out.count(" met") == sum(figure["met"] is True for figure in figures)
    assert "restore of 96 tokens" in out


@pytest.mark.model
@pytest.mark.slow
def test_places_to_go_on_from_in_window_and_hybrid_models(capsys, smollm2_path, gemma_path):
    """P18: one more place costs the window's parts, or a state."""
    assert bench_warm.main(["P18", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count(" met") == 2


def test_bars_are_judged(bench):
    """A median beyond its bar is missed, a quick timing is not judged, a count always is."""
    assert timed(bench, "P3", "x", [90, 10, 85], least=80).met is True
    assert timed(bench, "P3", "x", [70, 90, 75], least=80).met is False
    assert timed(bench, "P4", "x", [1.9], most=2).met is True
    assert timed(bench, "P4", "x", [2.1], most=2).met is False
    assert timed(bench, "P6", "x", [2.1]).met is None
    quick = Bench(**vars(bench) | {"quick": True})
    assert timed(quick, "P3", "x", [1.0], least=80).met is None
    assert counted("P15", "x", 240, 240).met is True
    assert counted("P15", "x", 241, 240).met is False


async def test_what_is_cold_is_missed_and_says_why(bench, monkeypatch):
    """A row whose request was not warm has no timing: it is a miss with its reason."""

    async def cold(bench: Bench) -> list[Figure]:
        """Warm from nowhere: nothing."""
        raise NotWarm("computed all of it")

    monkeypatch.setitem(warm_rows.ROWS, "P3", cold)
    (figure,) = await warm_rows.measure("P3", bench)
    assert (figure.met, figure.figure, figure.details) == (False, "cold", {"why": "computed all of it"})


def test_a_missed_bar_is_an_exit_code(monkeypatch, capsys, smollm2_path, gemma_path):
    """1 if a bar is missed; the table says which."""
    missed = Figure(row="P5", what="bytes", bar="≤ 1.1", figure="10", met=False)

    async def row(bench: Bench) -> list[Figure]:
        return [missed]

    monkeypatch.setitem(warm_rows.ROWS, "P5", row)
    assert bench_warm.main(["P5"]) == 1
    assert "MISSED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_warm.main(["P99"])
