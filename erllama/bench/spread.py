"""Medians with their spread, of runs that take turns."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of `n` values, and half the distance between their quartiles (0 for one value)."""

    median: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """At least one value."""
        found = list(values)
        if len(found) == 1:
            return cls(found[0], 0.0, 1)
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(middle, (high - low) / 2, len(found))


def paired(ours: Sequence[float], others: Sequence[float]) -> Spread:
    """The ratio ours / other over neighbouring runs: a machine that slows down slows both of a pair."""
    return Spread.of(a / b for a, b in zip(ours, others, strict=True))


async def take_turns(
    n_runs: int, *sides: Callable[[int], Awaitable[T]], warm_up: bool = True
) -> list[list[T]]:
    """Run the sides as A B, B A, A B …; each gets the number of its run and gives its result.

    Whoever came last begins the next round, so that a machine that gets slower, or faster, favours nobody.
    With `warm_up` a first round (run 0) is thrown away. Returns one list of `n_runs` results per side.
    """
    results: list[list[T]] = [[] for _ in sides]
    order = list(zip(results, sides, strict=True))
    for run in range(0 if warm_up else 1, n_runs + 1):
        for kept, side in order:
            gc.collect()  # none of a run's garbage is collected in the next one
            result = await side(run)
            if run:
                kept.append(result)
        order.reverse()
    return results
