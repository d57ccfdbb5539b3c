"""What of a sequence goes into the store, when, and what a store that refuses costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from erllama.errors import EngineError
from erllama.kvcache.policy import SavePolicy
from erllama.types import PartKind

from runtime.watched import Watched  # isort: skip  # tests/ is on the path

from .warm_scenes import BLOCK_BYTES, WarmBench, warm

if TYPE_CHECKING:
    from erllama.backend import Step, StepResult

PROMPT = [i % 90 + 1 for i in range(70)]


class Exports(Watched):
    """Records which ranges were exported, and may be slow or refuse."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.exported: list[tuple[int, int]] = []
        self.wrong_size = False

    def export(
        self, slot: int, start: int, end: int, into: memoryview, part: PartKind = PartKind.BASE
    ) -> int:
        """A record."""
        self.exported.append((start, end))
        return super().export(slot, start, end, into, part) - self.wrong_size


async def test_full_blocks_during_prefill_and_the_tail_at_the_end(autojump_clock) -> None:
    """70 tokens in blocks of 16, and what was generated but for the pending token."""
    async with warm(Exports(n_batch=32)) as bench:
        answer = await bench.complete(PROMPT, max_tokens=5)
        await bench.saved()
        assert bench.nodes() == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 10)]
        assert answer.cache_delta.created == 74
        assert answer.cache_delta.read == 0
        assert bench.store.has(answer.finish_key)
        reasons = bench.store.statistics().saves
        assert (reasons["cold"], reasons["finish"]) == (4, 1)


async def test_the_next_turn_stores_only_what_is_new(autojump_clock) -> None:
    """X1: nodes hang behind the last turn's tail, cut at multiples of the block."""
    async with warm() as bench:
        first = await bench.complete(PROMPT, max_tokens=5)
        second = await bench.complete([*first.context_tokens, 7, 7, 7], max_tokens=3)
        await bench.saved()
        assert bench.nodes() == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 10), (74, 6)]
        assert second.cache_delta.created == 6
        assert second.cache_delta.read == 74


async def test_long_answers_are_saved_as_they_grow(autojump_clock) -> None:
    """K21: every `continued_interval` tokens, in full blocks."""
    policy = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16, continued_interval=32)
    async with warm(policy=policy) as bench:
        async with bench.stream([5] * 16, max_tokens=200, seed=1) as events:
            n = 0
            async for _ in events:
                n += 1
                if n == 140:  # two events a token
                    await bench.actor.wait_saved()
                    assert bench.nodes() == [(start, 16) for start in range(0, 80, 16)]
                    break
        await bench.saved()
        assert bench.store.statistics().saves["continued"] == 4


async def test_short_histories_are_not_stored(autojump_clock) -> None:
    """K19: below the gate nothing is exported."""
    async with warm(Exports()) as bench:
        answer = await bench.complete([1] * 14, max_tokens=2)
        assert (answer.finish_key, answer.cache_delta.created) == (None, 0)
        await bench.saved()
        await bench.complete([2] * 15, max_tokens=2)
        await bench.saved()
        assert bench.nodes() == [(0, 16)]
        assert bench.backend.exported == [(0, 16)]


async def test_equal_histories_are_stored_once(autojump_clock) -> None:
    """G28: eight at once with one head: each block is exported once."""
    backend = Exports(n_slots=8)
    async with warm(backend) as bench:
        await bench.complete_all(["x" * 64 + str(i) * 10 for i in range(8)], max_tokens=2)
        await bench.saved()
        heads = [span for span in backend.exported if span[1] <= 64]
        assert sorted(heads) == [(0, 16), (16, 32), (32, 48), (48, 64)]
        assert len(bench.nodes()) == 4 + 8


async def test_a_store_without_room_costs_two_tries(autojump_clock, monkeypatch) -> None:
    """K28: refused saves fail no request and are not tried again step after step."""
    async with warm(Exports(n_batch=16), ram_bytes=64) as bench:
        asked: list[int] = []

        async def no_buffer(n_bytes: int) -> None:
            asked.append(n_bytes)

        monkeypatch.setattr(bench.store, "buffer", no_buffer)
        answer = await bench.complete(PROMPT * 2, max_tokens=9)
        await bench.actor.wait_saved()
        assert len(asked) <= 2
        await bench.saved()
        assert bench.nodes() == []
        assert bench.backend.exported == []
        assert answer.finish_reason == "length"


async def test_room_is_never_made_by_dropping_what_the_block_hangs_on(autojump_clock) -> None:
    """A history longer than RAM keeps its beginning; blocks do not chase each other out."""
    backend = Exports(n_batch=16)
    async with warm(backend, ram_bytes=10 * BLOCK_BYTES) as bench:
        await bench.complete([i % 90 + 1 for i in range(300)], max_tokens=2)
        await bench.saved()
        assert bench.nodes()[:2] == [(0, 16), (16, 16)]
        assert len(backend.exported) <= 2 * len(bench.nodes()) + 2
        assert bench.store.statistics().evictions <= 1


async def test_an_export_of_another_size_is_not_stored(autojump_clock) -> None:
    """Bytes that are not what was announced go nowhere."""
    backend = Exports()
    backend.wrong_size = True
    async with warm(backend) as bench:
        await bench.complete(PROMPT, max_tokens=2)
        await bench.saved()
        assert bench.nodes() == []


async def test_a_cancelled_answer_is_stored_as_far_as_it_got(autojump_clock) -> None:
    """X6: prompt and partial answer."""
    async with warm(Watched(step_delay_s=0.1)) as bench:
        with trio.move_on_after(1.05):
            await bench.complete(PROMPT, max_tokens=100)
        await trio.sleep(1)  # the running step ends
        await bench.saved()
        n = sum(n for _, n in bench.nodes())
        assert 70 < n < 90


async def test_who_computed_nothing_stores_nothing(autojump_clock) -> None:
    """A request cancelled right after its restore adds no node of its own."""
    async with warm(Exports(step_delay_s=0.1)) as bench:
        await bench.complete(PROMPT, max_tokens=2)
        await bench.saved()
        bench.forget_live()
        before = bench.nodes()
        with trio.move_on_after(0.05):
            await bench.complete([*PROMPT[:60], 90, 90], max_tokens=2)
        await trio.sleep(1)
        await bench.saved()
        assert bench.nodes() == before


async def test_second_sighting_stores_what_comes_twice(autojump_clock) -> None:
    """A history is stored when it is seen for the second time, not by its own retry."""
    policy = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16, second_sighting=True)
    async with warm(Watched(n_batch=16), policy=policy) as bench:
        await bench.complete(PROMPT, max_tokens=2, seed=1)
        await bench.saved()
        assert bench.nodes() == []
        bench.forget_live()
        await bench.complete(PROMPT, max_tokens=2, seed=1)
        await bench.saved()
        assert bench.nodes() == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 7)]


async def test_nodes_expire_as_the_policy_says(autojump_clock) -> None:
    """`ttl_s` reaches the store."""
    policy = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16, ttl_s=1e-3)
    async with warm(policy=policy) as bench:
        await bench.complete(PROMPT, max_tokens=2)
        await bench.actor.wait_saved()
        await trio.sleep(3)
        await bench.store.housekeeping()
        assert bench.nodes() == []


async def test_unloading_ends_within_its_time_however_slow_saving_is(autojump_clock) -> None:
    """K18: what is not saved in time is not saved; waiting for it ends too."""
    async with warm() as bench:
        await bench.complete([3] * 300, max_tokens=1)
        bench.backend.step_delay_s = 10.0  # every call from now on
        bench.handle._flush_s = 15.0
        began = trio.current_time()
        flushed = trio.Event()

        async def flush() -> None:
            await bench.actor.wait_saved()
            flushed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            bench.handle.stop()
            await bench.handle.closed.wait()
            await flushed.wait()
        assert trio.current_time() - began < 50
        assert len(bench.nodes()) < 18
        bench.backend.step_delay_s = 0.0
        await everything_given_up(bench)


async def everything_given_up(bench: WarmBench) -> None:
    """No plan is left, no slot is being read."""
    saver = bench.actor._saver
    assert (len(saver._planned), len(saver._names), len(saver._places)) == (0, 0, 0)
    assert bench.actor._lanes.reading.total() == 0


async def test_a_rebuild_voids_what_was_planned(autojump_clock) -> None:
    """Nobody exports from a context that was emptied."""
    backend = Exports(n_batch=16, step_delay_s=0.1)
    async with warm(backend) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.complete, PROMPT)
            await trio.sleep(0.25)
            bench.actor._lanes.clear_memory()
            n = len(backend.exported)
            nursery.cancel_scope.cancel()
        await bench.actor.wait_saved()
        await everything_given_up(bench)
        assert len(backend.exported) <= n + 6


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("beside", [False, True])
async def test_cells_that_are_being_saved_are_waited_for_not_for_ever(
    autojump_clock, monkeypatch, hangs: bool, beside: bool
) -> None:
    """Who needs them is neither refused nor preempted: it stands still for a second at most."""
    async with warm(Watched(n_slots=3, n_cells=200, n_ctx=200)) as bench:
        buffer, asked = bench.store.buffer, trio.Event()

        async def slow_buffer(n_bytes: int) -> object:
            asked.set()
            await trio.sleep(1000 if hangs else 0.5)
            return await buffer(n_bytes)

        monkeypatch.setattr(bench.store, "buffer", slow_buffer)
        await bench.complete([7] * 150, max_tokens=1)
        await asked.wait()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            if beside:
                nursery.start_soon(bench.complete, [8] * 10)
            answer = await bench.complete([9] * 120, max_tokens=9)
        assert answer.finish_reason == "length"
        assert 0.4 < trio.current_time() - began < (2.5 if hangs else 10)
        monkeypatch.setattr(bench.store, "buffer", buffer)
        assert bench.actor.statistics().n_preempted == 0


async def test_who_only_shared_stores_nothing(autojump_clock) -> None:
    """A follower that leaves while the other computes adds no piece of its own."""
    async with warm(Watched(n_batch=20, n_slots=2, step_delay_s=0.1)) as bench:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(bench.complete, PROMPT, max_tokens=1))
            await trio.sleep(0.01)
            with trio.move_on_after(0.25):
                await bench.complete(PROMPT, max_tokens=1)
        await trio.sleep(1)
        await bench.saved()
        assert bench.nodes() == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 6)]


async def test_what_somebody_else_was_to_save_is_saved_all_the_same(autojump_clock, monkeypatch) -> None:
    """The leader fails with its saves still pending: who shared its cells stores them."""

    class Failing(Watched):
        fail_slot: int | None = None

        def step(self, step: Step) -> StepResult:
            result = super().step(step)
            sampled = [
                EngineError("no token") if row.slot == self.fail_slot else token
                for row, token in zip(step.rows, result.sampled, strict=True)
            ]
            return replace(result, sampled=tuple(sampled))

    backend = Failing(n_slots=2)
    async with warm(backend) as bench:
        buffer, go_on = bench.store.buffer, trio.Event()

        async def late_buffer(n_bytes: int) -> object:
            await go_on.wait()
            return await buffer(n_bytes)

        monkeypatch.setattr(bench.store, "buffer", late_buffer)
        async with bench.stream(PROMPT, max_tokens=1000) as leader:
            await leader.__anext__()
            async with bench.stream(PROMPT, max_tokens=20) as follower:
                await follower.__anext__()
                backend.fail_slot = 0
                with pytest.raises(EngineError, match="no token"):
                    async for _ in leader:
                        pass
                async for _ in follower:
                    pass
        go_on.set()
        await bench.saved()
        assert sum(n for _, n in bench.nodes()) == 70 + 19
