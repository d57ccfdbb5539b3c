"""Sessions: residents that belong to somebody, and who of them has to go when room is needed.

A *pin* is a resident with a session. Its session's next turn runs in the very same slot: its cells are cut
back to what the new prompt shares and go on from there. There is at most one pin per session, and a pin is a
slot, so there are never more than slots. Ids are names within a salt.

Rule 1: residents without a session go before pins, pins before those whose next turn waits already;
        among equals the longest unused one.
Rule 2: admission never takes the slot of a session whose next turn waits: it lets that turn overtake.
Rule 3: a prompt that is not the session's history going on ends the pin; what it held may still be shared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeAlias

from erllama.errors import NoSession, TranscriptMismatch

from .purpose import Purpose
from .resident import n_common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from erllama.types import HitKind

    from .resident import Resident
    from .sequence import Sequence as RunningSequence

Session: TypeAlias = tuple[bytes, Hashable]  # a salt, and an id under it


def session_of(session_id: Hashable, salt: bytes) -> Session | None:
    """The name of a session for the whole model; None without one."""
    return None if session_id is None else (salt, session_id)


def pin_of(residents: Iterable[Resident], session: Session | None) -> Resident | None:
    """The session's pin; None without one."""
    return None if session is None else next((r for r in residents if r.session == session), None)


def sessions_waiting(waiting: Iterable[RunningSequence]) -> set[Session]:
    """Sessions whose next turn is queued. A turn that keeps nothing does not take the pin over."""
    kept = [s.session for s in waiting if s.options.cache == "on" and not s.cancelled]
    return {session for session in kept if session is not None}


def by_worth(
    waiting: set[Session], source: object = None
) -> Callable[[Resident], tuple[bool, bool, bool, float]]:
    """Sort key of residents, first to go first (rule 1). What is about to be shared goes after its like;
    pins go strictly in order of use."""

    def key(resident: Resident) -> tuple[bool, bool, bool, float]:
        pinned = resident.session is not None
        return resident.session in waiting, pinned, resident is source and not pinned, resident.last_used

    return key


def goes_on(pin: Resident, seq: RunningSequence, n: int) -> bool:
    """Whether `seq`, which shares `n` tokens with its session's pin, continues that history.

    It does if it shares all that is in memory, or parts from it behind the last prompt, in the answer, or is
    itself a beginning of it. Its last token is computed in any case, so it never counts.
    """
    if seq.purpose is Purpose.CONTINUE:
        return True
    return n > 0 and n >= min(pin.n_kv, pin.n_prompt - 1, seq.n_tokens - 1)


def admitted_as(seq: RunningSequence) -> HitKind:
    """The hit kind of a sequence that runs on in its session's slot."""
    return "continuation" if seq.purpose is Purpose.CONTINUE else "sticky"


def history_of(pin: Resident | None, session_id: Hashable, expected: Sequence[int] | None) -> list[int]:
    """The session's whole history. Raises: `NoSession`, `TranscriptMismatch` if it is not `expected`."""
    if pin is None:
        raise NoSession(
            f"session {session_id!r} is not held, or not any more; send its whole transcript as a prompt",
            detail={"session_id": session_id},
        )
    stored = pin.history
    if expected is not None and stored.tolist() != list(expected):
        diverge_at = n_common(expected, stored)
        raise TranscriptMismatch(
            f"session {session_id!r} holds {len(stored)} tokens, not the {len(expected)} expected; they part "
            f"at {diverge_at}",
            detail={"stored_len": len(stored), "expected_len": len(expected), "diverge_at": diverge_at},
        )
    ids: list[int] = stored.tolist()
    return ids
