"""Restoring from the store: the longest stored beginning, and nothing wrong whatever is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from erllama.backend import MemoryKind, Step, StepResult, StepStatus
from erllama.engine import errands, read_ahead
from erllama.errors import DecodeFailed, NativeError
from erllama.kvcache.store import KvStore
from erllama.testing import cancel_at_every_checkpoint
from erllama.types import PartKind

from runtime.watched import Watched  # isort: skip  # tests/ is on the path


from .scenes import alone, last
from .warm_scenes import WarmBench, warm

if TYPE_CHECKING:
    from erllama.types import Completion

PROMPT = [i % 90 + 1 for i in range(70)]
GREEDY = {"max_tokens": 6, "temperature": 0.0}


async def is_right(prompt: list[int], answer: Completion) -> bool:
    """Whether it is what a model without any cache answers."""
    [cold] = await alone([prompt], **GREEDY)
    return cold.generated == answer.generated


async def stored(bench: WarmBench, prompt: list[int] = PROMPT) -> None:
    """Have a prompt in the store, and nothing of it in live cells."""
    await bench.complete(prompt, **GREEDY)
    await bench.saved()
    bench.forget_live()


@pytest.mark.parametrize(
    ("prompt", "n_cached"),
    [
        (PROMPT, 69),
        (PROMPT[:-1], 68),
        ([*PROMPT, 5], 70),
        (PROMPT[:48], 47),
        (PROMPT[:49], 48),
        (PROMPT[:17], 16),
        (PROMPT[:1], 0),
        ([*PROMPT[:40], 0, *PROMPT[41:]], 40),
        ([0, *PROMPT[1:]], 0),
        ([*PROMPT[:64], *PROMPT[:20]], 64),
    ],
)
@pytest.mark.parametrize("live", [False, True])
async def test_the_longest_beginning_is_there_to_the_token(
    autojump_clock, prompt: list[int], n_cached: int, live: bool
) -> None:
    """Same prompt, minus a token, plus one, edited anywhere: from live cells and from the store alike."""
    async with warm() as bench:
        await stored(bench) if not live else await bench.complete(PROMPT, **GREEDY)
        before = bench.n_computed
        answer = await bench.complete(prompt, **GREEDY)
        assert answer.stats.n_cached == answer.cache_delta.read == n_cached
        assert bench.n_computed - before == len(prompt) - 1 - n_cached
        kind = "cold" if not n_cached else "exact" if n_cached == len(prompt) - 1 else "partial"
        assert answer.cache_hit_kind == kind
        assert answer.cache_source == (None if not n_cached else "live" if live else "ram")
        assert await is_right(prompt, answer)
        await bench.saved()


async def test_live_cells_and_the_store_add_up(autojump_clock) -> None:
    """What lives is shared, what is stored beyond it is restored, the rest is computed."""
    async with warm() as bench:
        await stored(bench)
        await bench.complete([*PROMPT[:24], 1, 2, 3], **GREEDY)
        before = bench.n_computed
        answer = await bench.complete([*PROMPT, 7, 7], **GREEDY)
        assert bench.n_computed - before == 1
        assert (answer.stats.n_cached, answer.cache_source) == (70, "ram")
        assert await is_right([*PROMPT, 7, 7], answer)


async def test_one_restore_serves_all_who_come_together(autojump_clock) -> None:
    """X21: eight requests for one stored head import each of its blocks once."""
    backend = Watched(n_slots=8)
    async with warm(backend) as bench:
        await stored(bench)
        before, reads = backend.n_imports, bench.n_computed
        answers: list[Completion] = []

        async def ask(i: int) -> None:
            answers.append(await bench.complete([*PROMPT[:64], 91 + i, 92, 93], **GREEDY))

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(ask, i)
        assert backend.n_imports - before == 4
        assert bench.n_computed - reads <= 8 * 2
        for answer in answers:
            assert await is_right(answer.context_tokens[:67], answer)


class Noted(Watched):
    """Calls in order: an import, a step of whom the test is not about, or one in which it takes part."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.calls = ""
        self.before_step = self.note

    def import_(self, slot, block, wanted, data, part=PartKind.BASE):
        self.calls += "i"
        return super().import_(slot, block, wanted, data, part)

    def note(self, step: Step) -> StepResult | None:
        self.calls += "a" if any(row.slot == 1 for row in step.rows) else "s"
        return self.look(step)


async def calls_beside_a_long_prompt() -> str:
    """What is called from when a stored prompt comes back, while another one is computed in pieces."""
    backend = Noted(n_slots=2, step_delay_s=0.01)
    async with warm(backend, prefill_chunk_size=16) as bench:
        await stored(bench)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.complete([9] * 400, **GREEDY))
            await trio.sleep(0.025)
            backend.calls = ""
            answer = await bench.complete(PROMPT, **GREEDY)
            nursery.cancel_scope.cancel()
        assert answer.stats.n_cached == 69
        assert await is_right(PROMPT, answer)
        await bench.saved()
    return backend.calls


async def test_a_restore_beside_a_long_prompt_waits_for_one_step(autojump_clock) -> None:
    """X21: who comes back from RAM waits for the step that runs and takes part in the next one."""
    calls = await calls_beside_a_long_prompt()
    assert calls.startswith("siiiiia"), calls  # the step that ran comes first


async def test_others_go_on_between_the_calls_of_a_long_restore(autojump_clock, monkeypatch) -> None:
    """What one call imports is bounded, and so is what others wait for it; what is short goes by itself."""
    monkeypatch.setattr(read_ahead, "MOST_BYTES", 1)
    monkeypatch.setattr(errands, "MOST_S", 0.005)
    calls = await calls_beside_a_long_prompt()
    assert calls.partition("a")[0].count("i") == 5
    assert "ii" not in calls


@pytest.mark.parametrize("how", ["refused", "raises"])
async def test_a_refused_block_is_quarantined_and_the_rest_computed(autojump_clock, how: str) -> None:
    """The answer is the cold one, the node is gone with what hangs on it, and the next save heals it."""

    class Picky(Watched):
        def import_(self, slot, block, wanted, data, part=PartKind.BASE):
            if block[0] == 32 and not healed:
                if how == "raises":
                    raise NativeError("not these bytes")
                return False
            return super().import_(slot, block, wanted, data, part)

    healed = False
    async with warm(Picky()) as bench:
        await stored(bench)
        answer = await bench.complete(PROMPT, **GREEDY)
        assert answer.stats.n_cached == 32
        assert await is_right(PROMPT, answer)
        assert sum(bench.store.statistics().damage.values()) == 1
        await bench.saved()
        bench.forget_live()
        healed = True
        again = await bench.complete(PROMPT, **GREEDY)
        assert again.stats.n_cached == 69


@pytest.mark.parametrize("how", ["fatal", "raises"])
async def test_a_decode_error_behind_a_restore_starts_over_cold(autojump_clock, how: str) -> None:
    """A poison entry is never served again; the request is answered, without the client's doing."""
    backend = Watched()
    async with warm(backend) as bench:
        await stored(bench)
        n_failed = 0

        def poisoned(step: Step) -> StepResult | None:
            nonlocal n_failed
            backend.look(step)
            if backend.n_imports and step.rows[0].pos > 0 and not n_failed:
                n_failed += 1
                if how == "raises":
                    raise NativeError("a bad cell")
                return StepResult(status=StepStatus.FATAL, rc=-3)
            return None

        backend.before_step = poisoned
        answer = await bench.complete(PROMPT, **GREEDY)
        assert n_failed == 1
        assert await is_right(PROMPT, answer)
        assert bench.actor.statistics().n_rebuilt == 1
        assert sum(bench.store.statistics().damage.values()) >= 1
        await bench.saved()


async def test_a_decode_error_that_stays_fails_the_request_once(autojump_clock) -> None:
    """Starting over is done once; a request that computed its own KV is not started over at all."""
    backend = Watched()
    async with warm(backend) as bench:
        await stored(bench)
        backend.before_step = lambda _: StepResult(status=StepStatus.FATAL, rc=-3)
        with pytest.raises(DecodeFailed):
            await bench.complete(PROMPT, **GREEDY)
        assert bench.actor.statistics().n_rebuilt == 2
        with pytest.raises(DecodeFailed):
            await bench.complete([9] * 20, **GREEDY)
        assert bench.actor.statistics().n_rebuilt == 3
        backend.before_step = backend.look
        await bench.saved()


async def test_a_restore_that_finds_no_room_is_a_miss(autojump_clock) -> None:
    """The whole block needs cells while it passes through: without them it is computed, not quarantined."""
    backend = Watched(n_slots=2, n_cells=110, n_ctx=110)
    async with warm(backend) as bench:
        await stored(bench, PROMPT[:60])
        answers: dict[int, Completion] = {}

        async def ask(i: int, prompt: list[int]) -> None:
            answers[i] = await bench.complete(prompt, **GREEDY)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0, [9] * 36)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, 1, PROMPT[:60])
        assert await is_right([9] * 36, answers[0])
        assert await is_right(PROMPT[:60], answers[1])
        assert sum(bench.store.statistics().damage.values()) == 0
        await bench.saved()


async def test_a_block_evicted_between_finding_and_reading_is_a_miss(autojump_clock, monkeypatch) -> None:
    """The lease is taken on what is still there."""
    async with warm() as bench:
        await stored(bench)
        find = bench.store.find

        async def find_then_lose(*args: object, **kwargs: object) -> object:
            match = await find(*args, **kwargs)
            await bench.store.gc()
            return match

        monkeypatch.setattr(bench.store, "find", find_then_lose)
        answer = await bench.complete(PROMPT, **GREEDY)
        assert answer.cache_hit_kind == "cold"
        assert await is_right(PROMPT, answer)
        await bench.saved()


async def test_a_sequence_parked_while_it_restores_is_restored_once(autojump_clock, monkeypatch) -> None:
    """Two stays in two slots of equal generation: the first stay's task does nothing in the second."""
    backend = Watched(n_slots=2)
    async with warm(backend) as bench:
        await stored(bench)
        started, go_on = trio.Event(), trio.Event()
        find, n_found = bench.store.find, 0

        async def slow_find(*args: object, **kwargs: object) -> object:
            nonlocal n_found
            n_found += 1
            if n_found == 1:
                started.set()
                await go_on.wait()
            return await find(*args, **kwargs)

        monkeypatch.setattr(bench.store, "find", slow_find)
        answers: list[Completion] = []

        async def ask() -> None:
            answers.append(await bench.complete(PROMPT, **GREEDY))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await started.wait()
            lanes = bench.actor._lanes
            [seq] = lanes.running.values()
            lanes._set_aside(seq, 0.0)
            lanes.requeue(seq)
            bench.actor.wake()
            go_on.set()
        assert n_found == 2
        assert backend.n_imports == 5
        assert backend.n_refused == 0
        assert await is_right(PROMPT, answers[0])
        await bench.saved()


async def test_a_request_preempted_before_its_restore_began_is_no_crash(autojump_clock) -> None:
    """The task of a stay that is over does nothing."""
    async with warm(Watched(n_slots=2)) as bench:
        await stored(bench)
        async with bench.stream(PROMPT, **GREEDY) as events:
            actor = bench.actor
            admitted = actor._lanes.admit_next(0.0)
            assert admitted is not None
            actor._arrivals.start(admitted, actor._nursery)
            actor._lanes._set_aside(admitted, 0.0)
            actor._lanes.requeue(admitted)
            answer = [event async for event in events][-1].completion
        assert await is_right(PROMPT, answer)
        await bench.saved()


@pytest.mark.parametrize("prompt", [PROMPT, [*PROMPT[:50], 1, 1, 1]])
async def test_cancelled_at_every_checkpoint_nothing_is_left(prompt: list[int]) -> None:
    """A warm request cancelled anywhere leaves no lease, slot or reservation; later answers are right."""
    async with warm(Watched(n_batch=16)) as bench:
        await stored(bench)

        async def attempt() -> None:
            bench.forget_live()
            await bench.complete(prompt, **{**GREEDY, "max_tokens": 12})

        async def check() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await bench.saved()

        assert await cancel_at_every_checkpoint(attempt, check) > 10
        answer = await bench.complete(prompt, **GREEDY)
        assert await is_right(prompt, answer)


async def test_a_failing_memory_operation_is_not_blamed_on_the_node(autojump_clock) -> None:
    """If memory cannot be cut, the context is rebuilt; who steps starts over, what is stored stays stored."""

    class Stuck(Watched):
        def cut(self, slot: int, n_keep: int) -> bool:
            return super().cut(slot, n_keep) and not stuck

    stuck = False
    async with warm(Stuck()) as bench:
        await stored(bench)
        stuck = True
        bench.actor._lanes._vacate(bench.actor._lanes._empty.pop())
        async with bench.stream([*PROMPT, 5], **GREEDY) as events:
            answer = await last(events)
            stuck = False
        assert await is_right([*PROMPT, 5], answer)
        assert sum(bench.store.statistics().damage.values()) == 0
        assert bench.actor.statistics().n_rebuilt == 1
        await bench.saved()


async def test_room_is_counted_with_the_step_that_is_running(autojump_clock) -> None:
    """A resident goes before a restore is refused, and is blamed for it, by cells that a step is filling."""
    backend = Watched(n_slots=4, n_cells=150, n_ctx=150)
    async with warm(backend) as bench:
        await stored(bench)
        await bench.complete([7] * 80, max_tokens=1)
        await bench.saved()
        backend.step_delay_s = 0.1
        async with bench.stream([5] * 3, max_tokens=2):
            await trio.sleep(0.05)  # a step runs: the others are admitted together after it
            await bench.complete_all([PROMPT, [9] * 60], max_tokens=1)
        assert backend.n_refused == 0
        assert bench.store.statistics().damage == {}
        await bench.saved()


async def test_room_is_counted_with_the_imports_that_are_under_way(autojump_clock) -> None:
    """Two restores do not both take the last free cells."""
    backend = Watched(n_slots=4, n_cells=160, n_ctx=160)
    async with warm(backend) as bench:
        await stored(bench)
        await stored(bench, PROMPT[::-1])
        await bench.complete([7] * 140, max_tokens=1)
        await bench.saved()
        backend.step_delay_s = 0.1
        await bench.complete_all([PROMPT, PROMPT[::-1]], max_tokens=1)
        assert backend.n_refused == 0
        assert bench.store.statistics().damage == {}
        await bench.saved()


async def test_saves_go_on_behind_what_was_restored_beyond_live_cells(autojump_clock) -> None:
    """Live cells end inside a stored block: the block is not stored a second time in other pieces."""
    async with warm() as bench:
        await stored(bench)
        await bench.complete(PROMPT[:40], max_tokens=1)
        answer = await bench.complete([*PROMPT, 7], max_tokens=1, seed=1)
        await bench.saved()
        assert (answer.stats.n_cached, answer.cache_delta.created) == (70, 7)
        assert (40, 8) not in bench.nodes()


@pytest.mark.parametrize(("delay_s", "n_computed"), [(0.5, 0), (5.0, 69)])
async def test_a_restore_waits_for_the_saves_that_hold_its_cells(
    autojump_clock, monkeypatch: pytest.MonkeyPatch, delay_s: float, n_computed: int
) -> None:
    """Where half a restore is worth nothing, all its cells must be free soon; else it is computed."""
    async with warm(Watched(memory_kind=MemoryKind.HYBRID, n_cells=130, n_ctx=130, n_slots=2)) as bench:
        await stored(bench)
        save = KvStore.save

        async def slowly(store: KvStore, *args: object, **options: object) -> object:
            await trio.sleep(delay_s)
            return await save(store, *args, **options)

        monkeypatch.setattr(KvStore, "save", slowly)
        await bench.complete([91 - t for t in PROMPT], max_tokens=1)
        before = bench.n_computed
        answer = await bench.complete(PROMPT, **GREEDY)
        assert bench.n_computed - before == n_computed
        assert await is_right(PROMPT, answer)
        monkeypatch.undo()
        await bench.saved()


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
async def test_a_missing_state_explains_itself(autojump_clock, kind: MemoryKind) -> None:
    """Blocks are kept up to 69; without the later states only the first 48 can be gone on from (X8)."""
    async with warm(Watched(memory_kind=kind, n_batch=32)) as bench:
        await stored(bench)
        catalog = bench.store._catalog
        for name in [node["name"] for node in bench.store.dump() if node["start"] >= 48]:
            part = catalog.part_of((bytes.fromhex(name), PartKind.STATE))
            bench.store._tiers.discard(catalog.drop_part(part))
        assert bench.actor.n_kept(PROMPT) == 48
        answer = await bench.complete([*PROMPT, 7, 7], **GREEDY)
        assert answer.stats.n_cached == 48
        assert bench.actor.n_kept(PROMPT) > 48  # what was computed again is kept again
        assert (answer.miss.reason, answer.miss.index) == ("part_missing", 48)
        assert await is_right([*PROMPT, 7, 7], answer)


async def test_who_is_cancelled_while_others_go_first_computes_nothing(autojump_clock) -> None:
    """The loop waits for a restore when its client leaves: no step is made for it."""
    backend = Watched(step_delay_s=0.01)
    async with warm(backend) as bench:
        await stored(bench)
        before = len(backend.steps)
        with trio.move_on_after(0.005) as left:  # the import takes 10 ms
            await bench.complete([*PROMPT, *[3] * 100], **GREEDY)
        assert left.cancelled_caught
        await trio.sleep(1)
        assert len(backend.steps) == before
        await bench.saved()


@pytest.mark.parametrize("n_cells", range(102, 108))
async def test_nobody_gives_way_to_an_import_that_takes_long(autojump_clock, n_cells: int) -> None:
    """The last block passes through scratch whole: its cells are not those that streams go on with."""
    backend = Watched(n_slots=3, step_delay_s=0.2, n_cells=n_cells, n_ctx=n_cells)
    streams = {"max_tokens": 6, "temperature": 0.0}
    async with warm(backend) as bench:
        await stored(bench)
        async with trio.open_nursery() as nursery:
            for first in (9, 8):
                nursery.start_soon(lambda first=first: bench.complete([first, *[5, 6, 7] * 6], **streams))
            await trio.sleep(0.7)
            answer = await bench.complete(PROMPT[:53], max_tokens=1)
        assert bench.actor.statistics().n_preempted == 0
        assert answer.stats.n_cached >= 48
        await bench.saved()
