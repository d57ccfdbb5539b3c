"""What one call computes of the inputs that wait to be embedded. Pure.

Rule 1: in order of arrival; an input that has begun is gone on with before any other begins.
Rule 2: as many whole inputs as fit, or a piece of one that does not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.types import EmbeddingFacts


class Portion(NamedTuple):
    """Tokens [start, start + n) of the input at place `place`."""

    place: int
    start: int
    n: int


def plan_portions(inputs: Sequence[tuple[int, int]], facts: EmbeddingFacts, n_most: int) -> list[Portion]:
    """Portions of `inputs`, given as (tokens, tokens that are done), in their order.

    About `n_most` tokens, at most `facts.n_rows`: an input that must be whole is never cut.
    """
    n_tokens, n_done = inputs[0]
    n_rows = max(1, min(n_most, facts.n_rows))
    left = n_tokens - n_done
    if n_done or (left > n_rows and not facts.whole):
        return [Portion(0, n_done, min(left, n_rows))]
    portions = [Portion(0, 0, left)]
    n_used = left
    for place, (n, _) in enumerate(inputs[1 : facts.n_lanes], 1):
        if n_used + n > n_rows:
            break
        portions.append(Portion(place, 0, n))
        n_used += n
    return portions
