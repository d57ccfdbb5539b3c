"""The life of a sequence, as one table.

    QUEUED ──admitted──> RESTORE ──restored──> PREFILL ──prefilled──> DECODE ──finished──> FINISHED
       ^                    │                  ^  └─preempted─┐  │  │                         ^
       │                    │                  └───rewound────┼──┘  │                         │
       └────────────────────┴─────────────────────────────────┴─────┘      any ──finished─────┘

Rule 1: `Lifecycle.fire` is the only writer of a phase. Rule 2: only RESTORE, PREFILL and DECODE own a slot.
A queued sequence may already hold generated tokens: it was preempted, and its stream pauses.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a sequence is."""

    QUEUED = "queued"
    RESTORE = "restore"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Happening(enum.Enum):
    """What moves a sequence on."""

    ADMITTED = "admitted"  # it got a slot
    RESTORED = "restored"  # whatever could be reused is in its memory; nothing, often
    PREFILLED = "prefilled"  # all but its last token are in memory
    REWOUND = "rewound"  # memory was lost; what is gone is computed again
    PREEMPTED = "preempted"  # its cells were needed; it waits for a slot again
    FINISHED = "finished"  # answered, failed or cancelled


TRANSITIONS: dict[Phase, dict[Happening, Phase]] = {
    Phase.QUEUED: {Happening.ADMITTED: Phase.RESTORE, Happening.FINISHED: Phase.FINISHED},
    Phase.RESTORE: {
        Happening.RESTORED: Phase.PREFILL,
        Happening.PREEMPTED: Phase.QUEUED,
        Happening.FINISHED: Phase.FINISHED,
    },
    Phase.PREFILL: {
        Happening.PREFILLED: Phase.DECODE,
        Happening.REWOUND: Phase.PREFILL,
        Happening.PREEMPTED: Phase.QUEUED,
        Happening.FINISHED: Phase.FINISHED,
    },
    Phase.DECODE: {
        Happening.REWOUND: Phase.PREFILL,
        Happening.PREEMPTED: Phase.QUEUED,
        Happening.FINISHED: Phase.FINISHED,
    },
    Phase.FINISHED: {},
}


class IllegalTransition(AssertionError):
    """A transition the table does not have: a bug in the engine."""


class Lifecycle:
    """The phase of one sequence."""

    __slots__ = ("_phase",)

    def __init__(self) -> None:
        self._phase = Phase.QUEUED

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    def fire(self, happening: Happening) -> Phase:
        """Move on. Raises `IllegalTransition` where the table has no entry."""
        try:
            self._phase = TRANSITIONS[self._phase][happening]
        except KeyError:
            raise IllegalTransition(f"{self._phase.value} cannot be {happening.value}") from None
        return self._phase
