"""`erllama demo`: an answer, its speed, one by one against together, and six situations for the cache."""

from __future__ import annotations

import re

import pytest
import trio

import erllama
from erllama.cli import chart, demo, warm_demo
from erllama.cli.demo_text import house_rules
from erllama.cli.second_life import Answer
from erllama.machine import busy_load
from erllama.types import Stats

CELLS = re.compile(r"  +")


def rows_below(out: str, head: str, n: int) -> list[list[str]]:
    """The cells of n lines below a table's head."""
    return [CELLS.split(line) for line in out[out.index(head) :].splitlines()[1 : n + 1]]


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_answers_and_compares(erllama_command, monkeypatch, smollm2_path):
    """Without a terminal: plain text, each row with the tokens that its situation must compute."""
    monkeypatch.setattr(demo, "N_TOKENS", 4)
    monkeypatch.setattr(demo, "N_ANSWER", 12)
    monkeypatch.setattr(warm_demo, "N_ROOMS", 24)
    said = erllama_command("demo")
    assert said.status == 0
    assert said.err == ""
    assert "\x1b" not in said.out
    assert re.search(r"12 tokens, [\d.]+ tokens/s, first token after \d+ ms", said.out)
    assert "Eight prompts one by one …\n  32 tokens\nThe same eight together …\n" in said.out
    rounds = rows_below(said.out, "8 prompts  ", 2)
    assert [row[0] for row in rounds] == ["one by one", "together"]
    assert rounds[0][-1] == "1.00 x"

    rows = rows_below(said.out, "a long prompt  ", 6)
    named = {row[0]: (int(row[1].replace(",", "")), int(row[2].replace(",", "")), row[3]) for row in rows}
    n_prompt = named["cold"][0]
    assert n_prompt > 700
    assert named["cold"] == (n_prompt, n_prompt, "-")
    assert named["again"] == (n_prompt, 1, "memory")  # the last token is always computed
    assert named["after a restart"] == (n_prompt, 1, "disk")
    n_turn, n_new, source = named["next turn"]
    assert n_turn - n_prompt < 40
    assert n_new < 30
    assert source == "memory"
    n_edited, n_changed, _ = named["edited in the middle"]
    assert 0.4 * n_edited < n_changed < 0.7 * n_edited
    n_agents, n_shared, _ = named["8 agents, one head"]
    assert n_agents > 8 * n_prompt * 0.95
    assert n_shared < 2 * n_prompt
    assert "8 agents: tokens of all of them" in said.out
    bars = rows_below(said.out, "time to the first token", 6)
    assert all(re.match(r"#+ [\d.]+ m?s", bar[1]) for bar in bars)


def test_a_row_adds_up_what_the_engine_counted():
    """Tokens are summed, the wait is the longest, sources are named once."""
    answers = [
        Answer(generated=[1], cache_source=source, stats=Stats(n_prompt=10, n_cached=n, first_token_s=s))
        for source, n, s in ((None, 0, 1.0), ("live", 8, 0.5), ("disk", 9, 2.0))
    ]
    row = warm_demo.Row.of("three", answers)
    assert row == warm_demo.Row("three", 30, 13, 2.0, ("disk", "memory"))
    assert warm_demo.cells([row])[0][-1] == "1.0 x"


def test_factors_have_no_decimals_that_mean_nothing():
    """One decimal below ten, none from there on."""
    rows = [
        warm_demo.Row(name, 1000, 0, s) for name, s in (("cold", 10.0), ("a", 2.5), ("b", 1.0), ("c", 0.004))
    ]
    assert [row[-1] for row in warm_demo.cells(rows)] == ["1.0 x", "4.0 x", "10 x", "2,500 x"]


def test_a_busy_machine_is_told_below_the_table(monkeypatch):
    """A load above half the CPUs is named; a quiet machine is not."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 9.0, 9.0))
    assert busy_load() is None
    assert "busy" not in warm_demo.notes(busy_load())
    monkeypatch.setattr("os.getloadavg", lambda: (2.1, 0.0, 0.0))
    assert "busy when this began (load 2.1)" in warm_demo.notes(busy_load())


def test_the_prompt_is_varied_and_changes_where_it_should():
    """Sentences differ, another seed is another text, and a changed room changes only its line."""
    text = house_rules(60, 1)
    lines = text.splitlines()
    assert len(set(lines)) == len(lines) == 61
    assert not set(lines) & set(house_rules(60, 2).splitlines())
    changed = house_rules(60, 1, changed_room=30).splitlines()
    assert [i for i, (a, b) in enumerate(zip(lines, changed, strict=True)) if a != b] == [30]


async def test_a_second_process_that_fails_is_an_error(tmp_path, monkeypatch):
    """The demo says what the other process said last, instead of a table without it."""
    first = Answer(generated=[], cache_source=None, stats=Stats())
    with trio.fail_after(240), pytest.raises(erllama.EngineError, match="no file at"):
        await warm_demo.second_life(tmp_path / "no.gguf", str(tmp_path), first)


def test_another_answer_is_an_error():
    """An answer that differs from the cold one is not shown as a success."""
    warm_demo._must_agree([1, 2], [1, 2], "again")
    with pytest.raises(erllama.EngineError, match="again differs"):
        warm_demo._must_agree([1, 2], [1, 3], "again")


def test_the_table_is_drawn_on_a_terminal(monkeypatch, capsys):
    """On a terminal the rounds stand in a drawn table, speed-up last."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rounds = [demo.Round("one by one", 4.0, 100), demo.Round("together", 2.0, 100)]
    chart.print_table(*demo._rounds_table(rounds))
    out = capsys.readouterr().out
    assert "2.00 x" in out
    assert "25.0" in out
    assert "─" in out


def test_bars_are_as_long_as_their_times(monkeypatch, capsys):
    """The longest fills the width, one too short to draw is still seen; blocks on a terminal."""
    values = [("cold", 8.0), ("half", 4.0), ("again", 0.02)]
    chart.print_bars("times", values)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "times"
    assert [line.count("#") for line in lines[1:]] == [48, 24, 1]
    assert [line.split("# ")[1] for line in lines[1:]] == ["8.0 s", "4.0 s", "20 ms"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chart.print_bars("times", values)
    drawn = capsys.readouterr().out
    assert drawn.count("█") > 60
    assert "20 ms" in drawn
