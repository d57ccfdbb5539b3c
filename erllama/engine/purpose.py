"""What a request wants of its sequence: an answer, or only that its prompt is in memory."""

from __future__ import annotations

import enum


class Purpose(enum.Enum):
    """Why a request runs."""

    ANSWER = "answer"
    CONTINUE = "continue"  # an answer behind a session's own history, without looking anything up
    PREFILL = "prefill"  # compute the prompt, sample nothing
    PIN = "pin"  # the same, and store it however short it is

    @property
    def samples(self) -> bool:
        """Whether tokens are generated."""
        return self in (Purpose.ANSWER, Purpose.CONTINUE)
