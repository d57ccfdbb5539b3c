"""What can be read about models and requests, at any moment, without waiting for anybody (O1, R9)."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import erllama
from erllama import EngineReset, RequestInfo, open_engine
from erllama.testing import FakeBackend

from .scenes import load, loaded, wait_idle

if TYPE_CHECKING:
    from erllama.backend import Step


class Stuck:
    """A `before_step` that blocks the model's thread from a given step on, until told to go on."""

    def __init__(self, from_step: int = 1) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self._from_step, self._n = from_step, 0

    def __call__(self, _: Step) -> None:
        self._n += 1
        if self._n >= self._from_step:
            self.entered.set()
            assert self.leave.wait(120)

    async def wait_entered(self) -> None:
        """Until the model's thread is inside the step."""
        assert await trio.to_thread.run_sync(self.entered.wait, 60)


@pytest.mark.parametrize(("at_step", "phase", "n_kv"), [(1, "prefill", 0), (4, "decode", 400)])
async def test_readouts_while_the_step_is_stuck(at_step: int, phase: str, n_kv: int):
    """O1: with the model's thread blocked, every read-out is right and together they take no time."""
    stuck = Stuck(at_step)
    backend = FakeBackend(threaded=True, before_step=stuck)
    async with open_engine() as engine:
        model = await load(engine, backend)
        async with model.stream("p" * 400) as first, model.stream("q") as second:
            await stuck.wait_entered()
            before = time.thread_time()  # waiting takes none, but then the step would have to end
            requests, info, statistics = model.requests(), model.info(), model.statistics()
            depth = (model.queue_depth(), engine.queue_depth(), model.pending_len())
            model_phase = model.phase()
            where = (engine.request_info(first.request), engine.request_info(second.request))
            assert time.thread_time() - before < 0.05
            stuck.leave.set()
    n_generated = max(0, n_kv - 399)
    one = RequestInfo(
        id=first.request.id,
        model_id="fake",
        phase=phase,
        n_prompt=400,
        n_cached=0,
        n_generated=n_generated,
        n_kv=n_kv,
    )
    two = RequestInfo(
        id=second.request.id, model_id="fake", phase="queued", n_prompt=1, n_cached=0, n_generated=0, n_kv=0
    )
    assert requests == [one, two]
    assert where == (one, two)
    assert depth == (2, 2, 1)
    assert model_phase == info.phase == ("prefilling" if phase == "prefill" else "generating")
    assert (info.pending_len, info.n_seq_max, info.available_seqs) == (1, 1, 0)
    assert (statistics.n_waiting, statistics.n_prefilling, statistics.n_decoding) == (
        1,
        phase == "prefill",
        phase == "decode",
    )


async def test_a_stuck_model_holds_up_nobody_else():
    """R9: cancel, reset and other models work while one model's step does not end."""
    stuck = Stuck()
    async with open_engine() as engine:
        wedged = await load(engine, FakeBackend(threaded=True, before_step=stuck, n_slots=2), "wedged")
        other = await load(engine, FakeBackend(threaded=True), "other")
        async with wedged.stream("p", session_id="s") as events, wedged.stream("q", session_id="t"):
            await stuck.wait_entered()
            with trio.fail_after(60):
                assert (await other.complete("p")).finish_reason == "length"
                async with trio.open_nursery() as nursery:
                    outcome: list[str] = []

                    async def reset() -> None:
                        outcome.append(await wedged.reset_session("s"))

                    nursery.start_soon(reset)
                    with pytest.raises(EngineReset):
                        await anext(events)
                    assert outcome == []
                    stuck.leave.set()
                assert outcome == ["recovered"]
        assert await wedged.reset_session("s") == "not_found"
        await wedged.complete("after", max_tokens=1)
        await wait_idle(wedged)


async def test_a_reset_that_finds_no_end_says_so(monkeypatch: pytest.MonkeyPatch):
    """R9: the step stays stuck beyond the patience: EngineError "timeout", in bounded time."""
    monkeypatch.setattr(erllama.runtime.session_calls, "RESET_PATIENCE_S", 0.05)
    stuck = Stuck()
    async with loaded(FakeBackend(threaded=True, before_step=stuck)) as model:
        async with model.stream("p", session_id="s"):
            await stuck.wait_entered()
            with trio.fail_after(60), pytest.raises(erllama.EngineError) as caught:
                await model.reset_session("s")
            assert caught.value.reason == "timeout"
            stuck.leave.set()
        await model.complete("after", max_tokens=1)
        await wait_idle(model)


async def test_status_answers_within_a_few_tokens(autojump_clock):
    """G15: new requests and read-outs come through between tokens of a 500-token answer."""
    async with loaded(FakeBackend(step_delay_s=0.01, n_slots=2)) as model, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: model.complete("p", max_tokens=500))
        await trio.sleep(1.0)
        before = trio.current_time()
        assert model.requests()[0].n_generated == pytest.approx(100, abs=2)
        await model.complete("q", max_tokens=1)
        assert trio.current_time() - before <= 0.04
        nursery.cancel_scope.cancel()


async def test_a_request_is_known_until_it_is_over():
    """request_info follows a request by its name, and is None afterwards."""
    async with open_engine() as engine:
        model = await load(engine)
        async with model.stream("p") as events:
            assert engine.request_info(events.request).phase == "queued"
            await anext(events)
            assert engine.request_info(events.request).phase in ("decode", "finished")
        await wait_idle(model)
        assert engine.request_info(events.request) is None


async def test_requests_of_all_models_are_sorted_by_age():
    """The engine lists every model's requests, oldest first."""
    async with open_engine() as engine:
        a, b = await load(engine, model_id="a"), await load(engine, model_id="b")
        async with b.stream("1") as one, a.stream("2") as two, b.stream("3") as three:
            names = [(r.id, r.model_id) for r in engine.requests()]
            assert names == [(e.request.id, e.request.model_id) for e in (one, two, three)]
            assert engine.queue_depth() == 3


async def test_the_record_of_a_model():
    """M9, M10: what `info` and `models` tell about idle models, in order of loading."""
    async with open_engine() as engine:
        first = await load(engine, FakeBackend(n_slots=3, n_ctx=1234), "first")
        await load(engine, model_id="second")
        info = first.info()
        assert (info.model_id, info.path, info.phase, info.pending_len) == ("first", None, "idle", 0)
        assert (info.n_ctx, info.n_seq_max, info.available_seqs) == (1234, 3, 3)
        assert (info.memory_kind, dict(info.details)) == ("dense", {})
        models = engine.models()
        assert [m.model_id for m in models] == ["first", "second"]
        assert models[0].loaded_at_monotonic <= models[1].loaded_at_monotonic <= time.monotonic()


async def test_counters_count():
    """statistics(): steps, prefilled tokens and decoded rows are those the model saw."""
    backend = FakeBackend()
    async with loaded(backend) as model:
        await model.complete("p" * 200, max_tokens=10)
        s = model.statistics()
    assert s.n_steps == len(backend.steps) == 11
    assert (s.n_prefill_tokens, s.n_decode_rows) == (199, 10)
    assert (s.n_slots, s.n_available) == (1, 1)


async def test_reprs_are_truthful():
    """Engine, model and stream show what they are doing."""
    async with open_engine() as engine:
        assert repr(engine) == "<Engine without models>"
        model = await load(engine, FakeBackend(n_slots=1))
        assert repr(engine) == "<Engine <Model fake: 0 decode, 0 prefill, 0 queued>>"
        async with model.stream("p", max_tokens=5000) as running, model.stream("q") as waiting:
            await trio.testing.wait_all_tasks_blocked()  # until the first one's buffer is full
            assert repr(model) == "<Model fake: 1 decode, 0 prefill, 1 queued>"
            assert repr(waiting) == f"<EventStream <Sequence {waiting.request} queued 0/1 slot=None>>"
            assert repr(running) == f"<EventStream <Sequence {running.request} decode 127/128 slot=0>>"


async def test_times_are_disjoint_parts(autojump_clock):
    """Stats: waiting, prefill and decode add up to the whole; the first token is counted from submission."""
    async with loaded(FakeBackend(step_delay_s=1.0)) as model, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: model.complete("in front", max_tokens=4))
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
        stats = (await model.complete("p" * 300, max_tokens=5)).stats
        whole = trio.current_time() - before
    assert (stats.queue_s, stats.prefill_s, stats.decode_s) == pytest.approx((5.0, 2.0, 5.0))
    assert stats.first_token_s == pytest.approx(8.0)
    assert stats.queue_s + stats.prefill_s + stats.decode_s == pytest.approx(whole)
