"""Which lines of a prompt's head are moved, dropped, left alone."""

from __future__ import annotations

import re

import pytest

from erllama.server.stable import stable_messages
from server.scenes import serving

USER = {"role": "user", "content": "Hello"}


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("Current date and time: Monday, March 9, 2026 at 06:00:31 PM PDT", "any clock moved"),  # pi
        ("The current date is 2025-05-04 12:30:00.", "any clock moved"),  # goose
        ("**Current Time:** 18:00:31", "any clock moved"),  # Open WebUI
        ("## Current Time\n2026-02-06 10:11 (Friday)", "any clock moved"),  # nanobot
        (
            "## Current Date & Time\nSunday, February 2, 2026, 6:47 PM (Europe/Rome)",
            "any clock moved",
        ),  # OpenClaw
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
        "Today's date: Sun Jan 04 2026",
        "Current date: 2026-01-02",
        "Token usage: 1234/200000; 198766 remaining",
        "## Current Date & Time\nTime zone: Europe/Rome",
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
    messages = [system("Current time: 12:34"), USER, {"role": "assistant", "content": "Well"}]
    assert stable_messages(messages) == (messages, ())
    for content in (None, 3):
        odd = [system("Current time: 12:34"), {"role": "user", "content": content}]
        assert stable_messages(odd) == (odd, ())


def test_what_is_dropped_needs_no_place_to_move_to():
    """A clock that has to stay keeps nothing else."""
    end = [USER, {"role": "assistant", "content": "Well"}]
    billing = "x-anthropic-billing-header: cc_version=2; cch=1;"
    messages, notes = stable_messages([system(f"{billing}\nCurrent time: 12:34"), *end])
    assert messages == [system("Current time: 12:34"), *end]
    assert notes == ("x-erllama-prompt-changes: claude-code billing dropped",)


def test_what_stands_behind_a_billing_line_stays():
    """Where a proxy joined the blocks, the next one begins on the same line."""
    line = (
        "x-anthropic-billing-header: cc_version=2.1.123.5d3; cc_entrypoint=cli; cch=7b56f;You are an agent."
    )
    messages, _ = stable_messages([system(line), USER])
    assert messages == [system("You are an agent."), USER]


def test_only_the_head_is_changed():
    """What was said in the middle stays there: the next turn finds it where it was."""
    late = [
        system("Be kind."),
        USER,
        system("Current time: 12:34"),
        {"role": "assistant", "content": "Yes"},
        USER,
    ]
    assert stable_messages(late) == (late, ())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_requests_that_differ_in_such_lines_share_the_prefix(path):
    """On every surface; another text that differs is named in the reply."""
    async with serving() as scene:

        async def ask(line):
            head = "You are an agent. " * 10 + f"\n{line}\n" + "Be short. " * 20
            body = {"model": "fake", "max_tokens": 5, "stream": False}
            if path == "/v1/messages":
                body |= {"system": head, "messages": [USER]}
            else:
                body |= {"messages": [system(head), USER]}
            reply = await scene.client.post(path, json=body)
            return reply.headers["x-erllama-cache"], reply.headers.get("x-erllama-prompt-changes")

        await ask("Current date and time: Monday, March 9, 2026 at 06:00:31 PM PDT")
        told, changes = await ask("Current date and time: Monday, March 9, 2026 at 06:07:59 PM PDT")
        assert changes == "any clock moved"
        assert int(re.search(r"cached=(\d+)", told)[1]) > 380
        await ask("Session: blue")
        told, changes = await ask("Session: green")
        assert changes is None
        assert int(re.search(r"cached=(\d+)", told)[1]) < 380
        assert "reason=differs_at" in told
        assert "ession: blue" in told
        assert "ession: green" in told
