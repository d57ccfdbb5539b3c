"""What a person sees: one rewritten line on a terminal, a line now and then in a log."""

from __future__ import annotations

import io

import pytest

from tools.libllama.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """Time that passes when a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    """A clock at zero."""
    return Clock()


def ninja(done, total=300, what="Building CXX object src/CMakeFiles/llama.dir/models/bert.cpp.o"):
    return f"[{done}/{total}] {what}"


def test_a_terminal_s_line_is_rewritten(clock):
    """Progress takes one line, which the next step leaves on screen."""
    out = Terminal()
    progress = Progress(out, clock=clock)
    progress.step("Compiling")
    for done in (1, 2, 3):
        progress.feed(ninja(done))
    progress.note("done")
    text = out.getvalue()
    assert text.count("\n") == 3
    assert "3/300 bert.cpp (llama)" in text


def test_a_log_gets_a_line_every_few_seconds(clock, said):
    """Without a terminal a hundred files are a few lines, the last one among them."""
    progress = Progress(said, every_s=10.0, clock=clock)
    progress.step("Compiling")
    for done in range(1, 101):
        clock.now_s = done
        progress.feed(ninja(done, 100))
    lines = said.getvalue().splitlines()
    assert 10 <= len(lines) <= 13
    assert "100/100" in lines[-1]


def test_says_how_long_it_will_take_once_it_can_tell(clock, said):
    """After some objects the pace gives an estimate; near the end it is dropped."""
    progress = Progress(said, every_s=0.0, clock=clock)
    progress.step("Compiling")
    for clock.now_s, done in ((2.0, 1), (100.0, 100), (295.0, 295)):
        progress.feed(ninja(done))
    first, middle, last = said.getvalue().splitlines()[1:]
    assert "min left" not in first
    assert "about 3 min left" in middle
    assert "min left" not in last


@pytest.mark.parametrize("line", ["", "ninja: Entering directory", "[x/y] z", "[1/0] z"])
def test_lines_that_count_nothing_are_no_progress(line, clock, said):
    """Other output goes to the log file only, and never divides by zero."""
    Progress(said, every_s=0.0, clock=clock).feed(line)
    assert "[#" not in said.getvalue()
