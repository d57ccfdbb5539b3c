"""Thinking in raw text: markers cut anywhere, budgets, ends."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erllama.chat.thinking import ThinkingSplitter, signature


def fed(text, cuts, budget=None):
    """The pieces of a text that arrives cut at the given places."""
    splitter = ThinkingSplitter("<t>", "</t>", budget)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        pieces += splitter.feed(text[begin:end])
    return pieces + splitter.finish()


def joined(pieces, *, thinking):
    """All text of one kind."""
    return "".join(piece.text for piece in pieces if piece.is_thinking is thinking)


@given(
    st.text("<t>/ab", max_size=25), st.text("<t>/ab", max_size=25), st.lists(st.integers(0, 60), max_size=8)
)
def test_cuts_change_nothing(before, after, cuts):
    """However the text arrives, the same of it is thinking, the block ends once, no marker shows."""
    text = f"{before}<t>middle</t>{after}"
    whole, cut = fed(text, []), fed(text, cuts)
    for thinking in (True, False):
        assert joined(whole, thinking=thinking) == joined(cut, thinking=thinking)
    assert sum(piece.ends for piece in cut) == 1
    assert len(text) - len("<t></t>") == len(joined(cut, thinking=True) + joined(cut, thinking=False))


def test_a_block_that_is_never_closed_ends_with_the_text():
    """The model stopped while thinking."""
    pieces = fed("a<t>b</", [])
    assert joined(pieces, thinking=True) == "b</"
    assert [piece.ends for piece in pieces][-1]


def test_an_empty_block_ends():
    """Nothing was thought: an end all the same, for the reader to pass over."""
    assert [(piece.text, piece.ends) for piece in fed("<t></t>x", [])] == [("", True), ("x", False)]


def test_text_without_markers_is_text():
    """Also what looks like the beginning of one."""
    assert joined(fed("a < b <t", []), thinking=False) == "a < b <t"


@pytest.mark.parametrize("budget", [1, 2, 9])
def test_a_budget_counts_pieces(budget):
    """What goes beyond is text; the end marker still does not show."""
    pieces = fed("<t>12345</t>6", range(1, 13), budget)
    thought = [piece for piece in pieces if piece.is_thinking and piece.text]
    assert len(thought) == min(budget, 5)
    assert sum(piece.ends for piece in pieces) == 1
    assert joined(pieces, thinking=True) + joined(pieces, thinking=False) == "123456"


def test_signatures():
    """HMAC-SHA256 of the text, nothing without a key."""
    assert signature("ü", b"k") == hmac.new(b"k", "ü".encode(), hashlib.sha256).digest()
    assert signature("x", None) == b""
