"""Requests with `exact="cold"` among others: alone, in an empty memory, and in nobody's way for ever."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import erllama
from erllama.backend import PartKind, StepResult, StepStatus
from erllama.errors import InvalidOption, LoadCancelled, NotSupported
from erllama.testing import FakeBackend

from runtime.scenes import loaded, wait_idle  # isort: skip  # tests/ is on the path
from runtime.watched import Watched  # isort: skip  # tests/ is on the path

if TYPE_CHECKING:
    from erllama.backend import Step

LONG = [i % 90 + 1 for i in range(700)]
COLD = {"exact": "cold", "max_tokens": 4, "temperature": 0.0}
POLICY = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16)


def pieces_of(steps: list[Step]) -> list[tuple[int, int]]:
    """Start and length of every row, of steps that held one sequence."""
    assert all(len(step.rows) == 1 for step in steps)
    return [(row.pos, len(row.tokens)) for step in steps for row in step.rows]


async def test_a_prompt_is_cut_at_the_same_places_whatever_is_reused(autojump_clock) -> None:
    """Whole pieces, the rest, the last token; warm from the end of a whole piece."""
    backend = FakeBackend(n_slots=4)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=backend, policy=POLICY)
        await model.complete(LONG, **COLD)
        assert pieces_of(backend.steps)[:4] == [(0, 256), (256, 256), (512, 187), (699, 1)]
        await engine.cache.flush()
        backend.steps.clear()
        answer = await model.complete([*LONG[:600], 7, *LONG[601:]], **COLD)
        assert answer.stats.n_cached == 512
        assert pieces_of(backend.steps)[:2] == [(512, 187), (699, 1)]
        assert all(step.exact for step in backend.steps)


async def test_it_runs_alone_and_others_wait_their_turn(autojump_clock) -> None:
    """First come, first served; no step holds it and somebody else."""
    backend = FakeBackend(n_slots=4, step_delay_s=0.01)
    async with loaded(backend) as model:
        order: list[str] = []

        async def ask(name: str, **options: object) -> None:
            await model.complete([*LONG[:40], ord(name)], max_tokens=8, **options)
            order.append(name)

        async with trio.open_nursery() as nursery:
            for name, options in (("a", {}), ("b", {"exact": "cold"}), ("c", {}), ("d", {})):
                nursery.start_soon(lambda n=name, o=options: ask(n, **o))
                await trio.testing.wait_all_tasks_blocked()
        assert order[:2] == ["a", "b"]
        assert all(len(step.rows) == 1 for step in backend.steps if step.exact)


async def test_replies_are_computed_again_and_sessions_make_room(autojump_clock) -> None:
    """A next turn reuses the prompt's whole pieces only; a session's pin is gone after it."""
    backend = FakeBackend(n_slots=2)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=backend, policy=POLICY)
        await model.complete("Hello", session_id="s", max_tokens=2)
        first = await model.complete(LONG, **{**COLD, "max_tokens": 200})
        await engine.cache.flush()
        second = await model.complete([*first.context_tokens, 5], **COLD)
        assert second.stats.n_cached == 512
        with pytest.raises(erllama.NoSession):
            await model.continue_("x", session_id="s")


async def test_session_and_cold_requests_find_nothing_of_each_other(autojump_clock) -> None:
    """What was computed otherwise has other bits; what is pinned and counted is the model's own kind."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend(), policy=POLICY)
        await model.complete(LONG, max_tokens=2)
        await engine.cache.flush()
        assert (await model.complete(LONG, **COLD)).cache_hit_kind == "cold"
        assert model.cached_prefix_len(LONG) >= len(LONG)


async def test_pins_of_a_cold_model_hold(autojump_clock) -> None:
    """Pin, count and unpin what requests of such a model find."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend(), policy=POLICY, exact="cold")
        assert await model.pin(LONG) == 512
        assert model.cached_prefix_len(LONG) == len(model.detokenize(LONG[:512]).encode())
        assert await model.unpin(LONG)


async def test_no_room_for_it_is_an_answer_at_once(autojump_clock) -> None:
    """Smaller pieces would have other bits, so nothing is tried again."""
    async with loaded(FakeBackend(n_cells=512)) as model:
        with pytest.raises(erllama.EngineError) as caught:
            await model.complete(LONG, **COLD)
        assert caught.value.reason == "no_room"
        assert (await model.complete("next", max_tokens=2)).finish_reason == "length"


async def test_a_sleeping_reader_does_not_stop_the_others(autojump_clock) -> None:
    """Its answer is finished without it as soon as somebody waits."""
    async with (
        loaded(FakeBackend(n_slots=2), stream_buffer_events=8) as model,
        model.stream("Hello", exact="cold", max_tokens=100) as events,
    ):
        await trio.sleep(1)
        assert (await model.complete("other", max_tokens=2)).finish_reason == "length"
        assert len((await erllama.collect(events)).generated) == 100


async def test_deterministic_is_the_law(autojump_clock) -> None:
    """Every request is cold; asking for less is refused."""
    backend = Watched(n_slots=4)
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=backend, deterministic=True)
        backend.actor = model.handle.actor
        assert model.info().exactness.deterministic
        with pytest.raises(InvalidOption):
            await model.complete("x", exact="session")
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(lambda i=i: model.complete(f"prompt {i}", max_tokens=3))
        assert all(step.exact and len(step.rows) == 1 for step in backend.steps)


class Doubtful(FakeBackend):
    """A backend whose warm bits are not its cold ones."""

    def probe_cold(self) -> str | None:
        """No."""
        return "its kernels roll dice"


async def test_where_the_probe_says_no_it_is_refused_with_the_reason(autojump_clock) -> None:
    """At load and for a request; other requests go on."""
    async with erllama.open_engine() as engine:
        with pytest.raises(NotSupported, match="roll dice"):
            await engine.load_model(backend=Doubtful(), exact="cold")
        assert engine.models() == []
        model = await engine.load_model(backend=Doubtful())
        assert model.info().exactness.cold is None
        for _ in range(2):
            with pytest.raises(NotSupported, match="roll dice"):
                await model.complete("x", exact="cold")
        assert model.info().exactness.reason == "its kernels roll dice"
        assert (await model.complete("x", max_tokens=2)).finish_reason == "length"


async def test_batches_below_a_piece_are_refused(autojump_clock) -> None:
    """The kernels of fewer than 64 rows depend on how many there are."""
    async with loaded(FakeBackend(n_batch=32)) as model:
        with pytest.raises(NotSupported, match="n_batch=32"):
            await model.complete("x", exact="cold")


async def test_who_was_queued_before_the_probe_is_refused_too(autojump_clock) -> None:
    """Three at once: nobody is answered."""
    async with loaded(Doubtful(n_slots=3)) as model:
        refused: list[str] = []

        async def ask(i: int) -> None:
            try:
                await model.complete(f"prompt {i}", exact="cold", max_tokens=2)
            except NotSupported as why:
                refused.append(why.reason)

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(ask, i)
        assert refused == ["not_supported"] * 3


async def test_half_a_restore_counts_nothing(autojump_clock) -> None:
    """Blocks may be smaller than pieces: what breaks off between two pieces is given up wholly."""

    class Picky(FakeBackend):
        def import_(self, slot, block, wanted, data, part=PartKind.BASE):
            return block[0] != 128 and super().import_(slot, block, wanted, data, part)

    backend = Picky()
    async with erllama.open_engine() as engine:
        policy = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=64)
        model = await engine.load_model(backend=backend, policy=policy)
        await model.complete(LONG, **COLD)
        await engine.cache.flush()
        backend.steps.clear()
        answer = await model.complete(LONG, **COLD)
        assert answer.stats.n_cached == 0
        assert pieces_of(backend.steps)[:4] == [(0, 256), (256, 256), (512, 187), (699, 1)]


async def test_an_answer_that_cannot_go_on_with_its_bits_is_an_error(autojump_clock) -> None:
    """An abort nobody asked for, in the middle: not silently other bits; before the first token, again."""

    def look(step: Step) -> StepResult | None:
        return StepResult(status=StepStatus.ABORTED, rc=2) if len(backend.steps) == abort_at else None

    backend, abort_at = FakeBackend(), 2
    backend.before_step = look
    async with loaded(backend) as model:
        assert len((await model.complete(LONG, **COLD)).generated) == 4
        abort_at = len(backend.steps) + 6
        with pytest.raises(erllama.EngineError) as caught:
            await model.complete(LONG, **{**COLD, "max_tokens": 50})
        assert caught.value.reason == "decode_aborted"


class LongTrial(FakeBackend):
    """Its trial takes an hour unless it is aborted, the first time."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings, threaded=True)
        self.trials: list[str] = []
        self.begun = threading.Event()

    def probe_cold(self) -> str | None:
        """Wait for the flag, once."""
        self.trials.append("begun")
        self.begun.set()
        if len(self.trials) == 1 and self._abort.wait(3600):
            self.trials.append("aborted")
            raise LoadCancelled("given up")
        return None


@pytest.mark.parametrize("way", ["leaves", "cancels"])
@pytest.mark.parametrize("others", [[], [{}], [COLD], [COLD, {}]])
async def test_a_trial_ends_with_the_request_it_is_for(way: str, others: list[dict]) -> None:
    """Who waits behind it is served at once, and who needs the trial has it made anew."""
    backend = LongTrial(n_slots=2)
    async with loaded(backend) as model, trio.open_nursery() as nursery:
        async with model.stream(LONG, **COLD) as events:
            for options in others:
                nursery.start_soon(lambda o=options: model.complete("other", **{"max_tokens": 4, **o}))
            await trio.to_thread.run_sync(backend.begun.wait)
            if way == "cancels":
                events.cancel()
                assert (await erllama.collect(events)).finish_reason == "cancelled"
        assert len((await model.complete(LONG, **COLD)).generated) == 4
        assert len((await model.complete("next", max_tokens=4)).generated) == 4
    assert backend.trials == ["begun", "aborted", "begun"]
    assert backend.live_samplers == set()


async def test_a_trial_goes_on_when_somebody_else_leaves() -> None:
    """Only its own request ends it."""
    backend = LongTrial(n_slots=2)
    async with loaded(backend) as model:
        async with model.stream(LONG, **COLD):
            async with model.stream("other", **COLD):
                await trio.to_thread.run_sync(backend.begun.wait)
            await trio.sleep(0.05)
            assert backend.trials == ["begun"]
        await wait_idle(model)
        assert backend.trials == ["begun", "aborted"]


@pytest.mark.parametrize("n_checkpoints", range(4))
async def test_no_trial_runs_for_who_has_left_before_it_began(n_checkpoints: int) -> None:
    """Whenever the request is cancelled: a trial that began is aborted, and none begins behind that."""
    backend = LongTrial(n_slots=2)
    async with loaded(backend) as model, trio.open_nursery() as nursery:
        async with model.stream(LONG, **COLD) as events:
            nursery.start_soon(lambda: model.complete("other", max_tokens=4))
            for _ in range(n_checkpoints):
                await trio.lowlevel.checkpoint()
            events.cancel()
        await wait_idle(model)
    assert backend.trials in ([], ["begun", "aborted"])
