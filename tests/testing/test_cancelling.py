"""The helper that cancels everywhere, on code whose checkpoints are known."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from erllama.testing import CheckpointLimit, cancel_at_every_checkpoint


async def test_every_checkpoint_is_cancelled_once_and_then_none():
    """Three checkpoints: cancelled at each of them, then a run to the end; a check after every run."""
    reached: list[int] = []
    n_checks = 0

    async def attempt() -> None:
        for i in range(3):
            await trio.lowlevel.checkpoint()
            reached.append(i)
        reached.append(99)

    async def check() -> None:
        nonlocal n_checks
        n_checks += 1

    n_runs = await cancel_at_every_checkpoint(attempt, check)
    assert n_runs == n_checks
    runs = "".join(map(str, reached)).replace("99", ".")
    assert runs.endswith("012.")
    assert runs.replace("012.", "").replace("01", "").replace("0", "") == ""
    assert runs.startswith("0" + "01"), "one run was cut after its first checkpoint, one after its second"


async def test_blocking_code_is_cancelled_while_it_waits():
    """A sleep is ended in the middle, not only before it begins."""
    slept: list[str] = []

    async def attempt() -> None:
        try:
            await trio.sleep(0.001)
            slept.append("whole")
        except trio.Cancelled:
            slept.append("cancelled")
            raise

    async def check() -> None:
        await trio.lowlevel.checkpoint()

    await cancel_at_every_checkpoint(attempt, check)
    assert slept[0] == "cancelled"
    assert slept[-1] == "whole"


async def test_a_failing_check_stops_it():
    """What is left behind after the second cancellation is reported by the check."""
    n = 0

    async def attempt() -> None:
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def check() -> None:
        nonlocal n
        n += 1
        assert n < 2, "left behind"

    with pytest.raises(AssertionError, match="left behind"):
        await cancel_at_every_checkpoint(attempt, check)
    assert n == 2


async def test_code_without_an_end_hits_the_limit():
    """Endless code is an error of the test, not a hang."""

    async def attempt() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async def check() -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(CheckpointLimit, match="5 checkpoints"):
        await cancel_at_every_checkpoint(attempt, check, most=5)


async def test_an_error_of_the_attempt_comes_out():
    """Failures of the code under test are not hidden, and later code is left alone."""

    async def attempt() -> None:
        raise KeyError("mine")

    async def check() -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(KeyError, match="mine"):
        await cancel_at_every_checkpoint(attempt, check)
    with trio.CancelScope() as scope:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
    assert not scope.cancelled_caught
