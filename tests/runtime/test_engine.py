"""Loading, names, unloading, and the borders between models, engines and the caller's own code."""

from __future__ import annotations

import gc
import threading

import pytest
import trio
import trio.testing

import erllama
from erllama import (
    AlreadyLoaded,
    ContextOptions,
    EngineConfig,
    EngineError,
    HandleClosed,
    InvalidConfig,
    InvalidOption,
    LoadFailed,
    MissingConfig,
    NotLoaded,
    NotSupported,
    UnknownOption,
    open_engine,
)
from erllama.backend import BackendFacts, Sampled, Step, StepResult, StepStatus
from erllama.runtime import engine as engine_module
from erllama.testing import FakeBackend, cancel_at_every_checkpoint

from .scenes import load, loaded, wait_idle


async def wait_no_threads() -> None:
    """Threads end a moment after their model's last call."""
    left = [t for t in threading.enumerate() if t.name.startswith("erllama ")]
    for thread in left:
        await trio.to_thread.run_sync(thread.join, 5)
    assert not any(thread.is_alive() for thread in left)


# --- names ---


async def test_ids_given_and_generated():
    """M1: given ids are kept, generated ones are distinct, all reach their model."""
    async with open_engine() as engine:
        given = await load(engine, model_id="any thing/🎉")
        generated = [await engine.load_model(backend=FakeBackend()) for _ in range(3)]
        models = [given, *generated]
        assert len({m.model_id for m in models}) == 4
        assert [engine.model(m.model_id) for m in models] == models
        assert [info.model_id for info in engine.models()] == [m.model_id for m in models]
        named = await engine.load_model("some/where/smol.Q4.gguf", backend=FakeBackend())
        assert (named.model_id, named.info().path) == ("smol.Q4", "some/where/smol.Q4.gguf")


async def test_an_id_is_taken_only_once():
    """M2: loading an id twice raises, also while the first load still runs; the first is untouched."""
    slow = SlowToOpen()
    async with open_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(load, engine, slow, "id")
        await slow.wait_entered()
        with pytest.raises(AlreadyLoaded, match="'id'"):
            await load(engine, model_id="id")
        with pytest.raises(NotLoaded):
            engine.model("id")
        slow.leave.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(AlreadyLoaded):
            await load(engine, model_id="id")
        assert engine.model("id").phase() == "idle"


async def test_unknown_ids_leave_nothing_behind():
    """M2: 100,000 look-ups of unknown ids change neither registry nor memory."""
    async with open_engine() as engine:
        await load(engine)
        for i in range(200):
            look_up(engine, i)
        gc.collect()
        before = len(gc.get_objects())
        for i in range(100_000):
            look_up(engine, i)
        gc.collect()
        assert abs(len(gc.get_objects()) - before) < 100
        assert len(engine.models()) == 1


def look_up(engine: erllama.Engine, i: int) -> None:
    """Ask for a model that is not there."""
    try:
        engine.model(f"unknown-{i}")
    except NotLoaded:
        return
    raise AssertionError("it was there")


async def test_not_loaded_names_what_is():
    """The error lists the loaded ids."""
    async with open_engine() as engine:
        with pytest.raises(NotLoaded, match="loaded: none"):
            engine.model("x")
        await load(engine, model_id="a")
        with pytest.raises(NotLoaded, match="no model 'x' is loaded; loaded: 'a'"):
            await engine.unload("x")


# --- what is checked before anything is loaded ---


async def test_bad_loads_touch_no_backend(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """M3: each mistake has its error, and no native load begins."""
    opened = []

    async def spy(*args: object) -> None:
        opened.append(args)

    monkeypatch.setattr(engine_module.Handle, "open", spy)
    async with open_engine() as engine:
        with pytest.raises(MissingConfig):
            await engine.load_model()
        for path in ("absent.gguf", str(tmp_path), "a\0b"):
            with pytest.raises(InvalidConfig) as caught:
                await engine.load_model(path)
            assert caught.value.detail == {"key": "path", "value": path}
        with pytest.raises(InvalidConfig, match="'vllm'"):
            await engine.load_model("absent.gguf", backend="vllm")
        assert engine.models() == []
    assert opened == []


async def test_options_of_the_engine():
    """Unknown and wrong options are refused; overrides change a given config."""
    with pytest.raises(UnknownOption, match="did you mean 'stream_buffer_events'"):
        await open_engine(stream_buffer_event=8).__aenter__()
    with pytest.raises(InvalidOption, match="stream_buffer_events=3"):
        await open_engine(stream_buffer_events=3).__aenter__()
    async with open_engine(EngineConfig(stream_buffer_events=9)) as engine:
        assert engine.config == EngineConfig(stream_buffer_events=9)
    async with open_engine(EngineConfig(stream_buffer_events=9), stream_buffer_events=7) as engine:
        assert engine.config.stream_buffer_events == 7
        model = await load(engine)
        async with model.stream("p", max_tokens=500):
            await trio.testing.wait_all_tasks_blocked()
            assert model.requests()[0].n_generated == 2


# --- loading ---


class SlowToOpen(FakeBackend):
    """Opens when told to, or gives up when the load is cancelled; can tell how far it is."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"threaded": True, **settings})
        self.entered, self.leave = threading.Event(), threading.Event()
        self.n_cancelled = self.n_closed = 0

    def open(self) -> BackendFacts:
        self.entered.set()
        assert self.leave.wait(10)
        if self.n_cancelled:
            raise LoadFailed("given up")
        return super().open()

    def close(self) -> None:
        self.n_closed += 1
        super().close()

    def cancel_open(self) -> None:
        self.n_cancelled += 1
        self.leave.set()

    def load_fraction(self) -> float:
        return 0.25

    async def wait_entered(self) -> None:
        assert await trio.to_thread.run_sync(self.entered.wait, 10)


async def test_progress_comes_in_fractions_and_ends_at_one():
    """The callback runs in the trio thread; the last call is 1.0, and only then is the model there."""
    backend, seen = SlowToOpen(), []

    def progress(fraction: float) -> None:
        seen.append((fraction, threading.get_ident()))
        backend.leave.set()

    async with open_engine() as engine:
        await engine.load_model(backend=backend, progress=progress)
    assert [f for f, _ in seen] == [0.25, 1.0]
    assert {ident for _, ident in seen} == {threading.get_ident()}


@pytest.mark.parametrize("at", [0.25, 1.0])
async def test_a_progress_callback_that_raises_ends_the_load(at: float):
    """Its exception comes out bare; backend, thread and id are free again."""
    backend = SlowToOpen()

    def progress(fraction: float) -> None:
        if fraction == at:
            raise KeyError("mine")
        backend.leave.set()

    async with open_engine() as engine:
        with pytest.raises(KeyError, match="mine"):
            await engine.load_model(backend=backend, model_id="m", progress=progress)
        assert (backend.is_open, backend.n_closed) == (False, 1)
        await wait_no_threads()
        await load(engine, model_id="m")


async def test_a_cancelled_load_is_told_waited_for_and_leaves_nothing():
    """The backend hears of it once, is closed, its thread ends, and the id can be used."""
    backend = SlowToOpen()
    async with open_engine() as engine:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load, engine, backend, "m")
                await backend.wait_entered()
                scope.cancel()
        assert (backend.n_cancelled, backend.n_closed, backend.is_open) == (1, 1, False)
        assert engine.models() == []
        await wait_no_threads()
        await load(engine, model_id="m")


async def test_a_load_cancelled_at_every_checkpoint():
    """Either the model is there, or nothing of it is."""
    backend = FakeBackend()
    async with open_engine() as engine:

        async def attempt() -> None:
            await (await load(engine, backend, "m")).unload()

        async def check() -> None:
            await trio.testing.wait_all_tasks_blocked()
            assert backend.is_open == bool(engine.models())
            for info in engine.models():
                await engine.unload(info.model_id)
            assert not backend.is_open

        assert await cancel_at_every_checkpoint(attempt, check) > 2


async def test_a_load_that_fails_raises_its_reason_and_frees_the_id():
    """What `open` raises comes out; the backend is closed, and the id can be loaded."""

    class Broken(SlowToOpen):
        def open(self) -> BackendFacts:
            raise LoadFailed("no tensors")

    backend = Broken()
    async with open_engine() as engine:
        with pytest.raises(LoadFailed, match="no tensors"):
            await load(engine, backend, "m")
        assert backend.n_closed == 1
        await wait_no_threads()
        assert (await (await load(engine, model_id="m")).complete("p")).stats.n_generated == 64


# --- the end of a model ---


async def test_unloading_under_load():
    """Running and queued requests get NotLoaded, everything is freed, the id can be loaded again."""
    backend = FakeBackend(n_slots=2, threaded=True)
    async with open_engine() as engine:
        model = await load(engine, backend, "m")
        got = []

        async def ask() -> None:
            with pytest.raises(NotLoaded, match="'m' was unloaded"):
                await model.complete("p", max_tokens=4000)
            got.append(1)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            while model.phase() != "generating":
                await trio.lowlevel.checkpoint()
            nursery.start_soon(model.wait_closed)
            await engine.unload("m")
        assert len(got) == 5
        assert not backend.is_open
        assert not backend.live_samplers
        assert engine.models() == []
        await model.unload()
        await wait_no_threads()
        again = await load(engine, model_id="m")
        assert (await again.complete("p")).finish_reason == "length"


ACCESSORS = {
    "complete": lambda m: m.complete("p"),
    "stream": lambda m: m.stream("p").__aenter__(),
    "tokenize": lambda m: m.tokenize("p"),
    "tokenize_async": lambda m: m.tokenize_async("p"),
    "detokenize": lambda m: m.detokenize([1]),
    "detokenize_async": lambda m: m.detokenize_async([1]),
    "phase": lambda m: m.phase(),
    "pending_len": lambda m: m.pending_len(),
    "queue_depth": lambda m: m.queue_depth(),
    "statistics": lambda m: m.statistics(),
    "requests": lambda m: m.requests(),
    "info": lambda m: m.info(),
    "reset_session": lambda m: m.reset_session("s"),
}


@pytest.mark.parametrize("name", list(ACCESSORS))
async def test_an_unloaded_model_says_so(name: str):
    """M8: every accessor raises NotLoaded after unload, never anything else."""
    async with open_engine() as engine:
        model = await load(engine)
        await model.unload()

        async def call() -> None:
            result = ACCESSORS[name](model)
            if hasattr(result, "__await__"):
                await result

        with pytest.raises(NotLoaded, match="'fake' was unloaded"):
            await call()


async def test_leaving_the_engine_ends_requests_and_frees_models():
    """A request in a task outside the block gets NotLoaded; backend and thread are gone."""
    backend = FakeBackend(threaded=True)
    async with trio.open_nursery() as nursery:
        async with open_engine() as engine:
            model = await load(engine, backend)

            async def ask() -> None:
                with pytest.raises(NotLoaded):
                    await model.complete("p", max_tokens=4000)

            nursery.start_soon(ask)
            while model.phase() != "generating":
                await trio.lowlevel.checkpoint()
        assert not backend.is_open
    await wait_no_threads()


async def test_a_closed_engine_loads_nothing():
    """Loading after the block, or finishing a load after it, raises and leaves nothing open."""
    late = SlowToOpen()
    async with trio.open_nursery() as nursery:
        async with open_engine() as engine:

            async def load_late() -> None:
                with pytest.raises(HandleClosed, match="was closed while 'late'"):
                    await load(engine, late, "late")

            nursery.start_soon(load_late)
            await late.wait_entered()
        late.leave.set()
    assert (late.n_opened, late.n_closed, late.is_open) == (1, 1, False)
    assert engine.models() == []
    with pytest.raises(HandleClosed, match="the engine is closed"):
        await load(engine)
    await wait_no_threads()


# --- isolation ---


async def test_one_model_crashing_leaves_the_rest_alone():
    """M12: its callers get EngineError, the other model's answer is right, the id can be loaded again."""

    def crash(step: Step) -> None:
        if len(bad.steps) == 4:
            raise ZeroDivisionError("bug in the backend")

    bad = FakeBackend(before_step=crash, n_slots=2, threaded=True)
    async with open_engine() as engine:
        crashing, healthy = await load(engine, bad, "bad"), await load(engine, model_id="good")
        expected = (await healthy.complete("p", seed=1)).generated
        got: list[object] = []

        async def ask_bad() -> None:
            with pytest.raises(EngineError, match="bug in the backend") as caught:
                await crashing.complete("p" * 600)
            got.append(caught.value.reason)

        async def ask_good() -> None:
            got.append((await healthy.complete("p", seed=1)).generated)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask_bad)
            nursery.start_soon(ask_good)
            await crashing.wait_closed()
        assert sorted(map(str, got)) == sorted([str(expected), *["engine_error"] * 3])
        assert [m.model_id for m in engine.models()] == ["good"]
        with pytest.raises(NotLoaded):
            await crashing.complete("p")
        again = await load(engine, model_id="bad")
        assert (await again.complete("p", seed=1)).generated == expected


async def test_a_rebuild_that_fails_ends_that_model_only():
    """R4: queued callers are told too, the other model goes on."""

    class Broken(FakeBackend):
        def rebuild(self) -> None:
            raise erllama.NativeError("no context", reason="oom")

    bad = Broken(before_step=lambda _: StepResult(status=StepStatus.FATAL, rc=-3))
    async with open_engine() as engine:
        model, healthy = await load(engine, bad, "bad"), await load(engine, model_id="good")
        reasons = []

        async def ask() -> None:
            with pytest.raises(EngineError) as caught:
                await model.complete("p")
            reasons.append(caught.value.reason)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert sorted(reasons) == ["decode_failed", "engine_error", "engine_error"]
        assert (await healthy.complete("p", max_tokens=1)).finish_reason == "length"
        await trio.testing.wait_all_tasks_blocked()
        assert [m.model_id for m in engine.models()] == ["good"]


async def test_a_time_out_rebuilds_and_the_model_stays_loaded():
    """R3: one caller fails with decode_timeout, the weights were loaded once, the next answer is right."""
    backend = FakeBackend()
    backend.before_step = lambda _: StepResult(status=StepStatus.TIMEOUT) if len(backend.steps) == 2 else None
    async with loaded(backend) as model:
        with pytest.raises(erllama.DecodeTimeout) as caught:
            await model.complete("p")
        assert caught.value.reason == "decode_timeout"
        await model.complete("q")
        assert (backend.n_opened, backend.n_rebuilt, model.statistics().n_rebuilt) == (1, 1, 1)


async def test_two_engines_at_once():
    """Two engines have their own registries, and leaving one leaves the other."""
    async with open_engine() as outer:
        kept = await load(outer, model_id="m")
        async with open_engine() as inner:
            other = await load(inner, model_id="m")
            assert (await other.complete("p", seed=1)).generated == (
                await kept.complete("p", seed=1)
            ).generated
        with pytest.raises(NotLoaded):
            await other.complete("p")
        assert (await kept.complete("p")).finish_reason == "length"
        assert inner.models() == []


# --- the caller's own exceptions ---


class Mine(Exception):
    """Raised by the application."""


async def raise_inside(error: BaseException) -> None:
    """Raise in the block of an engine that serves a model."""
    async with open_engine() as engine:
        await load(engine)
        raise error


async def test_the_callers_exceptions_come_out_bare():
    """What the block raises is what `async with open_engine()` raises, the same object, without a context."""
    mine = Mine("bare")
    with pytest.raises(Mine) as caught:
        await raise_inside(mine)
    assert caught.value is mine
    assert mine.__context__ is None


async def test_the_context_of_an_exception_is_kept():
    """What the application was handling when it raised is still said."""

    async def raise_while_handling() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            await raise_inside(Mine())

    with pytest.raises(Mine) as caught:
        await raise_while_handling()
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize("errors", [[Mine()], [Mine(), KeyError()]], ids=["one", "two"])
async def test_the_callers_groups_come_out_whole(errors: list[Exception]):
    """A group of the application's own is not taken apart, whatever its size."""
    with pytest.raises(ExceptionGroup) as caught:
        await raise_inside(ExceptionGroup("own", errors))
    assert (caught.value.message, list(caught.value.exceptions)) == ("own", errors)


async def test_an_exception_beside_a_cancellation_comes_out_bare():
    """Raised while the surrounding scope is cancelled, it is still itself."""

    async def main(scope: trio.CancelScope) -> None:
        async with open_engine() as engine:
            await load(engine)
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                raise Mine

    with trio.CancelScope() as scope, pytest.raises(Mine):
        await main(scope)


async def test_cancelling_around_an_engine_is_plain_cancellation(autojump_clock):
    """A cancelled scope around the engine catches its own Cancelled, nothing else comes out."""
    with trio.move_on_after(2.5) as scope:
        async with open_engine() as engine:
            model = await load(engine, FakeBackend(step_delay_s=1.0))
            await model.complete("p", max_tokens=4000)
    assert scope.cancelled_caught
    assert trio.current_time() <= 4.0  # the step that ran, and closing, which the fake counts as one more


async def test_an_exception_inside_a_stream_comes_out_bare():
    """A reader that raises ends its request and gets its exception back."""

    async def read(model: erllama.Model) -> None:
        async with model.stream("p") as events:
            async for _ in events:
                raise Mine

    async with loaded() as model:
        with pytest.raises(Mine):
            await read(model)
        await wait_idle(model)


# --- a backend of one's own ---


class Minimal:
    """Only the four required methods."""

    def open(self) -> BackendFacts:
        return BackendFacts(n_ctx=64, n_cells=64, n_batch=32, n_slots=1, n_vocab=10)

    def close(self) -> None:
        return None

    def step(self, step: Step) -> StepResult:
        return StepResult(
            status=StepStatus.OK, sampled=tuple(Sampled(token=1) if r.sampler else None for r in step.rows)
        )

    def cut(self, slot: int, n_keep: int) -> bool:
        return n_keep == 0


async def test_what_a_minimal_backend_lacks_is_not_supported():
    """M13: completing ids works; all that needs more raises NotSupported and says what is missing."""
    async with open_engine() as engine:
        model = await engine.load_model(backend=Minimal(), context=ContextOptions(n_batch=32))
        assert (await model.complete([1, 2], max_tokens=3)).generated == [1, 1, 1]
        for call, missing in (
            (lambda: model.complete("text"), "tokenize"),
            (lambda: model.tokenize_async("text"), "tokenize"),
            (lambda: model.detokenize_async([1]), "detokenize"),
            (lambda: model.complete([1], grammar="root ::= digits"), "new_sampler"),
        ):
            with pytest.raises(NotSupported, match=f"no {missing}"):
                await call()
        for embed in (lambda: model.embed([1]), lambda: model.embed_batch([[1], [2]])):
            with pytest.raises(NotSupported, match="its backend cannot"):
                await embed()
        await wait_idle(model)
