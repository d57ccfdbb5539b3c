"""The compute permit under real threads: order, sizes, and the sum in flight."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from erllama.engine.permit import PROCESS_PERMIT, ComputePermit
from erllama.options import usable_cpus


def wait_for(condition, what: str) -> None:
    """Poll a condition of other threads for at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.001)


class Queue:
    """Threads that ask for tokens one after the other, in a known order."""

    def __init__(self, permit: ComputePermit) -> None:
        self.permit = permit
        self.entered: list[str] = []
        self.threads: list[threading.Thread] = []

    def ask(self, name: str, n: int, leave: threading.Event | None = None) -> None:
        def hold() -> None:
            with self.permit.ticket().held(n):
                self.entered.append(name)
                if leave is not None:
                    assert leave.wait(10)

        waiting = f"{len(self.threads) + 1} asked"
        thread = threading.Thread(target=hold)
        thread.start()
        self.threads.append(thread)
        n_known = len(self.threads)
        wait_for(lambda: self._n_queued() + len(self.entered) >= n_known, waiting)

    def _n_queued(self) -> int:
        return int(repr(self.permit).split(", ")[1].split()[0])

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def test_first_come_first_served():
    """A small request does not overtake a large one that came before it, though it would fit."""
    queue, leave = Queue(ComputePermit(4)), threading.Event()
    queue.ask("holder", 2, leave)
    queue.ask("large", 4)
    queue.ask("small", 1)
    time.sleep(0.02)
    assert queue.entered == ["holder"]
    leave.set()
    queue.join()
    assert queue.entered == ["holder", "large", "small"]


def test_those_that_fit_run_at_once():
    """Two requests whose sum fits are held together."""
    queue, leave = Queue(ComputePermit(4)), threading.Event()
    queue.ask("a", 2, leave)
    queue.ask("b", 2, leave)
    wait_for(lambda: queue.entered == ["a", "b"], "both inside")
    assert repr(queue.permit) == "<ComputePermit 0/4 free, 0 waiting>"
    leave.set()
    queue.join()
    assert repr(queue.permit) == "<ComputePermit 4/4 free, 0 waiting>"


def test_an_oversize_request_gets_everything():
    """More threads than there are tokens: it waits for all of them, then runs alone."""
    queue, first, second = Queue(ComputePermit(2)), threading.Event(), threading.Event()
    queue.ask("one", 1, first)
    queue.ask("hundred", 100, second)
    assert queue.entered == ["one"]
    first.set()
    wait_for(lambda: "hundred" in queue.entered, "oversize admitted")
    assert repr(queue.permit) == "<ComputePermit 0/2 free, 0 waiting>"
    second.set()
    queue.join()


def test_an_exception_inside_gives_the_tokens_back():
    """A step that raises does not keep the machine."""
    permit = ComputePermit(3)
    with pytest.raises(KeyError), permit.ticket().held(3):
        raise KeyError("step failed")
    assert repr(permit) == "<ComputePermit 3/3 free, 0 waiting>"


def test_the_sum_in_flight_never_exceeds_the_tokens():
    """Eight threads, 400 requests of mixed sizes: never more than five tokens out, and all get in."""
    permit, lock = ComputePermit(5), threading.Lock()
    in_flight, worst, n_served = 0, 0, 0

    def work(n: int) -> None:
        nonlocal in_flight, worst, n_served
        with permit.ticket().held(n):
            with lock:
                in_flight += min(n, 5)
                worst = max(worst, in_flight)
            time.sleep(0)
            with lock:
                in_flight -= min(n, 5)
                n_served += 1

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, 1 + i % 7) for i in range(400)]:
            future.result(timeout=20)
    assert (worst, n_served) == (5, 400)


def test_the_process_has_as_many_tokens_as_usable_cpus():
    """All models of a process share what it may use."""
    assert PROCESS_PERMIT.n_tokens == usable_cpus()


def test_a_waiting_ticket_can_be_given_up():
    """Whoever waits is told so from another thread, and the queue goes on without it."""
    permit, leave = ComputePermit(1), threading.Event()
    queue = Queue(permit)
    queue.ask("holder", 1, leave)
    ticket, granted = permit.ticket(), []

    def wait() -> None:
        with ticket.held(1) as got:
            granted.append(got)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: "1 waiting" in repr(permit), "ticket waits")
    ticket.give_up()
    thread.join(10)
    assert granted == [False]
    with ticket.held(1) as got:
        assert not got  # until renewed
    ticket.renew()
    leave.set()
    queue.join()
    with ticket.held(1) as got:
        assert got


def test_a_holder_that_is_overdue_no_longer_counts():
    """Somebody stuck beyond the time it asked for does not keep the others from computing."""
    permit, entered, leave = ComputePermit(2), threading.Event(), threading.Event()

    def stick() -> None:
        with permit.ticket().held(2, at_most_s=0.05):
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=stick)
    thread.start()
    assert entered.wait(10)
    with permit.ticket().held(2, at_most_s=1) as granted:
        assert granted
    leave.set()
    thread.join(10)
    assert permit.n_free == 2
