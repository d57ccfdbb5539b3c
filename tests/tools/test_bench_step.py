"""The step benchmark runs to its end and writes what it promises."""

from __future__ import annotations

import json

import bench_step
import pytest


@pytest.mark.model
@pytest.mark.slow
def test_it_measures_both_sides_and_the_heartbeat(tiny_gguf, tmp_path, capsys, monkeypatch):
    """Both comparisons and all phases, as a table and as JSON; both sides say the same tokens."""
    monkeypatch.setattr(bench_step, "LONG_PROMPT", bench_step.LONG_PROMPT[:3600])
    file = tmp_path / "result.json"
    arguments = ["--runs", "2", "--tokens", "4", "--model", str(tiny_gguf("dense")), "--json", str(file)]
    assert bench_step.main(arguments) == 0
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["throughput"]] == ["1 sequence", "8 sequences"]
    assert all(row["ratio"] > 0 and row["bare_per_s"] > 0 for row in result["throughput"])
    assert {"idle", "prefill"} <= {row["phase"] for row in result["heartbeat"]}
    out = capsys.readouterr().out
    assert "API/bare" in out
    assert "heartbeat" in out
