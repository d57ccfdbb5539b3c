"""What is known of one HTTP request: for the access log, the metrics and the debug headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from erllama import Completion

    from .failures import Surface
    from .generation import Answer

KEY = "erllama.record"
CLIENT_LEFT = "client_left"  # the error of a request that nobody waits for any more


@dataclass(slots=True, kw_only=True)
class Record:
    """Filled while the request is served."""

    request_id: str
    surface: Surface
    method: str
    path: str
    started: float
    status: int = 0
    model: str | None = None
    streamed: bool = False
    error: str | None = None
    answer: Answer | None = None  # which it got, or a part of it
    salt: bytes = b""  # whose it is
    headers: dict[str, str] = field(default_factory=dict)

    def note(self, notes: Iterable[str]) -> None:
        """Tell the client, in a header, what was done to its request."""
        for text in notes:
            name, _, value = text.partition(": ")
            known = self.headers.get(name)
            self.headers[name] = value if known is None else f"{known}, {value}"


def record_of(scope: Any) -> Record:
    """The record that the outermost middleware made."""
    record: Record = scope[KEY]
    return record


def header_text(text: str) -> str:
    """Text as it may stand in a header: one line of printable ASCII, the rest escaped."""
    line = " ".join(text.split())
    return line.encode("ascii", errors="backslashreplace").decode()[:500]


def cache_note(completion: Completion) -> str:
    """How much was reused, and why not more."""
    stats, miss = completion.stats, completion.miss
    why = "" if miss is None else f"; reason={miss.reason}; why={miss.message}"
    kind, source = completion.cache_hit_kind, completion.cache_source or "none"
    return header_text(
        f"{kind}; source={source}; cached={stats.n_cached}; prompt={stats.n_prompt}; "
        f"computed={stats.n_computed}{why}"
    )
