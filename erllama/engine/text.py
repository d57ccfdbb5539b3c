"""Bytes of sampled tokens to whole characters, with stop strings held back and cut off.

Rule 1: text that has been given out is never part of a stop string.
Rule 2: what is held back is exactly the longest end of the text that could still become one.
Rule 3: of several stop strings completed by one piece, the one that begins first ends the text.
Rule 4: bytes of an unfinished UTF-8 character wait; bytes that can never become one are U+FFFD.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextAssembler:
    """Turns the pieces of one generation into text. Sync, no I/O.

    `stop_sequence` is the stop string that ended the text, once one did.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self._parts: list[str] = []
        self.stop_sequence: str | None = None

    def feed(self, piece: bytes) -> str:
        """Take one token's bytes; return the text that may be shown now."""
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """The generation is over: give out what was held back, an unfinished character as U+FFFD."""
        shown = self._advance(self._decoder.decode(b"", final=True))
        if self.stop_sequence is None:
            shown += self._held
            self._parts.append(self._held)
            self._held = ""
        return shown

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._parts)

    def _advance(self, new: str) -> str:
        if self.stop_sequence is not None or not new:
            return ""
        if not self._stops:
            self._parts.append(new)
            return new
        pending = self._held + new
        # The held text never contains a whole stop string, so any match ends in `new`.
        found = [(at, len(s), s) for s in self._stops if (at := pending.find(s)) >= 0]
        if found:
            at, _, self.stop_sequence = min(found)
            shown, self._held = pending[:at], ""
        else:
            keep = longest_open_end(pending, self._stops)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self._parts.append(shown)
        return shown


def longest_open_end(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
