"""Thinking in a raw stream: text between two markers, told apart from the answer; and its signature."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from erllama.engine.text import longest_open_end


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, and whether it is thinking. `ends`: a thinking block is over behind it."""

    text: str
    is_thinking: bool
    ends: bool = False


class ThinkingSplitter:
    """Cuts text at markers, which never show. Thinking begins at most once.

    `budget`: pieces of thinking that are told as such; what follows is ordinary text. None: all.
    """

    def __init__(self, start: str, end: str, budget: int | None = None) -> None:
        self._start = start
        self._end = end
        self._budget = budget
        self._held = ""
        self._state = "before"
        self._n_pieces = 0

    def feed(self, text: str) -> list[Piece]:
        """Take more text."""
        pending, self._held = self._held + text, ""
        found: list[Piece] = []
        while pending:
            marker = self._marker
            if marker is None:
                found.append(Piece(pending, False))
                break
            before, is_whole, pending_after = self._cut(pending, marker)
            found += self._pieces(before, ends=is_whole)
            if not is_whole:
                break
            self._state = "thinking" if self._state == "before" else "after"
            pending = pending_after
        return found

    def finish(self) -> list[Piece]:
        """No more text: what was held back, and the end of a block that the model left open."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            self._state = "after"
            return [Piece(held, True, ends=True)]
        return [Piece(held, False)] if held else []

    @property
    def _marker(self) -> str | None:
        match self._state:
            case "before":
                return self._start
            case "thinking" | "over budget":
                return self._end
        return None

    def _cut(self, pending: str, marker: str) -> tuple[str, bool, str]:
        at = pending.find(marker)
        if at >= 0:
            return pending[:at], True, pending[at + len(marker) :]
        keep = longest_open_end(pending, (marker,))
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False, ""

    def _pieces(self, text: str, *, ends: bool) -> list[Piece]:
        if self._state != "thinking":
            return [Piece(text, False)] if text else []
        found: list[Piece] = []
        if text:
            self._n_pieces += 1
            used_up = self._budget is not None and self._n_pieces >= self._budget
            found.append(Piece(text, True, ends=ends or used_up))
            if used_up and not ends:
                self._state = "over budget"
        elif ends:
            found.append(Piece("", True, ends=True))
        return found


def signature(text: str, key: bytes | None) -> bytes:
    """HMAC-SHA256 of a thinking block's text; b"" without a key."""
    return b"" if key is None else hmac.new(key, text.encode(), hashlib.sha256).digest()
