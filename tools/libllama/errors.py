"""The one error of the native build: what is wrong, and what to do about it."""

from __future__ import annotations


class BuildError(Exception):
    """The build cannot go on; `str()` is one clear sentence, `advice` says what to do.

    `log_tail` holds the last lines of the failing command's output, if a command failed.
    """

    def __init__(self, message: str, *, advice: str = "", log_tail: list[str] | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.log_tail = log_tail or []

    def render(self) -> str:
        """The text for a terminal: log lines first, because the sentence should end up in view."""
        lines = [f"  | {line}" for line in self.log_tail]
        lines.append(f"error: {self}")
        if self.advice:
            lines.append(f"  {self.advice}")
        return "\n".join(lines)
