"""Steps that follow each other without the event loop: the same answers, and whatever happens is heeded.

A prompt of one token has no prefill: step k gives the token k, and steps may follow each other from the
second on. What happens while the thread runs ahead is forced into its order by a `Gate`.
"""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from erllama.backend import MemoryKind, Row, Sampled, Step, StepResult, StepStatus
from erllama.engine import actor as actor_module
from erllama.engine.burst import MOST_STEPS, Burst
from erllama.engine.runner import ThreadRunner
from erllama.engine.stream import EventBuffer
from erllama.errors import DecodeFailed, DecodeTimeout, EngineError, EngineReset, NoLogits, NotLoaded
from erllama.testing import FakeBackend, FakeEmbedder
from erllama.types import Done, EmbeddingFacts, TokenId

from .scenes import Bench, alone, ids_of, last, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from erllama.engine.request import EventStream
    from erllama.types import Completion

KINDS = [MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.RECURRENT, MemoryKind.HYBRID]
AT = 6  # the step that something happens in
MOMENTS = ["during", "decided", "begun", "applied"]


class Gate(FakeBackend):
    """Its thread stands before each step from `AT` on until it is let through.

    Also, on request, where it has decided to let a step be followed.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(threaded=True, **options)
        self.before_step = self._enter
        self._changed = threading.Condition()
        self._n_entered = 0
        self._n_allowed: float = AT - 1
        self.deciding, self.decide = threading.Event(), threading.Event()
        self.decide.set()

    def _enter(self, _: Step) -> None:
        with self._changed:
            self._n_entered += 1
            n = self._n_entered
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: n <= self._n_allowed, 10)

    def let(self, n: float) -> None:
        """Let steps up to the n-th run."""
        with self._changed:
            self._n_allowed = n
            self._changed.notify_all()

    def open_up(self) -> None:
        """Everything may run."""
        self.decide.set()
        self.let(float("inf"))

    def wait_entered(self, n: int) -> None:
        """Block this thread until the n-th step was begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._n_entered >= n, 10)

    def is_eog(self, token: int) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.deciding.set()
            assert self.decide.wait(10)
        return super().is_eog(token)

    async def reach(self, moment: str) -> None:
        """Let the thread run up to a moment of step `AT`, or the one behind it."""
        await trio.to_thread.run_sync(self.wait_entered, AT)
        await trio.testing.wait_all_tasks_blocked()
        if moment == "decided":
            self.decide.clear()
            self.deciding.clear()
            self.let(AT)
            assert self.deciding.wait(10)
        elif moment == "begun":
            self.let(AT)
            self.wait_entered(AT + 1)  # the event loop stands still: nothing is applied
        elif moment == "applied":
            self.let(AT)
            await trio.to_thread.run_sync(self.wait_entered, AT + 1)
            await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of all calls that were handed to a model's thread."""
    names: list[str] = []
    run = ThreadRunner.run

    async def counted(self: ThreadRunner, fn: Callable[..., object], *args: object, **more: object) -> object:
        names.append(fn.__qualname__)
        return await run(self, fn, *args, **more)

    monkeypatch.setattr(ThreadRunner, "run", counted)
    return names


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is followed from now on."""
    monkeypatch.setattr(actor_module, "n_steps", lambda *_: 1)


def n_expected(moment: str) -> int:
    """Steps that run: nothing begins once something has happened."""
    return AT if moment == "during" else AT + 1


async def read_ids(events: EventStream, into: list[int], every_s: float = 0.0) -> Completion:
    """The answer; adds the ids of all tokens that are delivered; `every_s`: sleep so long after each 50th."""
    async for event in events:
        if isinstance(event, TokenId):
            into.append(event.id)
            if every_s and len(into) % 50 == 0:
                await trio.sleep(every_s)
        elif isinstance(event, Done):
            answer = event.completion
    return answer


# --- what it is for ---


@pytest.mark.parametrize("n", [1, 3])
async def test_the_thread_is_crossed_once_in_many_steps(hops: list[str], n: int):
    """The first steps of each, then a crossing per burst; counters count every step."""
    async with serving(FakeBackend(threaded=True, n_slots=n)) as bench:
        hops.clear()
        await bench.complete_all(["p"] * n, max_tokens=MOST_STEPS * 3, seed=1)
        n_hops, s = len(hops), bench.actor.statistics()
    assert s.n_steps == len(bench.backend.steps)
    assert s.n_decode_rows == sum(
        row.sampler is not None for step in bench.backend.steps for row in step.rows
    )
    assert s.n_decode_rows == n * MOST_STEPS * 3
    assert n_hops < s.n_steps / 6
    assert [row.pos for row in bench.backend.steps[-1].rows] == [MOST_STEPS * 3 - 1] * n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
async def test_answers_and_events_are_the_same(monkeypatch: pytest.MonkeyPatch, kind: MemoryKind, n: int):
    """On every kind of memory, of one sequence and of several with different lengths."""

    async def told() -> list[list[object]]:
        backend = FakeBackend(threaded=True, n_slots=n, memory_kind=kind)
        found: list[list[object]] = [[] for _ in range(n)]

        async def read(bench: Bench, i: int) -> None:
            async with bench.stream(f"prompt {i}", max_tokens=20 + 7 * i, seed=i, logprobs=2) as events:
                found[i] = [
                    (type(e).__name__, getattr(e, "id", getattr(e, "text", None))) async for e in events
                ]

        async with serving(backend) as bench, trio.open_nursery() as nursery:
            for i in range(n):
                nursery.start_soon(read, bench, i)
        assert max(map(len, found)) > 40
        return found

    ahead = await told()
    one_by_one(monkeypatch)
    assert ahead == await told()


async def test_nothing_is_computed_behind_the_end():
    """Neither behind an end-of-generation token nor beyond max_tokens."""
    async with serving(FakeBackend(threaded=True, script=lambda _: b"hello, world")) as bench:
        answer = await bench.complete("p")
        assert (answer.reply, answer.finish_reason) == ("hello, world", "stop")
        assert len(bench.backend.steps) == 13  # the last one gives the end
        assert (await bench.complete("p", max_tokens=7)).finish_reason == "length"
        assert len(bench.backend.steps) == 13 + 7


@pytest.mark.parametrize("option", [{"stop": ("nowhere",)}, {"exact": "cold"}], ids=str)
async def test_what_must_be_looked_at_after_each_step_is(hops: list[str], option: dict[str, object]):
    """Stop strings are found by the event loop; exact="cold" is computed step by step."""
    async with serving(FakeBackend(threaded=True)) as bench:
        await bench.complete("p", max_tokens=20, **option)
        assert len([name for name in hops if "with_ops" in name]) >= bench.actor.statistics().n_steps >= 20


async def test_nobody_runs_ahead_while_somebody_waits(hops: list[str]):
    """With a full model every step asks the event loop, as who waits may be let in."""
    async with (
        serving(FakeBackend(threaded=True, n_slots=1)) as bench,
        bench.stream("first", max_tokens=30, seed=1) as a,
        bench.stream("b", max_tokens=1) as b,
    ):
        hops.clear()
        await last(a)
        assert len(hops) >= 30
        await last(b)


# --- what happens meanwhile ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_cancelled(moment: str, kind: MemoryKind):
    """The running step is the last; what it began with is part of the answer, and memory is clean."""
    solo = (await alone(["p"], seed=1, max_tokens=50))[0].generated
    async with serving(Gate(memory_kind=kind)) as bench, bench.stream("p", seed=1, max_tokens=50) as events:
        gate = bench.backend
        await gate.reach(moment)
        events.cancel()
        gate.open_up()
        ids: list[int] = []
        answer = await read_ids(events, ids)
        assert answer.finish_reason == "cancelled"
        assert answer.generated == ids == solo[: n_expected(moment) - 1]  # the running step's is not taken
        assert len(gate.steps) == n_expected(moment)
        assert bench.actor.statistics().n_steps == len(gate.steps)
        assert ids_of([await bench.complete("q", seed=2)]) == ids_of(await alone(["q"], seed=2))
        again = await bench.complete([*b"p", *answer.generated], seed=1, max_tokens=9)
        assert again.generated == (await alone_ids([*b"p", *answer.generated], seed=1, max_tokens=9))
        await bench.wait_idle()


async def alone_ids(prompt: list[int], **generation: object) -> list[int]:
    """What a model that has nothing else to do generates."""
    async with serving() as bench:
        return (await bench.complete(prompt, **generation)).generated


@pytest.mark.parametrize("moment", MOMENTS)
async def test_left(moment: str):
    """Leaving the block: the slot is free when the running step has ended."""
    async with serving(Gate()) as bench:
        async with bench.stream("p", seed=1, max_tokens=50):
            await bench.backend.reach(moment)
        (seq,) = bench.actor.sequences()
        bench.backend.open_up()
        await seq.ended.wait()
        assert len(bench.backend.steps) == n_expected(moment)
        await bench.wait_idle()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_one_of_two_is_cancelled(moment: str):
    """The other one's answer is what it is alone, and nobody was aborted."""
    async with serving(Gate(n_slots=2)) as bench:
        async with (
            bench.stream("a", seed=1, max_tokens=50) as a,
            bench.stream("b", seed=2, max_tokens=50) as b,
        ):
            await bench.backend.reach(moment)
            a.cancel()
            bench.backend.open_up()
            assert (await last(a)).finish_reason == "cancelled"
            answer = await last(b)
        assert bench.actor.statistics().n_aborted_steps == 0
        assert [len(step.rows) for step in bench.backend.steps[: n_expected(moment)]][-1] == 2
        assert len(bench.backend.steps[n_expected(moment)].rows) == 1
    assert ids_of([answer]) == ids_of(await alone(["b"], seed=2, max_tokens=50))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_somebody_arrives(moment: str, kind: MemoryKind):
    """It is in the step behind the running one, and both answers are what they are alone."""
    async with serving(Gate(n_slots=2, memory_kind=kind)) as bench, AsyncExitStack() as stack:
        a = await stack.enter_async_context(bench.stream("first", seed=1, max_tokens=50))
        await bench.backend.reach(moment)
        b = await stack.enter_async_context(bench.stream("second", seed=2, max_tokens=50))
        bench.backend.open_up()
        answers = [await last(a), await last(b)]
        steps = bench.backend.steps
        assert {len(step.rows) for step in steps[: n_expected(moment)]} == {1}
        assert len(steps[n_expected(moment)].rows) == 2
    assert ids_of(answers) == [
        *ids_of(await alone(["first"], seed=1, max_tokens=50)),
        *ids_of(await alone(["second"], seed=2, max_tokens=50)),
    ]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_its_session_is_reset(moment: str):
    """The reader gets `EngineReset`, the slot is free after the running step."""
    async with serving(Gate()) as bench, bench.stream("p", session_id="s", max_tokens=50) as events:
        await bench.backend.reach(moment)
        (seq,) = bench.actor.reset_session("s")
        bench.backend.open_up()
        with pytest.raises(EngineReset):
            await last(events)
        await seq.ended.wait()
        assert len(bench.backend.steps) == n_expected(moment)
        assert ids_of([await bench.complete("q", seed=2)]) == ids_of(await alone(["q"], seed=2))
        await bench.wait_idle()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_model_is_unloaded(moment: str):
    """The client gets `NotLoaded`, the thread ends, no step begins any more."""
    async with serving(Gate()) as bench, bench.stream("p", max_tokens=50) as events:
        await bench.backend.reach(moment)
        bench.handle.stop()
        await trio.lowlevel.checkpoint()
        bench.backend.open_up()
        with pytest.raises(NotLoaded):
            await last(events)
        await bench.handle.closed.wait()
        assert len(bench.backend.steps) == n_expected(moment)
        assert not bench.backend.is_open


@pytest.mark.parametrize("moment", MOMENTS)
async def test_another_call_wants_the_thread(moment: str):
    """A save, a restore: it waits for the running step, not for the whole burst."""
    n_steps = []

    class Asked(Gate):
        def is_at(self, slot: int, n: int) -> bool:
            n_steps.append(len(self.steps))
            return super().is_at(slot, n)

    async with serving(Asked()) as bench, bench.stream("p", seed=1, max_tokens=50) as events:
        await bench.backend.reach(moment)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.actor._thread.is_at, 0, 1)
            await trio.testing.wait_all_tasks_blocked()
            bench.backend.open_up()
        assert n_steps == [n_expected(moment)]
        answer = await last(events)
    assert ids_of([answer]) == ids_of(await alone(["p"], seed=1, max_tokens=50))


# --- what goes wrong ---


@pytest.mark.parametrize("status", [StepStatus.NO_ROOM, StepStatus.ABORTED])
async def test_a_step_of_a_burst_is_refused_or_aborted(status: StepStatus):
    """Nothing of the answer is lost or doubled."""
    backend = FakeBackend(threaded=True)
    backend.before_step = lambda _: StepResult(status=status, rc=1) if len(backend.steps) == AT else None
    async with serving(backend) as bench:
        answer = await bench.complete("p", seed=1, max_tokens=50)
    assert ids_of([answer]) == ids_of(await alone(["p"], seed=1, max_tokens=50))
    assert backend.n_rebuilt == 0


@pytest.mark.parametrize(
    ("status", "error"), [(StepStatus.FATAL, DecodeFailed), (StepStatus.TIMEOUT, DecodeTimeout)]
)
async def test_a_step_of_a_burst_fails(status: StepStatus, error: type[Exception]):
    """What came before it was delivered; the context is made anew."""
    backend = FakeBackend(threaded=True)
    backend.before_step = lambda _: StepResult(status=status, rc=-3) if len(backend.steps) == AT else None
    async with serving(backend) as bench:
        ids: list[int] = []
        async with bench.stream("p", seed=1, max_tokens=50) as events:
            with pytest.raises(error):
                await read_ids(events, ids)
        assert ids == (await alone(["p"], seed=1, max_tokens=50))[0].generated[: AT - 1]
        assert (await bench.complete("p", seed=1, max_tokens=3)).generated == ids[:3]
    assert backend.n_rebuilt == 1


async def test_a_row_without_a_token_ends_its_sequence_alone():
    """An error of one row: nothing follows, its neighbour goes on."""

    class Picky(FakeBackend):
        def step(self, step: Step) -> StepResult:
            result = super().step(step)
            if len(self.steps) == AT:
                return StepResult(status=StepStatus.OK, sampled=(NoLogits("none"), *result.sampled[1:]))
            return result

    async with (
        serving(Picky(threaded=True, n_slots=2)) as bench,
        bench.stream("a", seed=1, max_tokens=50) as a,
        bench.stream("b", seed=2, max_tokens=50) as b,
    ):
        with pytest.raises(NoLogits):
            await last(a)
        answer = await last(b)
    assert ids_of([answer]) == ids_of(await alone(["b"], seed=2, max_tokens=50))


async def test_a_backend_that_raises_while_a_result_is_applied():
    """It ends the engine with its own error, as anywhere else, and not trio."""

    class Broken(FakeBackend):
        def piece(self, token: int) -> bytes:
            if len(self.steps) > AT:
                raise RuntimeError("no piece today")
            return super().piece(token)

    async def ask() -> None:
        async with serving(Broken(threaded=True)) as bench, bench.stream("p", max_tokens=50) as events:
            with pytest.raises(EngineError, match="no piece today"), trio.CancelScope(shield=True):
                await last(events)

    with pytest.raises(ExceptionGroup) as caught:
        await ask()
    assert caught.group_contains(RuntimeError, match="no piece today")


# --- limits ---


@pytest.mark.parametrize("buffer_events", [8, 20, 256])
async def test_no_buffer_overflows(monkeypatch: pytest.MonkeyPatch, buffer_events: int):
    """However slowly it is read."""
    most, put = 0, EventBuffer.put_nowait

    def watched(self: EventBuffer, *events: object) -> None:
        nonlocal most
        put(self, *events)
        most = max(most, len(self))

    monkeypatch.setattr(EventBuffer, "put_nowait", watched)
    ids: list[int] = []
    async with (
        serving(FakeBackend(threaded=True)) as bench,
        bench.stream("p", buffer_events=buffer_events, seed=1, max_tokens=300) as events,
    ):
        await read_ids(events, ids, every_s=0.02)
    assert 0 < most <= buffer_events
    assert [ids] == ids_of(await alone(["p"], seed=1, max_tokens=300))


async def test_a_cache_that_becomes_full():
    """Who needs more cells than there are gets them one after the other, with the same answers."""
    async with serving(FakeBackend(threaded=True, n_slots=3, n_ctx=128)) as bench:
        answers = await bench.complete_all(["a", "b", "c"], seed=1, max_tokens=60)
        assert bench.actor.statistics().n_preempted
        assert bench.actor.statistics().n_refused_steps == 0
    assert ids_of(answers) == ids_of(await alone(["a", "b", "c"], seed=1, max_tokens=60))


def test_a_burst_ends_where_it_was_told_to():
    """After its steps, at an end of generation, at an error, and when it was stopped."""
    step = Step((Row(0, 5, [1], None), Row(3, 9, [2], None)), 1.5)

    def result(*tokens: int) -> StepResult:
        return StepResult(status=StepStatus.OK, sampled=tuple(Sampled(token=t) for t in tokens))

    def burst(n: int) -> Burst:
        return Burst(n, lambda token: token == 99, lambda _: None)

    assert burst(2).following(step, result(7, 8)) == Step((Row(0, 6, [7], None), Row(3, 10, [8], None)), 1.5)
    assert burst(1).following(step, result(7, 8)) is None
    assert burst(2).following(step, result(7, 99)) is None
    assert burst(2).following(step, StepResult(status=StepStatus.ABORTED)) is None
    assert (
        burst(2).following(step, StepResult(status=StepStatus.OK, sampled=(Sampled(token=1), None))) is None
    )
    stopped = burst(2)
    stopped.stop()
    assert stopped.following(step, result(7, 8)) is None


async def test_an_embedding_waits_for_no_more_than_the_running_step():
    """Whoever embeds comes between two steps of those who generate."""
    facts = EmbeddingFacts(n_embd=8, pooling="mean", n_ctx=200, n_rows=64, n_lanes=1, whole=False)
    backend = Gate(n_slots=2, embedder=FakeEmbedder(facts))
    n_before: list[int] = []  # steps before the call
    backend.embedder.before_call = lambda _: n_before.append(len(backend.steps))
    async with serving(backend) as bench, bench.stream([7], max_tokens=200):
        await backend.reach("during")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.handle.embedder.embed, [[1, 2]])
            await trio.testing.wait_all_tasks_blocked()
            backend.open_up()
    assert n_before == [AT]
