"""`tools/check.py` says what failed and only then fails."""

from __future__ import annotations

import check
import pytest

TRUE, FALSE = ("timeit", "-n", "1", "pass"), ("timeit", "-n", "1", "raise SystemExit('broken')")


def test_a_failed_check_shows_its_output(monkeypatch, capsys):
    """The others still run; the exit status is 1; the output of the failed one is shown."""
    monkeypatch.setattr(check, "CHECKS", {"good": TRUE, "bad": FALSE, "also": TRUE})
    assert check.main([]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.endswith(" s")] == [
        ["good", "ok"],
        ["bad", "FAILED"],
        ["also", "ok"],
    ]
    assert "broken" in out
    assert out.endswith("failed: bad\n")


def test_named_checks_run_alone(monkeypatch, capsys):
    """Only what was asked for; a name that does not exist is misuse."""
    monkeypatch.setattr(check, "CHECKS", {"good": TRUE, "bad": FALSE})
    assert check.main(["good"]) == 0
    assert "bad" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        check.main(["nothing"])
    assert stop.value.code == 2
