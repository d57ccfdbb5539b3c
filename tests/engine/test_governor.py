"""Threads follow what the machine has to give."""

from __future__ import annotations

from erllama.engine.governor import ThreadGovernor


class Machine:
    """A clock and idle cores; steps get `share` of the CPU time their threads ask for."""

    def __init__(self, n_max: int = 2) -> None:
        self.now = self.idle = 0.0
        self.n_idle = 0.0
        self.governor = ThreadGovernor(n_max, self.now, lambda: self.idle)

    def run(self, seconds: float, share: float, step_s: float = 0.01) -> int:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.idle += step_s * self.n_idle
            self.governor.observe(step_s, step_s * share * self.governor.n, self.now)
        return self.governor.n


def test_undisturbed_it_stays_with_all_threads():
    """Full shares change nothing, however long."""
    assert Machine(8).run(100, 1.0) == 8


def test_a_busy_neighbour_takes_a_thread_away_within_a_few_steps():
    """Two threads that share a core with somebody get two thirds: one is used."""
    machine = Machine()
    assert machine.run(0.06, 0.67) == 1


def test_more_threads_than_free_cores_go_one_by_one():
    """With three of eight cores free, it ends at three or fewer, not at one."""
    machine = Machine(8)
    for _ in range(1000):
        machine.run(0.01, min(1.0, 3 / machine.governor.n))
    assert machine.governor.n == 3


def test_an_idle_core_is_tried_again():
    """Once the neighbour is gone, all threads are back within seconds."""
    machine = Machine()
    machine.run(1, 0.67)
    machine.n_idle = 1.0
    assert machine.run(2.5, 1.0) == 2


def test_without_an_idle_core_it_waits():
    """As long as the neighbour computes, one thread it is."""
    machine = Machine()
    machine.run(1, 0.67)
    assert machine.run(100, 1.0) == 1


def test_attempts_that_fail_become_rarer():
    """A core that is idle on average and busy when wanted is not tried every second."""
    machine = Machine()
    machine.n_idle = 1.0
    changes, last = 0, 2
    for _ in range(6000):
        n = machine.run(0.05, 1.0 if machine.governor.n == 1 else 0.6)
        changes += n != last
        last = n
    assert changes < 40


def test_one_thread_is_never_taken_away():
    """Somebody has to compute."""
    assert Machine(1).run(10, 0.1) == 1
