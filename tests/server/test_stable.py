"""Which lines of a prompt's head are moved, dropped, left alone."""

from __future__ import annotations

import pytest

from erllama.server.stable import stable_messages

USER = {"role": "user", "content": "Hello"}


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("Current time: 2026-01-02 03:04:05", "any clock moved"),
        ("The current date and time is Monday, 3 May 2027, 14:05 UTC.", "any clock moved"),
        ("Today's date: 2026-01-02T03:04:05Z", "any clock moved"),
        ("Token usage: 1234/200000; 198766 remaining", "any tokens moved"),
    ],
)
def test_what_changes_with_each_request_goes_to_the_end(line, note):
    """The line leaves the head and stands behind the last message; the rest stays as it was."""
    messages, notes = stable_messages([system(f"Be kind.\n{line}\nBe short."), USER])
    assert messages[0]["content"] == "Be kind.\n\nBe short."
    assert messages[1]["content"] == f"Hello\n\n{line}"
    assert notes == (f"x-erllama-prompt-changes: {note}",)
    assert USER["content"] == "Hello"


def test_a_billing_line_is_dropped_and_an_empty_message_with_it():
    """It says nothing to a model."""
    messages, notes = stable_messages([system("x-anthropic-billing-header: cc_version=2; cch=1;"), USER])
    assert messages == [USER]
    assert notes == ("x-erllama-prompt-changes: claude-code billing dropped",)


@pytest.mark.parametrize(
    "text",
    [
        "Today's date: 2026-01-02",
        "The current time is shown by the clock tool.",
        "Explain token usage: it is what counts.",
        "At 12:30 we had lunch. Current time zones are many.",
    ],
)
def test_other_lines_stay(text):
    """Dates without a time change once a day; prose is prose."""
    messages, notes = stable_messages([system(text), USER])
    assert messages == [system(text), USER]
    assert notes == ()


def test_what_users_write_is_never_touched():
    """The same line in a message of the user stays where it is."""
    line = {"role": "user", "content": "Current time: 12:34"}
    assert stable_messages([line]) == ([line], ())


def test_without_a_place_to_move_to_nothing_is_moved():
    """A conversation that ends with the assistant is gone on with as it is."""
    messages = [system("Time: 12:34"), USER, {"role": "assistant", "content": "Well"}]
    assert stable_messages(messages) == (messages, ())
