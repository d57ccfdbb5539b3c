"""Where backend calls run: a real thread, and inline for arithmetic."""

from __future__ import annotations

import threading
import weakref

import pytest
import trio
import trio.testing

from erllama.engine.runner import InlineRunner, ThreadRunner


@pytest.fixture
def runner():
    """A thread runner that is closed, and whose thread is seen to end."""
    name = "erllama test runner"
    made = ThreadRunner(name)
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(5)
            assert not thread.is_alive()


async def test_all_calls_run_on_one_other_thread_in_order(runner: ThreadRunner):
    """Concurrent callers are served by the same thread, first come first served."""
    seen: list[tuple[int, int]] = []
    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(runner.run, lambda i=i: seen.append((i, threading.get_ident())))
            await trio.testing.wait_all_tasks_blocked()
    assert [i for i, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert threading.get_ident() not in {ident for _, ident in seen}


async def test_results_and_arguments_pass(runner: ThreadRunner):
    """`fn(*args)` is what comes back."""
    assert await runner.run(divmod, 17, 5) == (3, 2)


async def test_exceptions_pass_and_the_thread_lives_on(runner: ThreadRunner):
    """What `fn` raises is raised to the caller, and the next call works."""
    with pytest.raises(ZeroDivisionError):
        await runner.run(divmod, 1, 0)
    assert await runner.run(divmod, 4, 2) == (2, 0)


async def test_cancellation_waits_for_the_call_and_tells_it_once(runner: ThreadRunner):
    """A cancelled caller calls `on_cancel` once and returns only when the call has ended."""
    started, leave = threading.Event(), threading.Event()
    told: list[int] = []

    def call() -> None:
        started.set()
        assert leave.wait(10)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runner.run(call, on_cancel=lambda: told.append(1)))
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert told == [1]
                assert len(nursery.child_tasks) == 1
                leave.set()
    assert scope.cancelled_caught
    assert told == [1]


async def test_a_cancelled_call_that_raises_raises(runner: ThreadRunner):
    """An error of the call is not swallowed by the cancellation."""
    leave = threading.Event()

    def call() -> None:
        assert leave.wait(10)
        raise KeyError("native")

    with trio.CancelScope() as scope:
        # The scope is cancelled while the call runs, and that lets the call end.
        trio.lowlevel.current_trio_token().run_sync_soon(scope.cancel)
        with pytest.raises(KeyError, match="native"):
            await runner.run(call, on_cancel=leave.set)


async def test_a_caller_already_cancelled_starts_nothing(runner: ThreadRunner):
    """No call begins on behalf of somebody who has left."""
    called: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await runner.run(called.append, 1)
    assert scope.cancelled_caught
    await runner.run(called.append, 2)
    assert called == [2]


async def test_arguments_do_not_live_until_the_next_call(runner: ThreadRunner):
    """The thread drops a call's arguments with the call, not when the next one comes."""

    class Big:
        pass

    big = Big()
    dropped = threading.Event()
    weakref.finalize(big, dropped.set)
    await runner.run(id, big)
    del big
    assert await trio.to_thread.run_sync(dropped.wait, 5)


def test_close_ends_the_thread_and_is_idempotent():
    """Closing twice is harmless; the thread ends."""
    runner = ThreadRunner("erllama closing")
    (thread,) = [t for t in threading.enumerate() if t.name == "erllama closing"]
    runner.close()
    runner.close()
    thread.join(5)
    assert not thread.is_alive()


async def test_inline_calls_take_mock_time_and_stay_in_the_thread(autojump_clock):
    """The delay passes on trio's clock before the call; the call runs in the caller's thread."""
    idents: list[int] = []
    before = trio.current_time()
    runner = InlineRunner(lambda: 2.5)
    await runner.run(lambda: idents.append(threading.get_ident()))
    runner.close()
    assert idents == [threading.get_ident()]
    assert trio.current_time() - before == pytest.approx(2.5)


async def test_an_inline_call_begun_is_not_abandoned(autojump_clock):
    """Like a native call, it ends although its caller was cancelled meanwhile."""
    done: list[int] = []
    with trio.move_on_after(1):
        await InlineRunner(lambda: 2.0).run(done.append, 1)
    assert done == [1]
    assert trio.current_time() == pytest.approx(2.0)
