"""`erllama demo`: an answer, its speed, and the comparison of one by one and together."""

from __future__ import annotations

import re

import pytest

from erllama.cli import demo, warm_demo


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_answers_and_compares(erllama_command, monkeypatch, smollm2_path):
    """Without a terminal: plain text with an answer, tokens per second and both rows of the table."""
    monkeypatch.setattr(demo, "N_TOKENS", 4)
    monkeypatch.setattr(demo, "N_ANSWER", 12)
    monkeypatch.setattr(warm_demo, "N_FACTS", 50)
    said = erllama_command("demo")
    assert said.status == 0
    assert said.err == ""
    assert re.search(r"12 tokens, [\d.]+ tokens/s, first token after \d+ ms", said.out)
    table = said.out[said.out.index("8 prompts") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["one", "together"]
    assert table[1].split()[-2:] == ["1.00", "x"]
    assert "\x1b" not in said.out
    warm = [line.split() for line in said.out[said.out.index("a long prompt") :].splitlines()[1:5]]
    assert [row[0] for row in warm] == ["cold", "again", "next", "after"]
    assert int(warm[0][2]) > 500
    assert int(warm[1][2]) == 1  # the last token is always computed
    assert int(warm[2][3]) < 20
    assert int(warm[3][3]) == 1
    assert "Eight prompts one by one …\n  32 tokens\nThe same eight together …\n" in said.out


def test_the_table_is_drawn_on_a_terminal(monkeypatch, capsys):
    """On a terminal the rounds stand in a drawn table, speed-up last."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rounds = [demo.Round("one by one", 4.0, 100), demo.Round("together", 2.0, 100)]
    demo._print_rounds(rounds)
    out = capsys.readouterr().out
    assert "2.00 x" in out
    assert "25.0" in out
