"""How many threads a step computes with, when other programs want the cores too.

ggml's threads spin at barriers, so one that is taken off its core stalls all others: two threads on two
cores, one of them busy with something else, decode 0.6 tokens a second where one thread decodes 46
(measured, SmolLM2). So if the threads did not get the cores they asked for, one fewer is used; once a core
has been idle for a while, one more is tried, ever more patiently if that fails. Only where the caller left
`n_threads` to us: the number of threads may change the last bits of a long context's logits.

Pure: it is told what was measured and answers a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

GOT_TOO_LITTLE = 0.85  # of the CPU time the threads would have used undisturbed
ENOUGH_S = 0.05  # wall clock of steps before a judgement
IDLE_CORE = 0.8  # of a core that nobody uses
FIRST_PATIENCE_S = 1.0
MOST_PATIENCE_S = 60.0


class ThreadGovernor:
    """Chooses between 1 and `n_max` threads."""

    def __init__(self, n_max: int, now: float, idle_s: Callable[[], float]) -> None:
        """`now` is any clock; `idle_s` tells how many seconds all cores together have been idle, ever."""
        self.n = self.n_max = n_max
        self._read_idle_s = idle_s
        self._wall_s = self._cpu_s = 0.0
        self._patience_s = FIRST_PATIENCE_S
        self._changed_at = now - 2 * MOST_PATIENCE_S  # long ago
        self._idle_since, self._idle_s = now, idle_s()

    def __repr__(self) -> str:
        return f"<ThreadGovernor {self.n} of {self.n_max}>"

    def observe(self, wall_s: float, cpu_s: float, now: float) -> int:
        """A step with `n` threads took so long and so much CPU time of this process; returns the new `n`."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self.n > 1 and self._wall_s >= ENOUGH_S:
            if self._cpu_s < GOT_TOO_LITTLE * self._wall_s * self.n:
                quick = now - self._changed_at < 2 * self._patience_s
                self._patience_s = min(MOST_PATIENCE_S, 2 * self._patience_s) if quick else FIRST_PATIENCE_S
                self._set(self.n - 1, now)
            else:
                self._wall_s = self._cpu_s = 0.0
        elif self.n < self.n_max and now - self._idle_since >= self._patience_s:
            idle_s = self._read_idle_s()
            n_idle = (idle_s - self._idle_s) / (now - self._idle_since)
            self._idle_since, self._idle_s = now, idle_s
            if n_idle >= IDLE_CORE:
                self._set(self.n + 1, now)
        return self.n

    def _set(self, n: int, now: float) -> None:
        self.n = n
        self._wall_s = self._cpu_s = 0.0
        self._changed_at = self._idle_since = now
        self._idle_s = self._read_idle_s()
