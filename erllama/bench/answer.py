"""What one request gave, by the client's own clock: the same record from either side."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Clock readings are `time.perf_counter()` seconds. `times` has one per token (or piece of text).

    `n_computed`: prompt tokens that went through the model. `source`: which tier the rest came from, on our
    side. `restore_s`: what bringing it back took, and `generated` the ids, where they are known.
    """

    n_prompt: int
    n_computed: int
    n_generated: int
    began: float
    times: tuple[float, ...]
    ended: float
    source: str | None = None
    restore_s: float = 0.0
    generated: tuple[int, ...] = ()

    @property
    def first_token_s(self) -> float:
        """From sending the request to its first token."""
        return self.times[0] - self.began

    @property
    def total_s(self) -> float:
        """From sending the request to its end."""
        return self.ended - self.began


class Side(Protocol):
    """Who answers: a loaded model of ours, or a running peer."""

    name: str

    async def ask(
        self, prompt: Sequence[int], n_out: int, *, cache: bool, seen: list[float] | None = None
    ) -> Answer:
        """Generate exactly `n_out` tokens, always the likeliest; end-of-generation tokens are forbidden.

        `cache`: earlier requests may help, and this one later ones. `seen` gets each token's time as it
        comes. Cancellation: the request ends.
        """


def wall_s(answers: Sequence[Answer]) -> float:
    """From the first request's start to the last one's end."""
    return max(a.ended for a in answers) - min(a.began for a in answers)


def rate_together(answers: Sequence[Answer]) -> float | None:
    """Tokens per second while every request was decoding; None if there was no such time.

    A peer that holds back half a character sends fewer pieces than tokens; they are counted as tokens.
    """
    began, ended = max(a.times[0] for a in answers), min(a.times[-1] for a in answers)
    if ended <= began:
        return None
    n = sum(a.n_generated / len(a.times) * sum(began < t <= ended for t in a.times) for a in answers)
    return n / (ended - began)


def longest_gap_s(times: Sequence[float], after: float, until: float) -> float:
    """The longest time without a token between two moments; the ends count."""
    marks = [after, *(t for t in times if after < t < until), until]
    return max(b - a for a, b in itertools.pairwise(marks))
