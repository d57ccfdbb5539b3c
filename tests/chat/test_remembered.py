"""What is kept of results, and that it never outgrows its bytes."""

from __future__ import annotations

import pytest

from erllama.chat import tools
from erllama.chat.remembered import ENTRY_BYTES, Remembered
from erllama.chat.tools import check_tools


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def kept(max_bytes):
    """A function that notes its calls, with results as long as their texts."""
    calls = []

    def make(text):
        calls.append(text)
        return text.upper()

    return Remembered(make, len, max_bytes=max_bytes), calls


def test_a_result_is_made_once():
    """The same text, the same result; lone surrogates are text too."""
    remembered, calls = kept(10_000)
    assert [remembered(text) for text in ("a", "b", "a", "\ud800", "\ud800")] == [
        "A",
        "B",
        "A",
        "\ud800",
        "\ud800",
    ]
    assert calls == ["a", "b", "\ud800"]
    assert (remembered.n_hits, remembered.n_misses) == (2, 3)


def test_the_longest_unused_goes_first():
    """Room for two: a third one takes the place of the one that was not asked for."""
    remembered, calls = kept(2 * (ENTRY_BYTES + 1))
    for text in "abacab":
        remembered(text)
    assert calls == ["a", "b", "c", "b"]


def test_bytes_are_bounded():
    """Texts of every length, and one that is too long to be kept at all."""
    remembered, calls = kept(5000)
    for n in range(1, 400, 7):
        remembered("x" * n)
        assert 0 < remembered.n_bytes <= 5000
    remembered("y" * 6000)
    remembered("y" * 6000)
    assert remembered.n_bytes <= 5000
    assert calls.count("y" * 6000) == 2


def test_a_failure_is_not_kept():
    """It is tried again, and takes no room."""
    remembered = Remembered(int, lambda _: 1, max_bytes=1000)
    for _ in range(2):
        with pytest.raises(ValueError, match="no number"):
            remembered("no number")
    assert (remembered.n_bytes, remembered.n_misses) == (0, 2)


@pytest.mark.model
def test_schemas_of_tools_are_kept_within_bytes():
    """Large ones that nobody sends twice do not pile up; small ones are still converted once."""
    for i in range(40):
        check_tools([tool({"type": "object", "description": f"{i} " + "x" * (1 << 20)})], "auto")
    assert 1 << 20 < tools._loose.n_bytes <= tools.MAX_BYTES
    n_misses = tools._loose.n_misses
    for _ in range(3):
        check_tools([tool({"type": "object", "properties": {"only here": {"type": "null"}}})], "auto")
    assert tools._loose.n_misses == n_misses + 1
