"""Leaving early: in every phase, in every way, and what it must not do to others."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from erllama.backend import StepResult, StepStatus
from erllama.errors import DecodeAborted, EngineError, EngineReset, SeqCapacity
from erllama.testing import FakeBackend, cancel_at_every_checkpoint
from erllama.types import Done, TokenId

from .scenes import alone, ids_of, last, serving

LONG = "p" * 400  # four steps of prefill


@pytest.mark.parametrize("mode", ["stream", "complete"])
@pytest.mark.parametrize(
    ("phase", "after_s"), [("queued", 0.5), ("prefill", 1.5), ("decode", 6.5), ("finished", 20.0)]
)
async def test_the_slot_is_free_after_the_running_step(autojump_clock, phase: str, after_s: float, mode: str):
    """Queued, prefill, decode, flushing; read or not: a step after the client left nothing of it is there."""
    async with serving(FakeBackend(step_delay_s=1.0)) as bench, AsyncExitStack() as stack:
        if phase == "queued":
            await stack.enter_async_context(bench.stream("in front", max_tokens=5000))
        with trio.move_on_after(after_s):
            async with bench.stream(LONG, max_tokens=10) as events:
                if mode == "complete":
                    await last(events)
                await trio.sleep_forever()
        if phase == "finished":
            assert bench.actor.sequences() == []
        elif phase != "queued":
            assert bench.actor.sequences()[-1].phase.value == phase
        if phase == "queued":  # nothing of it is in the running step: it is gone at once
            assert len(bench.backend.live_samplers) == len(bench.actor.sequences()) == 1
        await trio.sleep(1.1)
        assert len(bench.backend.live_samplers) == len(bench.actor.sequences()) == (phase == "queued")
        await stack.aclose()
        await trio.sleep(1.1)
        await bench.wait_idle()


@pytest.mark.parametrize("when", ["queued", "running", "between", "finished"])
async def test_cancel_is_idempotent_and_ends_with_done(when: str):
    """G7: cancel twice, at any time: one Done, reason cancelled unless it was over already."""
    async with serving() as bench, bench.stream("p", max_tokens=5) as events:
        if when == "running":
            await trio.testing.wait_all_tasks_blocked()
        if when == "between":
            await anext(events)
        if when == "finished":
            answer = await last(events)
        events.cancel()
        events.cancel()
        if when != "finished":
            answer = await last(events)
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        events.cancel()
        assert answer.finish_reason == ("cancelled" if when in ("queued", "between") else "length")
        await bench.wait_idle()


async def test_a_cancelled_answer_reports_what_there_was(autojump_clock):
    """The Done of a cancelled stream holds the ids and text delivered so far, held-back text included."""
    backend = FakeBackend(step_delay_s=1.0)
    async with serving(backend) as bench, bench.stream("p", seed=1, max_tokens=50) as events:
        ids = []
        async for event in events:
            if isinstance(event, TokenId):
                ids.append(event.id)
                if len(ids) == 5:
                    events.cancel()
            if isinstance(event, Done):
                answer = event.completion
    (solo,) = await alone(["p"], seed=1, max_tokens=50)
    assert answer.generated == ids == solo.generated[:5], "the step that ran on delivers nothing more"
    assert answer.reply == bytes(ids).decode()
    assert (answer.finish_reason, answer.stop_sequence) == ("cancelled", None)


async def test_leaving_the_block_delivers_nothing_more():
    """A stream left early yields no Done to whoever still holds it, and its slot is free."""
    async with serving() as bench:
        async with bench.stream("p", max_tokens=5000) as events:
            await anext(events)
        await bench.wait_idle()


async def test_the_neighbour_in_prefill_is_unchanged(autojump_clock):
    """R2: one of two prefilling requests leaves; the other's ids are those it gets alone."""
    async with serving(FakeBackend(n_slots=2, step_delay_s=1.0)) as bench, trio.open_nursery() as nursery:
        answers = []

        async def other() -> None:
            answers.append(await bench.complete("n" * 500, seed=2, max_tokens=9))

        nursery.start_soon(other)
        async with bench.stream("c" * 500) as events:
            await trio.sleep(1.5)
            assert [s.phase.value for s in bench.actor.sequences()] == ["prefill", "prefill"]
            events.cancel()
            events.cancel()
            assert (await last(events)).finish_reason == "cancelled"
    assert ids_of(answers) == ids_of(await alone(["n" * 500], seed=2, max_tokens=9))


async def test_a_slot_given_up_is_used_by_the_next_with_a_clean_memory():
    """Cancel in the middle of a prefill, then ask something else on the same slot."""
    async with serving() as bench:
        with trio.move_on_after(0):
            await bench.complete(LONG)
        async with bench.stream(LONG) as events:
            await trio.testing.wait_all_tasks_blocked()
            events.cancel()
        answer = await bench.complete("fresh", seed=1)
    assert ids_of([answer]) == ids_of(await alone(["fresh"], seed=1))


@pytest.mark.parametrize("mode", ["complete", "stream"])
async def test_cancelled_at_every_checkpoint(autojump_clock, mode: str):
    """Whatever the checkpoint a client is cancelled at, no slot, sampler or sequence stays."""
    async with serving(FakeBackend(n_slots=2)) as bench:

        async def attempt() -> None:
            if mode == "complete":
                await bench.complete(LONG, max_tokens=9)
            else:
                async with bench.stream(LONG, max_tokens=9) as events:
                    async for _ in events:
                        await trio.lowlevel.checkpoint()

        n = await cancel_at_every_checkpoint(attempt, bench.wait_idle)
        assert n > 8
        assert ids_of([await bench.complete("after", seed=1)]) == ids_of(await alone(["after"], seed=1))


async def test_ten_thousand_streams_opened_and_left():
    """Nothing is left: no sampler, no slot, no task, and the next answer is right."""
    async with serving(FakeBackend(n_slots=4)) as bench:
        task = trio.lowlevel.current_task()
        n_tasks = len(task.parent_nursery.child_tasks)
        for i in range(10_000):
            async with bench.stream([1, 2, 3]) as events:
                if i % 4 == 1:
                    await anext(events)
                elif i % 4 == 2:
                    events.cancel()
                elif i % 4 == 3:
                    await trio.lowlevel.checkpoint()
        await bench.wait_idle()
        assert len(task.parent_nursery.child_tasks) == n_tasks
        assert len(bench.backend.memory) <= 4
        assert (await bench.complete("still here", max_tokens=2)).stats.n_generated == 2


async def test_streams_piled_up_without_a_checkpoint_are_all_swept():
    """A client that opens and leaves a thousand streams in one go leaves an empty queue."""
    async with serving() as bench:
        for _ in range(1000):
            async with bench.stream([1]):
                pass
        await bench.wait_idle()
        assert bench.actor.statistics().n_steps == 0


# --- the abort flag, with real threads ---


class Stuck:
    """A `before_step` that blocks the model's thread until told to go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, _: object) -> StepResult | None:
        self.entered.set()
        assert self.leave.wait(120)
        return None

    async def wait_entered(self) -> None:
        """Until the model's thread is inside the step."""
        assert await trio.to_thread.run_sync(self.entered.wait, 60)


class Aborts(FakeBackend):
    """Counts calls of `abort`."""

    n_aborts = 0

    def abort(self) -> None:
        self.n_aborts += 1
        super().abort()


async def test_the_only_request_of_a_step_ends_it_early():
    """R2: a step of a minute ends at once when everybody in it has left."""
    backend = Aborts(threaded=True, step_delay_s=60.0)
    entered = threading.Event()
    backend.before_step = lambda _: entered.set()
    async with serving(backend) as bench:
        async with bench.stream("p") as events:
            assert await trio.to_thread.run_sync(entered.wait, 60)
            await trio.sleep(0.02)
            with trio.fail_after(20):
                events.cancel()
                assert (await last(events)).finish_reason == "cancelled"
        backend.step_delay_s = 0.0
        assert bench.actor.statistics().n_aborted_steps == 1
        assert bench.actor.statistics().n_rebuilt == 0
        assert ids_of([await bench.complete("q", seed=1)]) == ids_of(await alone(["q"], seed=1))
        await bench.wait_idle()


async def test_the_flag_is_raised_only_when_the_last_one_left():
    """R2: with two in the step the first to leave raises nothing, the second raises it once."""
    stuck = Stuck()
    backend = Aborts(threaded=True, n_slots=2, before_step=stuck)
    async with serving(backend) as bench, bench.stream("a" * 300) as a, bench.stream("b" * 300) as b:
        await stuck.wait_entered()
        assert bench.rows_per_step == [2]
        a.cancel()
        a.cancel()
        assert backend.n_aborts == 0
        for events in (b, b, a):
            events.cancel()
            assert backend.n_aborts == 1
        stuck.leave.set()
        assert (await last(a)).finish_reason == (await last(b)).finish_reason == "cancelled"
        await bench.wait_idle()


async def test_who_waits_in_the_queue_aborts_nobody():
    """A queued request that leaves does not touch the running step."""
    stuck = Stuck()
    backend = Aborts(threaded=True, before_step=stuck)
    async with serving(backend) as bench, bench.stream("runs", max_tokens=3) as running:
        await stuck.wait_entered()
        async with bench.stream("waits") as waiting:
            waiting.cancel()
        assert backend.n_aborts == 0
        stuck.leave.set()
        assert (await last(running)).finish_reason == "length"
        await bench.wait_idle()


async def test_reset_reaches_a_reader_while_the_step_is_stuck():
    """R9: a session's reader gets EngineReset at once, although its step does not end."""
    stuck = Stuck()
    async with serving(FakeBackend(threaded=True, before_step=stuck)) as bench:
        async with bench.stream("p", session_id="s") as events, bench.stream("q", session_id="t") as other:
            await stuck.wait_entered()
            assert [s.request for s in bench.actor.reset_session("s")] == [events.request]
            assert bench.actor.reset_session("s") == []
            with trio.fail_after(60), pytest.raises(EngineReset, match="'s'"):
                await anext(events)
            stuck.leave.set()
            assert (await last(other)).finish_reason == "length"
        await bench.wait_idle()


async def test_a_reset_stream_ends_with_the_reset_even_if_its_reader_is_late():
    """Events delivered before the reset come first, then EngineReset: never a Done."""
    async with serving() as bench, bench.stream("p", session_id=1, max_tokens=500) as events:
        await trio.testing.wait_all_tasks_blocked()
        bench.actor.reset_session(1)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(EngineReset):
            await last(events)
        await bench.wait_idle()


# --- capacity ---


async def test_on_full_error_answers_at_once():
    """G18: with every slot busy, or somebody waiting, `on_full="error"` raises and leaves nothing."""
    async with serving() as bench, bench.stream("busy", max_tokens=5000):
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            with pytest.raises(SeqCapacity, match="all 1 sequences of 'fake' are busy"):
                await bench.complete("p", on_full="error")
        assert len(bench.backend.live_samplers) == 1
        assert len(bench.actor.sequences()) == 1
        async with bench.stream("waits", on_full="block"):
            assert bench.actor.statistics().n_waiting == 1


async def test_on_full_error_counts_cells_too():
    """A free slot without cells for the prompt is no capacity."""
    backend = FakeBackend(n_slots=2, n_cells=200)
    async with serving(backend) as bench, bench.stream("b" * 150, max_tokens=5000, buffer_events=8):
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SeqCapacity):
            await bench.complete("p" * 100, on_full="error")
        assert (await bench.complete("p", on_full="error", max_tokens=1)).finish_reason == "length"
        async with bench.stream("p" * 100):
            with pytest.raises(SeqCapacity):  # who would fit does not overtake who waits
                await bench.complete("p", on_full="error", max_tokens=1)


# --- what a review found ---


async def test_error_mode_counts_who_waits_and_not_whether_somebody_does():
    """G18: four requests at once on four idle slots are all taken; the fifth is refused."""
    async with serving(FakeBackend(n_slots=4)) as bench, AsyncExitStack() as stack:
        for i in range(4):
            await stack.enter_async_context(bench.stream(f"{i}", max_tokens=50, on_full="error"))
        with pytest.raises(SeqCapacity):
            await stack.enter_async_context(bench.stream("five", on_full="error"))


async def test_a_queued_request_ends_while_a_step_is_stuck():
    """R9: its Done does not wait for a step it has no part in."""
    backend = FakeBackend(threaded=True, step_delay_s=30)
    async with serving(backend) as bench, bench.stream("stuck", max_tokens=5) as stuck:
        await trio.testing.wait_all_tasks_blocked()
        async with bench.stream("queued") as queued:
            queued.cancel()
            with trio.fail_after(20):
                assert (await last(queued)).finish_reason == "cancelled"
        assert len(backend.live_samplers) == 1
        stuck.cancel()
        with trio.fail_after(20):
            assert (await last(stuck)).finish_reason == "cancelled"


async def test_a_cancelled_request_is_cancelled_whatever_its_step_became():
    """`events.cancel()` followed by a fatal step still ends with Done, reason cancelled."""
    async with serving(FakeBackend()) as bench, bench.stream("p", max_tokens=50) as events:
        await anext(events)

        def fatal(_step: object) -> StepResult:
            events.cancel()
            return StepResult(status=StepStatus.FATAL, rc=-3)

        bench.backend.before_step = fatal
        answer = await last(events)
        bench.backend.before_step = None
    assert answer.finish_reason == "cancelled"


async def test_nothing_is_delivered_to_a_stream_that_was_left():
    """Whoever still holds the stream after its block gets the end, not events."""
    async with serving(FakeBackend()) as bench:
        async with bench.stream("p", max_tokens=5) as events:
            await trio.testing.wait_all_tasks_blocked()
        assert [event async for event in events] == []


async def test_a_backend_whose_abort_raises_is_contained(caplog: pytest.LogCaptureFixture):
    """Its bug is logged; the one who cancelled does not get it."""

    class Touchy(FakeBackend):
        def abort(self) -> None:
            raise RuntimeError("no abort today")

    async with serving(Touchy(threaded=True, step_delay_s=0.05)) as bench:
        async with bench.stream("p", max_tokens=50):
            await trio.testing.wait_all_tasks_blocked()
        assert (await bench.complete("after", max_tokens=1)).generated
        await bench.wait_idle()
    assert "no abort today" in caplog.text


async def test_aborts_that_nobody_asked_for_are_not_retried_for_ever():
    """B16: three in a row, and the caller gets DecodeAborted from a fresh context."""
    async with serving(FakeBackend()) as bench:
        bench.backend.before_step = lambda _: StepResult(status=StepStatus.ABORTED, rc=2)
        with pytest.raises(DecodeAborted):
            await bench.complete("p", max_tokens=3)
        bench.backend.before_step = None
        assert (await bench.complete("p", max_tokens=3)).finish_reason == "length"
        assert bench.backend.n_rebuilt == 1


async def test_no_room_for_a_lone_prompt_is_our_error():
    """Refused twice on empty memory, a prompt that fits by every count fails as `no_room`, logged."""
    async with serving(FakeBackend()) as bench:
        bench.backend.before_step = lambda _: StepResult(status=StepStatus.NO_ROOM, rc=1)
        with pytest.raises(EngineError) as caught:
            await bench.complete("p" * 10, max_tokens=3)
        assert caught.value.reason == "no_room"


async def test_one_refusal_of_a_lone_sequence_costs_time_only():
    """A transient refusal is computed again and does not shorten the answer."""
    async with serving(FakeBackend()) as bench:
        reference = await bench.complete("p", max_tokens=50, seed=1)
        n_steps = 0

        def refuse_once(_step: object) -> StepResult | None:
            nonlocal n_steps
            n_steps += 1
            return StepResult(status=StepStatus.NO_ROOM, rc=1) if n_steps == 5 else None

        bench.backend.before_step = refuse_once
        answer = await bench.complete("p", max_tokens=50, seed=1)
    assert answer.generated == reference.generated
