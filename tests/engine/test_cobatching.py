"""Many requests in one step, and none of them notices the others."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from erllama.backend import MemoryKind, StepResult, StepStatus
from erllama.testing import FakeBackend
from erllama.types import Token, TokenId

from .scenes import alone, ids_of, last, serving

PROMPTS = [f"prompt {i}: {'x' * (37 * i % 300)}" for i in range(10)]


@pytest.mark.parametrize("n_slots", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_alone_equals_together(n_slots: int, temperature: float):
    """Ten prompts at once give each the ids it gets alone."""
    async with serving(FakeBackend(n_slots=n_slots)) as bench:
        together = await bench.complete_all(PROMPTS, temperature=temperature, seed=5, max_tokens=20)
        await bench.wait_idle()
    assert ids_of(together) == ids_of(await alone(PROMPTS, temperature=temperature, seed=5, max_tokens=20))


async def test_each_request_has_its_own_chain():
    """G11: four requests that differ only in one parameter each equal their run alone."""
    variants = [
        {"seed": 1},
        {"seed": 2},
        {"seed": 1, "temperature": 0.1},
        {"seed": 1, "repetition_penalty": 2.0},
    ]
    solo = [(await alone(["same"], **v))[0].generated for v in variants]
    got: dict[int, list[int]] = {}
    async with serving(FakeBackend(n_slots=4)) as bench, trio.open_nursery() as nursery:

        async def one(i: int) -> None:
            got[i] = (await bench.complete("same", **variants[i])).generated

        for i in range(4):
            nursery.start_soon(one, i)
    assert [got[i] for i in range(4)] == solo
    assert len({tuple(ids) for ids in solo}) == 4
    assert bench.backend.live_samplers == set()


async def test_identical_greedy_prompts_give_one_answer():
    """Eight times the same at once: one distinct answer."""
    async with serving(FakeBackend(n_slots=8)) as bench:
        answers = await bench.complete_all(["twin"] * 8, temperature=0.0)
    assert len({tuple(a.generated) for a in answers}) == 1


async def test_a_mixed_step_is_one_call():
    """B13: one prefilling and two decoding sequences are three rows of the same step."""
    async with serving(FakeBackend(n_slots=3)) as bench:
        streams = (bench.stream(p, max_tokens=500) for p in ("a", "b", "c" * 300))
        async with next(streams) as a, next(streams) as b, next(streams) as c:
            for events in (a, b, c):
                await anext(events)
        mixed = [
            [len(row.tokens) for row in step.rows] for step in bench.backend.steps if len(step.rows) == 3
        ]
    assert mixed[:4] == [[1, 1, 126], [1, 1, 126], [1, 1, 47], [1, 1, 1]]


async def test_as_many_rows_as_slots():
    """G14: four requests on four slots make steps of four rows; on one slot never more than one."""
    for n_slots in (4, 1):
        async with serving(FakeBackend(n_slots=n_slots)) as bench:
            await bench.complete_all(["same length"] * 4, max_tokens=10)
        assert max(bench.rows_per_step) == n_slots
        assert bench.rows_per_step.count(n_slots) >= 9


async def test_completion_order_is_arrival_order(autojump_clock):
    """G13: eight requests on one slot finish in the order they came, and each has its name at once."""
    finished: list[int] = []
    async with serving(FakeBackend(step_delay_s=1.0)) as bench, trio.open_nursery() as nursery:

        async def one(i: int, *, task_status) -> None:
            async with bench.stream("p", max_tokens=8 - i) as events:
                task_status.started((events.request, trio.current_time()))
                await last(events)
                finished.append(i)

        names = [await nursery.start(one, i) for i in range(8)]
        assert {at for _, at in names} == {trio.current_time()}
        assert len({request.id for request, _ in names}) == 8
    assert finished == list(range(8))


async def test_decoders_keep_their_pace_beside_a_long_prefill():
    """G16: a running stream gets a token in every step of a 3,000-token prefill."""
    async with serving(FakeBackend(n_slots=2)) as bench:
        async with bench.stream("short", max_tokens=200) as stream, trio.open_nursery() as nursery:
            await anext(stream)
            before = len(bench.backend.steps)
            nursery.start_soon(bench.complete, "y" * 3000)
            async for _ in stream:
                pass
        prefill = [s for s in bench.backend.steps[before:] if any(len(r.tokens) > 1 for r in s.rows)]
    assert len(prefill) == 24
    assert all(any(row.sampler is not None for row in step.rows) for step in prefill)


async def test_the_prompt_never_waits_for_the_stream_to_end():
    """With a batch below 64 a prompt still gets on beside an endless stream."""
    async with (
        serving(FakeBackend(n_slots=2, n_batch=32)) as bench,
        bench.stream("endless", max_tokens=4000) as stream,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(last, stream)
        assert (await bench.complete("y" * 300, max_tokens=3)).finish_reason == "length"
        assert bench.actor.statistics().n_decoding == 1
        nursery.cancel_scope.cancel()


async def test_a_cold_sequence_starts_at_position_zero():
    """G20: the same request five times without cache: the same ids, each from an empty memory."""
    async with serving() as bench:
        answers = [await bench.complete("again", seed=3, cache="off") for _ in range(5)]
    assert len({tuple(a.generated) for a in answers}) == 1
    starts = [row.pos for step in bench.backend.steps for row in step.rows if len(row.tokens) == 4]
    assert starts == [0] * 5


# --- cells ---


async def test_four_times_300_tokens_in_512_cells():
    """X10: 4 × (100 + 200) tokens share 512 cells: all finish, with the ids they get alone."""
    prompts = [f"{i}" * 100 for i in range(4)]
    async with serving(FakeBackend(n_slots=4, n_cells=512)) as bench:
        answers = await bench.complete_all(prompts, max_tokens=200, seed=1)
        assert bench.actor.statistics().n_preempted >= 1
        await bench.wait_idle()
    assert [a.finish_reason for a in answers] == ["length"] * 4
    assert ids_of(answers) == ids_of(await alone(prompts, max_tokens=200, seed=1))


async def test_a_preempted_stream_pauses_and_repeats_nothing():
    """The events of a sequence that gave way are those of an undisturbed run, in order."""
    async with (
        serving(FakeBackend(n_slots=2, n_cells=300)) as bench,
        bench.stream("o" * 100, max_tokens=150, buffer_events=1000),
    ):
        got: list[int] = []
        text = ""
        async with bench.stream("y" * 100, max_tokens=150, seed=2, buffer_events=1000) as events:
            async for event in events:
                if isinstance(event, TokenId):
                    got.append(event.id)
                elif isinstance(event, Token):
                    text += event.text
        assert bench.actor.statistics().n_preempted >= 1
    (solo,) = await alone(["y" * 100], max_tokens=150, seed=2)
    assert (got, text) == (solo.generated, solo.reply)


def less_than_told(backend: FakeBackend, n_really: int) -> None:
    """Make the model refuse above `n_really` cells, whatever it said it had."""

    def refuse(step):
        used = sum(map(len, backend.memory.values()))
        return StepResult(status=StepStatus.NO_ROOM, rc=1) if used + step.n_tokens > n_really else None

    backend.before_step = refuse


async def test_refused_steps_are_answered_by_less_then_by_fewer():
    """rc 1: chunks shrink, then the youngest waits; nobody gets an error and all ids are right."""
    prompts = [f"{i}" * 100 for i in range(4)]
    backend = FakeBackend(n_slots=4)
    less_than_told(backend, 300)
    async with serving(backend) as bench:
        answers = await bench.complete_all(prompts, max_tokens=150, seed=1)
        s = bench.actor.statistics()
        assert s.n_refused_steps >= 2
        assert s.n_preempted >= 2
        assert s.n_refused_steps < 60, "it asked the same again and again"
        await bench.wait_idle()
    assert ids_of(answers) == ids_of(await alone(prompts, max_tokens=150, seed=1))


async def test_a_refused_chunk_is_halved_in_whole_pieces():
    """A model that takes at most 100 tokens a step sees all 199, then 64 until something succeeds."""
    backend = FakeBackend()
    backend.before_step = lambda step: (
        StepResult(status=StepStatus.NO_ROOM, rc=1) if step.n_tokens > 100 else None
    )
    async with serving(backend) as bench:
        (answer,) = await bench.complete_all(["z" * 200], max_tokens=3, seed=1)
    assert [s.n_tokens for s in bench.backend.steps][:4] == [199, 64, 135, 64]
    assert [answer.generated] == ids_of(await alone(["z" * 200], max_tokens=3, seed=1))


async def test_alone_in_a_full_memory_the_answer_ends_with_length():
    """Nobody can give way to the only one: what fits is delivered, reason length."""
    for backend in (FakeBackend(n_cells=120), FakeBackend()):
        if backend.n_cells is None:
            less_than_told(backend, 120)
        async with serving(backend) as bench:
            answer = await bench.complete("q" * 90, max_tokens=100)
            assert (answer.finish_reason, answer.committed_tokens) == ("length", 121)
            assert (await bench.complete("after", max_tokens=2)).finish_reason == "length"
            await bench.wait_idle()


async def test_separate_streams_fill_up_on_their_own():
    """With cells per sequence, one long request leaves the others' cells alone."""
    prompts = [f"{i}" * 150 for i in range(3)]
    async with serving(FakeBackend(n_slots=3, n_ctx=256, streams_separate=True)) as bench:
        answers = await bench.complete_all(prompts, max_tokens=100, seed=1)
        assert bench.actor.statistics().n_preempted == 0
    assert ids_of(answers) == ids_of(await alone(prompts, max_tokens=100, seed=1))


# --- aborted steps ---


@pytest.mark.parametrize(
    "kind", [MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.RECURRENT, MemoryKind.HYBRID]
)
@pytest.mark.parametrize("n_rows_done", [0, 1, 2, 3])
@pytest.mark.parametrize("at_step", [2, 3, 6])
async def test_survivors_of_an_aborted_step(kind: MemoryKind, n_rows_done: int, at_step: int):
    """R3: whatever part of an aborted step reached memory, everybody's ids are as without it."""
    prompts = ["a" * 200, "b" * 5, "c" * 150]
    backend = FakeBackend(n_slots=3, memory_kind=kind)

    def abort_once(step):
        if len(backend.steps) != at_step:
            return None
        for row in step.rows[:n_rows_done]:
            backend._remember(row)
        return StepResult(status=StepStatus.ABORTED, rc=2)

    backend.before_step = abort_once
    async with serving(backend) as bench:
        answers = await bench.complete_all(prompts, max_tokens=12, seed=4)
        s = bench.actor.statistics()
        assert (s.n_aborted_steps, s.n_rebuilt) == (1, 0)
        await bench.wait_idle()
    assert ids_of(answers) == ids_of(await alone(prompts, max_tokens=12, seed=4))


async def test_only_memory_that_cannot_be_cut_is_computed_again():
    """R3: a decode row that reached memory is cut off dense memory; recurrent memory starts afresh."""
    n_prefilled = {}
    for kind in (MemoryKind.DENSE, MemoryKind.WINDOW, MemoryKind.RECURRENT, MemoryKind.HYBRID):
        backend = FakeBackend(memory_kind=kind)

        def abort_once(step, backend=backend):
            if len(backend.steps) != 5:
                return None
            backend._remember(step.rows[0])
            return StepResult(status=StepStatus.ABORTED, rc=2)

        backend.before_step = abort_once
        async with serving(backend) as bench:
            await bench.complete("d" * 100, max_tokens=10)
        rows = [row for step in backend.steps for row in step.rows]
        n_prefilled[kind.value] = sum(len(row.tokens) for row in rows if row.sampler is None)
    assert n_prefilled == {"dense": 99, "window": 99, "recurrent": 99 + 102, "hybrid": 99 + 102}
