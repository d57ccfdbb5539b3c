"""Steps that fail: who gets an error, who goes on, and what is rebuilt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from erllama.backend import Backend, BackendFacts, Sampled, Step, StepResult, StepStatus
from erllama.engine.handle import Handle
from erllama.errors import (
    DecodeFailed,
    DecodeTimeout,
    EngineError,
    InvalidContent,
    NativeError,
    NoLogits,
    NotLoaded,
    NotSupported,
)
from erllama.options import ContextOptions
from erllama.testing import FakeBackend

from .scenes import Bench, alone, ids_of, last, serving

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES: dict[str, tuple[StepResult | Exception, type[EngineError], str]] = {
    "timeout": (StepResult(status=StepStatus.TIMEOUT), DecodeTimeout, "decode_timeout"),
    "fatal": (StepResult(status=StepStatus.FATAL, rc=-3), DecodeFailed, "decode_failed"),
    "exception": (NativeError("vector::_M_range_check"), NativeError, "exception"),
    "oom": (NativeError("std::bad_alloc", reason="oom"), NativeError, "oom"),
}


def fail_at(backend: FakeBackend, at_step: int, outcome: StepResult | Exception) -> None:
    """Make one step end that way."""

    def before(_: Step) -> StepResult | None:
        if len(backend.steps) != at_step:
            return None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    backend.before_step = before


class Outcomes:
    """What concurrent requests got: an answer or an error each."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.got: dict[str, object] = {}

    async def ask(self, name: str, **generation: object) -> None:
        try:
            self.got[name] = (await self.bench.complete(name, **generation)).generated
        except EngineError as error:
            self.got[name] = error


@pytest.mark.parametrize("kind", list(FAILURES))
async def test_who_runs_fails_and_who_waits_goes_on(kind: str):
    """R4: one running and five queued: one typed error, five right answers, one rebuild, still loaded."""
    outcome, error_type, reason = FAILURES[kind]
    backend = FakeBackend()
    fail_at(backend, 3, outcome)
    names = [f"request {i}" for i in range(6)]
    async with serving(backend) as bench:
        outcomes = Outcomes(bench)
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(lambda n=name: outcomes.ask(n, seed=1, max_tokens=8))
        assert (backend.n_opened, backend.n_rebuilt, backend.is_open) == (1, 1, True)
        assert bench.actor.statistics().n_rebuilt == 1
        await bench.wait_idle()
    (failed,) = [name for name in names if isinstance(outcomes.got[name], EngineError)]
    error = outcomes.got[failed]
    assert type(error) is error_type
    assert error.reason == reason
    for name in set(names) - {failed}:
        assert [outcomes.got[name]] == ids_of(await alone([name], seed=1, max_tokens=8))


async def test_everybody_in_the_context_gets_the_reason():
    """All of four co-batched requests fail with the code, each with an exception of its own."""
    backend = FakeBackend(n_slots=4)
    fail_at(backend, 5, StepResult(status=StepStatus.FATAL, rc=-2))
    async with serving(backend) as bench:
        outcomes = Outcomes(bench)
        async with trio.open_nursery() as nursery:
            for name in "abcd":
                nursery.start_soon(outcomes.ask, name)
        await bench.wait_idle()
    errors = list(outcomes.got.values())
    assert [(type(e), e.rc) for e in errors] == [(DecodeFailed, -2)] * 4
    assert len({id(e) for e in errors}) == 4


async def test_a_failed_repair_is_a_rebuild():
    """R3: if cutting after an abort raises, the context is rebuilt and who ran fails."""

    class Uncuttable(FakeBackend):
        def n_kv(self, slot: int) -> int:
            raise NativeError("seq_pos_max")

    backend = Uncuttable()
    fail_at(backend, 2, StepResult(status=StepStatus.ABORTED, rc=2))
    async with serving(backend) as bench:
        with pytest.raises(NativeError, match="seq_pos_max"):
            await bench.complete("p")
        assert (await bench.complete("q", max_tokens=2)).finish_reason == "length"
        assert backend.n_rebuilt == 1


async def test_the_time_out_names_tokens_and_budget():
    """A time-out says how large the step was and how long it was allowed to take."""
    backend = FakeBackend()
    fail_at(backend, 1, StepResult(status=StepStatus.TIMEOUT))
    async with serving(backend, decode_budget_s=0.25) as bench:
        with pytest.raises(DecodeTimeout, match=r"a step of 9 tokens took longer than 0.25 s"):
            await bench.complete("0123456789")


@pytest.mark.parametrize(("configured", "budget_s"), [(None, 30.0), (0, None), (1.5, 1.5)])
async def test_each_step_carries_its_budget(configured: float | None, budget_s: float | None):
    """R1: None is 30 s on a fast model, 0 is no limit, anything else is itself."""
    async with serving(decode_budget_s=configured) as bench:
        await bench.complete("p", max_tokens=3)
        assert {step.budget_s for step in bench.backend.steps} == {budget_s}


async def test_a_sampling_error_concerns_its_row_alone():
    """One row's error fails that request; its neighbours' ids are right and nothing is rebuilt."""

    class OneBadRow(FakeBackend):
        def _draw(self, row):
            sampled = super()._draw(row)
            if row.sampler.params.seed == 13 and row.sampler.n_drawn == 3:
                return InvalidContent("no candidate left")
            return sampled

    backend = OneBadRow(n_slots=3)
    async with serving(backend) as bench:
        got: dict[int, object] = {}

        async def ask(seed: int) -> None:
            try:
                got[seed] = (await bench.complete("same", seed=seed)).generated
            except InvalidContent as error:
                got[seed] = error

        async with trio.open_nursery() as nursery:
            for seed in (1, 13, 2):
                nursery.start_soon(ask, seed)
        await bench.wait_idle()
        assert bench.actor.statistics().n_rebuilt == 0
    assert isinstance(got[13], InvalidContent)
    for seed in (1, 2):
        assert [got[seed]] == ids_of(await alone(["same"], seed=seed))


async def test_a_row_that_was_not_sampled_is_an_error_not_a_hang():
    """A backend that forgets to sample fails that request with NoLogits."""

    class Forgets(FakeBackend):
        def _draw(self, row):
            return None

    async with serving(Forgets()) as bench:
        with pytest.raises(NoLogits):
            await bench.complete("p")
        await bench.wait_idle()


# --- the end of the actor ---


async def served_until_crash(handle: Handle) -> None:
    """Serve; the crash itself is the supervisor's business, here it is swallowed."""
    with pytest.raises(Exception, match=r".") as caught:
        await handle.serve()
    assert not isinstance(caught.value, AssertionError)


async def crash(backend: Backend, n_requests: int = 3) -> tuple[Handle, list[object]]:
    """Serve until the backend's crash ends the actor; what each request got."""
    handle = await Handle.open("m", backend, ContextOptions().resolved(), None)
    bench = Bench(handle, backend)
    outcomes = Outcomes(bench)
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served_until_crash, handle)
            for i in range(n_requests):
                nursery.start_soon(outcomes.ask, f"p{i}")
    return handle, list(outcomes.got.values())


async def test_a_crash_ends_everybody_with_a_typed_error():
    """M12: an exception nobody foresaw: running and queued get EngineError naming it, all is closed."""
    backend = FakeBackend(n_slots=2)
    fail_at(backend, 2, RuntimeError("bug in the backend"))
    handle, got = await crash(backend)
    assert [type(e) for e in got] == [EngineError] * 3
    assert all("bug in the backend" in str(e) for e in got)
    assert len({id(e) for e in got}) == 3
    assert handle.closed.is_set()
    assert not backend.is_open
    assert not backend.live_samplers


async def test_a_rebuild_that_fails_ends_the_model():
    """R4: no context can be made any more: running and queued both get an end."""

    class Broken(FakeBackend):
        def rebuild(self) -> None:
            raise NativeError("no memory for a context", reason="oom")

    backend = Broken()
    fail_at(backend, 2, StepResult(status=StepStatus.FATAL, rc=-3))
    handle, got = await crash(backend)
    assert sorted(type(e).__name__ for e in got) == ["DecodeFailed", "EngineError", "EngineError"]
    assert handle.closed.is_set()


async def test_a_sampler_that_cannot_be_freed_does_not_hang_the_others():
    """Whatever raises while the actor ends, every client gets its end."""

    class Sticky(FakeBackend):
        def new_sampler(self, params):
            sampler = super().new_sampler(params)
            sampler.close = lambda: (_ for _ in ()).throw(RuntimeError("cannot be freed"))
            return sampler

    backend = Sticky()
    fail_at(backend, 2, RuntimeError("bug"))
    handle, got = await crash(backend)
    assert [type(e) for e in got] == [EngineError] * 3
    assert handle.closed.is_set()


async def test_a_backend_that_cannot_be_closed_is_closed_all_the_same():
    """`closed` is set and the thread ends although `close` raised."""

    class Unclosable(FakeBackend):
        def close(self) -> None:
            super().close()
            raise RuntimeError("cannot be closed")

    handle = await Handle.open("m", Unclosable(), ContextOptions().resolved(), None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served_until_crash, handle)
        await trio.testing.wait_all_tasks_blocked()
        handle.stop()
        with trio.fail_after(60):
            await handle.closed.wait()


async def test_stopping_ends_running_and_queued_with_not_loaded():
    """Unloaded while four requests are about: each gets NotLoaded, and nothing is left."""
    got: list[BaseException] = []
    backend = FakeBackend(n_slots=2)
    async with serving(backend) as bench, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(NotLoaded) as caught:
                await bench.complete("p", max_tokens=100_000)
            got.append(caught.value)

        for _ in range(4):
            nursery.start_soon(ask)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        bench.handle.stop()
    assert len({id(e) for e in got}) == 4
    assert not backend.live_samplers
    assert not backend.is_open
    with pytest.raises(NotLoaded):
        await bench.complete("too late")
    assert not backend.live_samplers


# --- backends with less ---


class Minimal:
    """Only what is required; says the sampling seed of each row plus how often it drew."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bool]] = []

    def open(self) -> BackendFacts:
        return BackendFacts(n_ctx=256, n_cells=256, n_batch=128, n_slots=2, n_vocab=300)

    def close(self) -> None:
        self.rows.append((0, False))

    def step(self, step: Step) -> StepResult:
        self.rows += [(len(row.tokens), row.sampler is not None) for row in step.rows]
        sampled = tuple(Sampled(token=7) if row.sampler is not None else None for row in step.rows)
        return StepResult(status=StepStatus.OK, sampled=sampled)

    def cut(self, slot: int, n_keep: int) -> bool:
        return n_keep == 0


async def ask_minimal(ask: Callable[[Bench], object], backend: object | None = None) -> object:
    """Serve a minimal backend and ask it one thing."""
    backend = backend or Minimal()
    async with serving(backend) as bench:
        return await ask(bench)


async def test_the_required_four_methods_are_enough():
    """M13: open, close, step and cut complete a prompt; without pieces there is no text."""
    backend = Minimal()
    assert isinstance(backend, Backend)
    answer = await ask_minimal(lambda b: b.complete([1, 2, 3], max_tokens=4), backend)
    assert (answer.generated, answer.reply, answer.finish_reason) == ([7] * 4, "", "length")
    assert backend.rows[:-1] == [(2, False), *[(1, True)] * 4]


async def test_without_samplers_a_row_carries_the_parameters():
    """A backend without `new_sampler` can still honour the request: its rows carry what was asked."""
    seen = []

    class Curious(Minimal):
        def step(self, step: Step) -> StepResult:
            seen.extend(row.sampler.params for row in step.rows if row.sampler is not None)
            return super().step(step)

    await ask_minimal(lambda b: b.complete([1], max_tokens=1, temperature=0.25, seed=9), Curious())
    assert [(p.temperature, p.seed) for p in seen] == [(0.25, 9)]


async def test_a_grammar_without_samplers_is_refused():
    """M13: output is never silently unconstrained."""
    async with serving(Minimal()) as bench:
        with pytest.raises(NotSupported, match="new_sampler"):
            await bench.complete([1], grammar="root ::= digits")


async def test_without_rebuild_a_fatal_step_ends_the_model():
    """M13: a backend that cannot rebuild is closed after a fatal code, and everybody is told."""

    class Dies(Minimal):
        def step(self, step: Step) -> StepResult:
            return StepResult(status=StepStatus.FATAL, rc=-3)

    handle = await Handle.open("m", Dies(), ContextOptions().resolved(), None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served_until_crash, handle)
        async with Bench(handle, handle.backend).stream([1, 2]) as events:
            with pytest.raises(DecodeFailed, match="-3"):
                await last(events)
    assert handle.closed.is_set()


async def test_without_n_kv_an_aborted_sequence_starts_afresh():
    """M13: a backend that cannot say what it holds is asked to compute the sequence again."""

    class AbortsOnce(Minimal):
        n_steps = 0

        def step(self, step: Step) -> StepResult:
            self.n_steps += 1
            if self.n_steps == 3:
                return StepResult(status=StepStatus.ABORTED)
            return super().step(step)

    backend = AbortsOnce()
    answer = await ask_minimal(lambda b: b.complete([1, 2, 3], max_tokens=3), backend)
    assert answer.generated == [7] * 3
    assert backend.rows[:-1] == [(2, False), (1, True), (3, False), (1, True), (1, True)]
