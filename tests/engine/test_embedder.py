"""Embedding beside generating, on arithmetic: what is shared, what is refused, who leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from erllama.backend import EmbedResult, StepStatus
from erllama.engine.embed_plan import Portion, plan_portions
from erllama.errors import (
    BatchOverflow,
    ContextOverflow,
    DecodeAborted,
    DecodeFailed,
    DecodeTimeout,
    EngineError,
    InvalidContent,
    NativeError,
    NotLoaded,
    NotSupported,
)
from erllama.testing import FakeBackend, FakeEmbedder, fake_vector
from erllama.types import EmbeddingFacts

from .scenes import serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.backend import EmbedRow

N_EMBD = 8


def fake(*, n_rows: int = 64, n_lanes: int = 4, n_ctx: int = 200, whole: bool = False) -> FakeEmbedder:
    facts = EmbeddingFacts(
        n_embd=N_EMBD, pooling="mean", n_ctx=n_ctx, n_rows=n_rows, n_lanes=n_lanes, whole=whole
    )
    return FakeEmbedder(facts)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed) % 256 for i in range(n)]


async def test_ten_inputs_are_one_request_in_order() -> None:
    """A7: one trip, vectors in the order of the inputs, each what it is alone; lanes and rows are shared."""
    inputs = [tokens(n + 1, n) for n in range(10)]
    async with serving(FakeBackend(embedder=fake())) as bench:
        embedder = bench.handle.embedder
        assert embedder is not None
        vectors = await embedder.embed(inputs)
        assert vectors.shape == (10, N_EMBD)
        assert vectors.dtype == np.float32
        assert embedder.statistics().n_requests == 1
        assert embedder.statistics().n_calls == 3  # four lanes
        for vector, ids in zip(vectors, inputs, strict=True):
            assert (vector == fake_vector(ids, N_EMBD)).all()
            assert (vector == (await embedder.embed([ids]))[0]).all()
        assert (await embedder.embed([])).shape == (0, N_EMBD)


async def test_long_inputs_are_computed_in_pieces() -> None:
    """An input may be as long as the context where it need not be whole."""
    backend = FakeBackend(embedder=fake(n_rows=16))
    async with serving(backend) as bench:
        ids = tokens(50)
        assert ((await bench.handle.embedder.embed([ids, ids[:3]]))[0] == fake_vector(ids, N_EMBD)).all()
        assert [[len(row.tokens) for row in call] for call in backend.embedder.calls] == [
            [16], [16], [16], [2], [3]
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "ids", "error"),
    [
        (True, tokens(65), BatchOverflow),
        (True, tokens(201), ContextOverflow),
        (False, tokens(201), ContextOverflow),
        (False, [], InvalidContent),
        (False, [1, 999], InvalidContent),
        (False, [-1], InvalidContent),
    ],
)
async def test_what_cannot_be_embedded_is_refused_before_anything_is_computed(
    whole: bool, ids: list[int], error: type[Exception]
) -> None:
    """R6: with both lengths in it, and the inputs beside it are not computed either."""
    backend = FakeBackend(embedder=fake(whole=whole))
    async with serving(backend) as bench:
        with pytest.raises(error) as caught:
            await bench.handle.embedder.embed([[1], ids])
        assert "input 1" in str(caught.value)
        if error is BatchOverflow:
            assert caught.value.detail == {"index": 1, "n_tokens": 65, "n_ubatch": 64}
        assert backend.embedder.calls == []
        longest = tokens(64 if whole else 200)
        assert (await bench.handle.embedder.embed([longest])).shape == (1, N_EMBD)


async def test_a_call_looks_at_no_more_inputs_than_it_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, planning one costs the same."""
    seen: list[int] = []

    def noting(inputs: Sequence[tuple[int, int]], facts: EmbeddingFacts, n_most: int) -> list[Portion]:
        seen.append(len(inputs))
        return plan_portions(inputs, facts, n_most)

    monkeypatch.setattr("erllama.engine.embedder.plan_portions", noting)
    async with serving(FakeBackend(embedder=fake(n_lanes=4))) as bench:
        vectors = await bench.handle.embedder.embed([tokens(3, seed) for seed in range(50)])
    assert all((vectors[seed] == fake_vector(tokens(3, seed), N_EMBD)).all() for seed in range(50))
    assert seen == [4] * 12 + [2]


async def test_clients_share_calls() -> None:
    """What waits at the same moment is computed together."""
    backend = FakeBackend(embedder=fake())
    async with serving(backend) as bench, trio.open_nursery() as nursery:
        for seed in range(3):
            nursery.start_soon(bench.handle.embedder.embed, [tokens(5, seed)])
    assert [len(call) for call in backend.embedder.calls] == [3]


async def test_streams_go_on_between_calls() -> None:
    """While somebody generates, a call is no longer than a piece of a prompt, and steps come in between."""
    backend = FakeBackend(embedder=fake(n_rows=512, n_ctx=4096, n_lanes=8), n_slots=2)
    n_steps: list[int] = []  # before each call
    backend.embedder.before_call = lambda _: n_steps.append(len(backend.steps))
    async with serving(backend, prefill_chunk_size=64) as bench:
        async with bench.stream("a prompt", max_tokens=40) as events, trio.open_nursery() as nursery:

            async def embed() -> None:
                await bench.handle.embedder.embed([tokens(60, seed) for seed in range(8)])

            await anext(events)
            nursery.start_soon(embed)
            async for _ in events:
                await trio.lowlevel.checkpoint()
        assert max(sum(len(row.tokens) for row in call) for call in backend.embedder.calls) <= 64
        assert len(n_steps) == len(set(n_steps)) == 8
        await bench.wait_idle()


async def test_who_leaves_ends_only_its_own(autojump_clock: trio.testing.MockClock) -> None:
    """Inputs of a client that left are not computed; those of others are."""
    backend = FakeBackend(embedder=fake(n_lanes=1))
    async with serving(backend) as bench:
        embedder = bench.handle.embedder
        with trio.CancelScope() as scope:
            scope.cancel()
            await embedder.embed([tokens(5)] * 3)
        assert scope.cancelled_caught
        assert (await embedder.embed([tokens(6)])).shape == (1, N_EMBD)
        assert embedder.statistics().n_waiting == 0
        assert [len(call[0].tokens) for call in backend.embedder.calls][-1] == 6


async def test_a_call_that_nobody_wants_is_aborted() -> None:
    """The native call ends early, and the next one is not touched by that."""
    embedder = fake()
    embedder.delay_s = 120
    backend = FakeBackend(embedder=embedder, threaded=True)
    async with serving(backend) as bench:
        with trio.move_on_after(0.05) as scope:
            await bench.handle.embedder.embed([tokens(5)])
        assert scope.cancelled_caught
        embedder.delay_s = 0
        with trio.fail_after(60):
            vectors = await bench.handle.embedder.embed([tokens(6)])
        assert (vectors[0] == fake_vector(tokens(6), N_EMBD)).all()
        assert bench.handle.embedder.statistics().n_aborted_calls == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (StepStatus.FATAL, DecodeFailed),
        (StepStatus.TIMEOUT, DecodeTimeout),
        (StepStatus.ABORTED, DecodeAborted),
        (StepStatus.NO_ROOM, DecodeFailed),
    ],
)
async def test_a_failing_call_fails_those_in_it(status: StepStatus, error: type[Exception]) -> None:
    """With a typed error; whoever comes next is computed."""
    embedder = fake()
    async with serving(FakeBackend(embedder=embedder)) as bench:
        embedder.before_call = lambda rows: EmbedResult(status=status, rc=-3)
        with pytest.raises(error):
            await bench.handle.embedder.embed([tokens(5)])
        embedder.before_call = None
        assert (await bench.handle.embedder.embed([tokens(5)])).shape == (1, N_EMBD)


@pytest.mark.parametrize(("configured", "budget_s"), [(None, None), (0, None), (1.5, 1.5)])
async def test_each_call_carries_its_budget(configured: float | None, budget_s: float | None) -> None:
    """Neither None nor 0 is a limit here."""

    class Noting(FakeEmbedder):
        def embed(self, rows: Sequence[EmbedRow], budget_s: float | None = None) -> EmbedResult:
            budgets.append(budget_s)
            return super().embed(rows, budget_s)

    budgets: list[float | None] = []
    async with serving(FakeBackend(embedder=Noting(fake().facts)), decode_budget_s=configured) as bench:
        await bench.handle.embedder.embed([tokens(5)])
    assert budgets == [budget_s]


async def test_one_unasked_abort_is_not_noticed() -> None:
    """The call is made again."""
    answers = [EmbedResult(status=StepStatus.ABORTED)]
    embedder = fake()
    embedder.before_call = lambda rows: answers.pop() if answers else None
    async with serving(FakeBackend(embedder=embedder)) as bench:
        vectors = await bench.handle.embedder.embed([tokens(5)])
        assert (vectors[0] == fake_vector(tokens(5), N_EMBD)).all()


async def test_errors_and_odd_numbers_are_their_own() -> None:
    """An exception out of the backend, or a vector that is not finite, is an error to who asked."""

    def odd(rows: list[EmbedRow]) -> EmbedResult:
        return EmbedResult(status=StepStatus.OK, vectors=(np.full(N_EMBD, np.nan, np.float32),))

    def broken(rows: list[EmbedRow]) -> EmbedResult:
        raise NativeError("vector::_M_range_check")

    embedder = fake()
    async with serving(FakeBackend(embedder=embedder)) as bench:
        for answer, error in ((odd, EngineError), (broken, NativeError)):
            embedder.before_call = answer
            with pytest.raises(error):
                await bench.handle.embedder.embed([tokens(5)])
        embedder.before_call = None
        await bench.handle.embedder.embed([tokens(5)])
        assert (await bench.complete("still there", max_tokens=2)).generated


async def test_unloading_ends_those_who_wait() -> None:
    """`NotLoaded`, and nobody hangs."""
    embedder = fake()
    embedder.delay_s = 120
    errors: list[Exception] = []
    async with serving(FakeBackend(embedder=embedder, threaded=True)) as bench:

        async def ask() -> None:
            with pytest.raises(NotLoaded) as caught:
                await bench.handle.embedder.embed([tokens(5)])
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.02)
            bench.handle.stop()
        with pytest.raises(NotLoaded):
            await bench.handle.embedder.embed([tokens(5)])
    assert len(errors) == 1


async def test_a_model_that_only_embeds_generates_nothing() -> None:
    """A typed error, before anything is computed."""
    backend = FakeBackend(embedder=fake(), generates=False)
    async with serving(backend) as bench:
        with pytest.raises(NotSupported, match="only embeds"):
            await bench.complete("hello")
        assert backend.steps == []
