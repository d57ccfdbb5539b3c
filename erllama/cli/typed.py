"""What a user types: messages of one line or several."""

from __future__ import annotations

import sys

import trio

FENCE = '"""'


async def read_message() -> str | None:
    """What the user types, one line or several; None at the end of the input."""
    line = await read_line("> ")
    if line is None:
        return None
    if line.strip() == FENCE:
        lines = []
        while (line := await read_line("| ")) is not None and line.strip() != FENCE:
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        more = await read_line("| ")
        line = line[:-1] + "\n" + (more or "")
        if more is None:
            break
    return line


async def read_line(prompt: str) -> str | None:
    """A line without its end. Cancellation: leaves the reading thread to itself."""

    def read() -> str | None:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None

    return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
