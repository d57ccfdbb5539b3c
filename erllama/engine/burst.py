"""Steps that follow each other on the model's thread, while what came of each is applied on the event loop.

A decoding row of the next step needs nothing but the token just sampled. So where everybody who runs decodes
and nobody waits, the thread goes on by itself; the event loop is told of each step as the next one begins.

Rule 1: whatever happens on the event loop calls `stop`; then no further step begins.
Rule 2: a step is followed only if each of its rows got a token that ends nothing. The next step begins with
these tokens, so they are taken even of who was cancelled meanwhile: memory never holds more than is known.
Rule 3: results are applied in order; the last one, which nothing follows, by who awaits the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.backend import Row, Sampled, Step, StepResult, StepStatus

from .state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sequence import Sequence

MOST_STEPS = 32


class Burst:
    """At most `n_steps` steps with the same rows, each one token further.

    Thread: `following` is called on the model's, everything else on the event loop's.
    """

    def __init__(
        self, n_steps: int, is_eog: Callable[[int], bool], apply: Callable[[StepResult], None]
    ) -> None:
        """`apply` takes the result of every step but the last."""
        self.n_steps = self._n_left = n_steps
        self._is_eog = is_eog
        self._apply = apply
        self._stopped = False  # written by one thread, read by another, which may see it one step late
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Burst of {self.n_steps} steps{' stopped' if self._stopped else ''}>"

    def stop(self) -> None:
        """No further step begins; the one that runs, runs on. Idempotent."""
        self._stopped = True

    def following(self, step: Step, result: StepResult) -> Step | None:
        """The step after `step`; None if that was the last one."""
        self._n_left -= 1
        if self._stopped or self._n_left <= 0 or result.status is not StepStatus.OK:
            return None
        rows = []
        for row, sampled in zip(step.rows, result.sampled, strict=True):
            if not isinstance(sampled, Sampled) or self._is_eog(sampled.token):
                return None
            rows.append(Row(row.slot, row.pos + 1, [sampled.token], row.sampler))
        return Step(tuple(rows), step.budget_s)

    def arrived(self, result: StepResult) -> None:
        """Apply the result of a step that is followed."""
        if self._error is None:
            try:
                self._apply(result)
            except BaseException as error:  # trio's own task runs this; `check` raises it where it belongs
                self._error = error
                self.stop()

    def check(self) -> None:
        """Raise what applying a result raised."""
        if self._error is not None:
            raise self._error


def n_steps(stepping: list[Sequence], n_cells: int | None, block_tokens: int | None) -> int:
    """How many steps of these sequences may follow each other, at least one; `stepping` are all that run.

    Until then nobody's answer has its full length, no buffer is full, no cell is lacking (`n_cells` are
    free; None: each has its own), and nobody who is saved passes a multiple of `block_tokens`.
    """
    n = MOST_STEPS if n_cells is None else min(MOST_STEPS, n_cells // len(stepping))
    for seq in stepping:
        if not _goes_on(seq):
            return 1
        n = min(n, seq.n_left, seq.buffer.n_steps)
        if block_tokens is not None and seq.options.cache == "on":
            n = min(n, block_tokens - seq.n_kv % block_tokens)
    return max(n, 1)


def _goes_on(seq: Sequence) -> bool:
    """Whether a token it gets can end it only by what it is. The first one comes out of its prompt."""
    return (
        seq.phase is Phase.DECODE
        and seq.n_generated > 0
        and seq.purpose.samples
        and not (seq.exact or seq.cancelled or seq.options.stop)
    )
