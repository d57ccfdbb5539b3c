"""Sessions on the arithmetic model: what is held, what is computed, who has to go."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import erllama
from erllama import (
    ContextOptions,
    DecodeFailed,
    EngineReset,
    InvalidContent,
    InvalidOption,
    MissingOption,
    NoSession,
    NotLoaded,
    NotSupported,
    SavePolicy,
    SeqCapacity,
    StickyBusy,
    TranscriptMismatch,
)
from erllama.backend import BackendFacts, MemoryKind, StepResult, StepStatus
from erllama.kvcache.match import Lease
from erllama.kvcache.store import KvStore
from erllama.testing import FakeBackend

from .scenes import wait_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from erllama import Completion, Model

NOTHING_SAVED = SavePolicy(min_tokens=10_000)


class Greedy(FakeBackend):
    """Takes the likeliest token unless told otherwise, so that equal histories give equal answers."""

    def open(self) -> BackendFacts:
        return dataclasses.replace(super().open(), sampling_defaults={"temperature": 0.0})


@asynccontextmanager
async def held(
    n_slots: int = 4, policy: SavePolicy = NOTHING_SAVED, **fake: object
) -> AsyncIterator[tuple[Model, FakeBackend]]:
    """A model with that many sequences and the fake behind it; nothing goes to the store by default."""
    backend = Greedy(n_slots=n_slots, **fake)
    with trio.fail_after(240):
        async with erllama.open_engine() as engine:
            context = ContextOptions(n_ctx=4096, n_seq_max=n_slots)
            yield (
                await engine.load_model(backend=backend, model_id="m", policy=policy, context=context),
                backend,
            )


def turn(answer: Completion, text: str) -> list[int]:
    """The transcript so far and what the user says next."""
    return [*answer.context_tokens, *text.encode()]


def rows_since(backend: FakeBackend, step: int) -> int:
    """Tokens fed to the model since that many steps."""
    return sum(s.n_tokens for s in backend.steps[step:])


async def fresh(prompt: str | list[int], **generation: object) -> list[int]:
    """What a model without any history says."""
    async with held(1) as (model, _):
        return (await model.complete(prompt, **generation)).generated


# --- the next turn ---


async def test_the_next_turn_goes_on_in_its_own_cells(monkeypatch: pytest.MonkeyPatch):
    """S1: only what is new is computed, in the same slot, and the store is neither read nor searched."""
    searched: list[object] = []
    policy = SavePolicy(min_tokens=8, cold_min_tokens=8, block_tokens=8)
    async with held(policy=policy) as (model, backend):
        first = await model.complete("Hello, who are you?", session_id="s", max_tokens=8)
        await model.handle.actor.wait_saved()
        prompt = turn(first, " And what else?")
        n_steps = len(backend.steps)
        with monkeypatch.context() as patch:
            patch.setattr(KvStore, "find", lambda *a, **k: searched.append(a))
            patch.setattr(Lease, "load", lambda *a, **k: searched.append(a))
            second = await model.complete(prompt, session_id="s", max_tokens=1)
        assert second.cache_hit_kind == "sticky"
        assert rows_since(backend, n_steps) == len(" And what else?") + 1  # the pending token
        assert second.cache_delta.read == len(first.context_tokens) - 1
        assert {row.slot for step in backend.steps for row in step.rows} == {0}
        assert second.generated == await fresh(prompt, max_tokens=1)
        assert searched == []


async def test_a_turn_that_parts_in_the_answer_is_cut_back():
    """S1: a client that tokenises the answer anew, or asks again, still goes on from its prompt."""
    async with held() as (model, _):
        first = await model.complete("A question of some length", session_id="s", max_tokens=8)
        other = [*first.context_tokens[: first.stats.n_prompt + 3], *b" something else"]
        answer = await model.complete(other, session_id="s", max_tokens=4)
        assert answer.cache_hit_kind == "sticky"
        assert answer.stats.n_cached == first.stats.n_prompt + 3
        assert answer.generated == await fresh(other, max_tokens=4)
        again = await model.complete("A question of some length", session_id="s", max_tokens=4)
        assert (again.cache_hit_kind, again.stats.n_computed) == ("sticky", 1)
        assert again.generated == first.generated[:4]
        shorter = await model.complete("A question", session_id="s", max_tokens=4)
        assert (shorter.cache_hit_kind, shorter.stats.n_computed) == ("sticky", 1)
        assert shorter.generated == await fresh("A question", max_tokens=4)
        assert model.info().pinned_idle_seqs == 1


@pytest.mark.parametrize("prompt", ["Something else", "A question of another kind"])
async def test_a_diverging_prompt_takes_the_ordinary_path(prompt: str):
    """S2: the pin is given up, the kind is not sticky, the answer is a fresh run's."""
    async with held() as (model, _):
        await model.complete("A question of some length", session_id="s", max_tokens=4)
        answer = await model.complete(prompt, session_id="s", max_tokens=4)
        assert answer.cache_hit_kind == ("cold" if prompt[0] == "S" else "partial")
        assert answer.generated == await fresh(prompt, max_tokens=4)
        assert model.info().pinned_idle_seqs == 1
        assert model.info().available_seqs == 3


async def test_a_longer_match_elsewhere_wins():
    """K22: what another sequence has of the prompt is more than the session's own: the longer is used."""
    async with held() as (model, _):
        await model.complete("The same head. And more of it", session_id="other", max_tokens=1)
        await model.complete("The same head.", session_id="s", max_tokens=1)
        answer = await model.complete("The same head. And more of it, then", session_id="s", max_tokens=2)
        assert answer.cache_hit_kind == "partial"
        assert answer.stats.n_cached == len("The same head. And more of it")
        assert answer.generated == await fresh("The same head. And more of it, then", max_tokens=2)


async def test_a_longer_match_in_the_store_wins():
    """K22: the session holds the head, the store more of the prompt: the rest is restored."""
    async with held(2, SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=32)) as (model, _):
        long = "x" * 100 + "y" * 100
        await model.complete(long, max_tokens=1)
        await model.handle.actor.wait_saved()
        await model.complete("x" * 40, session_id="s", max_tokens=1)
        await model.complete("other", session_id="t", max_tokens=1)
        answer = await model.complete(long + "z", session_id="s", max_tokens=2)
        assert answer.stats.n_cached == 200
        assert (answer.cache_hit_kind, answer.cache_source) == ("exact", "ram")
        assert answer.generated == await fresh(long + "z", max_tokens=2)


async def test_a_session_has_one_turn_at_a_time():
    """S3: a second request of the session is refused while the first waits or runs, continuations too."""
    async with held() as (model, _), model.stream("p", session_id="s", max_tokens=500):
        for refused in (model.complete("q", session_id="s"), model.continue_("q", session_id="s")):
            with pytest.raises(StickyBusy, match="'s'"):
                await refused
        await model.complete("q", session_id="t", max_tokens=1)


async def test_any_hashable_value_names_a_session():
    """S1: tuples, numbers and bytes are as good as text."""
    async with held() as (model, _):
        for session_id in (("user", 7), 42, b"raw", frozenset({1})):
            first = await model.complete(f"{session_id} says", session_id=session_id, max_tokens=2)
            second = await model.complete(turn(first, "!"), session_id=session_id, max_tokens=1)
            assert second.cache_hit_kind == "sticky"


async def test_a_cancelled_turn_keeps_what_was_computed():
    """X6: leaving a stream in the middle leaves the session where it was, pending token included."""
    async with held() as (model, backend):
        async with model.stream("Tell me a story", session_id="s", max_tokens=500) as events:
            for _ in range(10):
                await anext(events)
        await wait_idle(model)
        n_steps = len(backend.steps)
        answer = await model.continue_("", session_id="s", max_tokens=1)
        assert (answer.cache_hit_kind, rows_since(backend, n_steps)) == ("continuation", 1)


@pytest.mark.parametrize("cache", ["read", "off"])
async def test_a_turn_that_keeps_nothing_leaves_its_session_as_it_was(cache: str):
    """X26: a request that is to leave no trace leaves none in its session."""
    async with held(2) as (model, _):
        first = await model.complete("Hello there", session_id="s", max_tokens=2)
        aside = await model.complete(turn(first, "?"), session_id="s", cache=cache, max_tokens=2)
        assert aside.cache_hit_kind == ("partial" if cache == "read" else "cold")
        answer = await model.continue_(
            "!", session_id="s", max_tokens=2, expect_committed=first.context_tokens
        )
        assert answer.generated == await fresh(turn(first, "!"), max_tokens=2)


async def test_a_turn_that_keeps_nothing_may_take_its_sessions_only_slot():
    """Nothing waits for ever: with one slot, the pin goes."""
    async with held(1) as (model, _):
        await model.complete("Hello there", session_id="s", max_tokens=2)
        answer = await model.complete("Other words", session_id="s", cache="off", max_tokens=2)
        assert answer.generated == await fresh("Other words", max_tokens=2)
        with pytest.raises(NoSession):
            await model.continue_("!", session_id="s")


# --- ends ---


async def test_ending_a_session_gives_its_sequence_back():
    """S4: available_seqs grows by one; again, or for an unknown session, nothing happens."""
    async with held() as (model, _):
        await model.complete("Hello", session_id="s", max_tokens=2)
        assert model.info().available_seqs == 3
        for _ in range(2):
            await model.end_session("s")
            assert (model.info().available_seqs, model.info().pinned_idle_seqs) == (4, 0)
        await model.end_session("unknown")
        with pytest.raises(NoSession):
            await model.continue_("x", session_id="s")
        again = await model.complete("Hello", max_tokens=1)
        assert again.cache_hit_kind == "exact"  # its cells may still be shared
    with pytest.raises(NotLoaded):
        await model.end_session("s")


async def test_ending_a_session_in_flight_lets_its_turn_finish():
    """S4: the answer comes whole, and is not held after."""
    async with held() as (model, _), model.stream("Hello", session_id="s", max_tokens=20) as events:
        await anext(events)
        await model.end_session("s")
        assert (await erllama.collect(events)).finish_reason == "length"
        assert (model.info().available_seqs, model.info().pinned_idle_seqs) == (4, 0)


async def test_a_reset_drops_cells_and_request():
    """S12: what is held is gone, whether a turn was in flight or not, and the next turn is cold."""
    async with held() as (model, _):
        await model.complete("Hello there", session_id="s", max_tokens=2)
        assert await model.reset_session("s") == "recovered"
        assert await model.reset_session("s") == "not_found"
        assert (await model.complete("Hello there", max_tokens=1)).cache_hit_kind == "cold"
        async with model.stream("A story please", session_id="s", max_tokens=500) as events:
            await anext(events)
            assert await model.reset_session("s") == "recovered"
            with pytest.raises(EngineReset):
                await erllama.collect(events)
        assert await model.reset_session("s") == "not_found"
        assert model.info().available_seqs == 4
        assert (await model.complete("A story please", max_tokens=1)).cache_hit_kind == "cold"


async def test_a_rebuilt_context_holds_no_session():
    """S13: continuing says no_session, an ordinary request is admitted again."""
    async with held() as (model, backend):
        first = await model.complete("Hello", session_id="s", max_tokens=2)
        backend.before_step = lambda _: StepResult(status=StepStatus.FATAL, rc=-3)
        with pytest.raises(DecodeFailed):
            await model.complete("x")
        backend.before_step = None
        with pytest.raises(NoSession):
            await model.continue_("!", session_id="s")
        assert model.info().pinned_idle_seqs == 0
        answer = await model.complete(turn(first, "!"), session_id="s", max_tokens=2)
        assert answer.cache_hit_kind == "cold"
        assert answer.generated == await fresh(turn(first, "!"), max_tokens=2)


# --- room ---


async def test_counts_of_sequences():
    """S6, M10: after two turns on 4 sequences 2 are available and 2 held; during a third 1 and 2."""
    async with held() as (model, _):
        assert model.info().last_cache_hit is None
        for session_id in "ab":
            await model.complete(f"Hello {session_id}", session_id=session_id, max_tokens=1)
        info = model.info()
        assert (info.n_seq_max, info.available_seqs, info.pinned_idle_seqs) == (4, 2, 2)
        assert (info.phase, info.pending_len, info.last_cache_hit) == ("idle", 0, model.last_cache_hit())
        async with model.stream("long", max_tokens=500) as events:
            await anext(events)
            info = model.info()
            assert (info.available_seqs, info.pinned_idle_seqs, info.phase) == (1, 2, "generating")


async def test_ten_thousand_sessions_on_two_sequences():
    """S5: each succeeds, and never more than two are held."""
    async with held(2) as (model, _):
        for i in range(10_000):
            await model.complete([i % 250, i // 250], session_id=i, max_tokens=1)
            assert model.info().pinned_idle_seqs <= 2
        assert len(model.handle.actor._lanes.residents) == 2


async def test_the_session_unused_for_longest_goes_first():
    """S5: a is used again after b, so b makes room; with both used the oldest again."""
    async with held(2) as (model, _):
        a = await model.complete("session a", session_id="a", max_tokens=1)
        await model.complete("another b", session_id="b", max_tokens=1)
        await model.complete(turn(a, "!"), session_id="a", max_tokens=1)
        await model.complete("fresh", session_id="c", max_tokens=1)
        with pytest.raises(NoSession):
            await model.continue_("?", session_id="b")
        assert (await model.continue_("?", session_id="a", max_tokens=1)).cache_hit_kind == "continuation"


async def test_what_no_session_holds_goes_first():
    """S5: an ordinary resident makes room before an older pin does, for slots and for cells."""
    async with held(2, n_cells=300) as (model, _):
        await model.complete("a" * 100, session_id="a", max_tokens=1)
        await model.complete("b" * 100, max_tokens=1)
        await model.complete("c" * 150, max_tokens=1)  # b's slot
        assert (await model.continue_("!", session_id="a", max_tokens=1)).cache_hit_kind == "continuation"
        assert (await model.complete("d" * 190, max_tokens=1)).finish_reason == "length"  # c's slot and cells
        assert (await model.continue_("!", session_id="a", max_tokens=1)).cache_hit_kind == "continuation"
        await model.complete("e" * 280, max_tokens=1)  # nothing else is left
        with pytest.raises(NoSession):
            await model.continue_("!", session_id="a")


async def test_waiting_sessions_keep_their_slots_and_all_get_on(autojump_clock: object):
    """S5: a stranger queued before the turns of two held sessions lets them pass rather than rob them."""
    async with held(3, step_delay_s=0.1) as (model, _):
        firsts = {s: await model.complete(f"{s} session", session_id=s, max_tokens=1) for s in "ab"}
        kinds: dict[str, str] = {}

        async def ask(name: str, prompt: str | list[int], session_id: str | None) -> None:
            kinds[name] = (await model.complete(prompt, session_id=session_id, max_tokens=3)).cache_hit_kind

        async with model.stream("busy", max_tokens=50) as busy, trio.open_nursery() as nursery:
            await anext(busy)  # a step of a tenth of a second runs; whoever comes meanwhile is queued
            for name, prompt, session_id in (
                ("stranger", "new words", None),
                *((s, turn(first, "!"), s) for s, first in firsts.items()),
            ):
                nursery.start_soon(ask, name, prompt, session_id)
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            assert model.pending_len() == 3
            assert model.info().pinned_idle_seqs == 0  # both have a turn in flight
        assert kinds == {"a": "sticky", "b": "sticky", "stranger": "cold"}
        assert list(kinds)[-1] != "a"  # the first turn to end made room for the stranger


async def test_on_full_error_takes_a_held_sequence_back():
    """S5, G18: seq_capacity arises only when every sequence is truly active."""
    async with held(2) as (model, _):
        for s in "ab":
            await model.complete(f"{s} session", session_id=s, max_tokens=1)
        async with model.stream("one", max_tokens=500, on_full="error") as one:
            await anext(one)
            async with model.stream("two", max_tokens=500, on_full="error") as two:
                await anext(two)
                for refused in (
                    model.complete("three", on_full="error"),
                    model.prefill_only("three", on_full="error"),
                ):
                    with pytest.raises(SeqCapacity):
                        await refused


async def test_a_reclaimed_session_goes_on_from_the_store():
    """S7: its next turn is answered as an uninterrupted run, from what was saved."""
    policy = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16)
    async with held(1, policy) as (model, _):
        first = await model.complete("a question that is long enough", session_id="s", max_tokens=4)
        await model.complete("other " * 20, session_id="t", max_tokens=1)
        answer = await model.complete(turn(first, " more"), session_id="s", max_tokens=4)
        assert answer.cache_hit_kind == "partial"
        assert answer.cache_source == "ram"
        assert answer.generated == await fresh(turn(first, " more"), max_tokens=4)


async def test_separate_memory_holds_nothing_and_says_so():
    """Where ranges cannot be cut there are no sessions: cold every time, and continuing is refused."""
    for fake in ({"streams_separate": True}, {"memory_kind": MemoryKind.WHOLE}):
        async with held(**fake) as (model, _):
            first = await model.complete("Hello", session_id="s", max_tokens=2)
            second = await model.complete(turn(first, "!"), session_id="s", max_tokens=2)
            assert (second.cache_hit_kind, second.miss.reason) == ("cold", "not_cached")
            assert model.info().pinned_idle_seqs == 0
            with pytest.raises(NotSupported):
                await model.continue_("x", session_id="s")
            with pytest.raises(NotSupported):
                await model.pin("x")
            assert model.cached_prefix_len("Hello") == 0


# --- continuing ---


async def test_continuing_computes_the_tail_and_looks_nothing_up(monkeypatch: pytest.MonkeyPatch):
    """S8: rows are the tail and the pending token; what was there before counts as read."""
    looked_up: list[object] = []
    async with held(policy=SavePolicy(min_tokens=8, cold_min_tokens=8, block_tokens=8)) as (model, backend):
        first = await model.complete("Hello, who are you?", session_id="s", max_tokens=8)
        await model.handle.actor.wait_saved()
        n_steps = len(backend.steps)
        tail = " And more of that, please"
        with monkeypatch.context() as patch:
            for name in ("find", "peek"):
                patch.setattr(KvStore, name, lambda *a, **k: looked_up.append(a) or (0, 0))
            answer = await model.continue_(tail, session_id="s", max_tokens=4)
        assert looked_up == []
        assert answer.cache_hit_kind == "continuation"
        assert rows_since(backend, n_steps) == 1 + len(tail) + 3
        assert answer.cache_delta.read == len(first.context_tokens) - 1
        assert answer.context_tokens[: -len(answer.generated)] == turn(first, tail)
        assert answer.generated == await fresh(turn(first, tail), max_tokens=4)
        assert model.last_cache_hit() == erllama.CacheHit(
            kind="continuation", n_tokens=len(first.context_tokens) - 1
        )


async def test_continuing_as_a_stream():
    """S8: the same events as any stream; the completion is the whole transcript's."""
    async with held() as (model, _):
        first = await model.complete("Hello", session_id="s", max_tokens=3)
        async with model.continue_stream(list(b" you"), session_id="s", max_tokens=3) as events:
            seen = [event async for event in events]
        ids = [event.id for event in seen if isinstance(event, erllama.TokenId)]
        done = seen[-1].completion
        assert done.generated == ids == await fresh(turn(first, " you"), max_tokens=3)


async def test_an_empty_tail_goes_on_with_the_answer():
    """S8: three tokens and three more are the six that one request would have given, seeds aside."""
    async with held() as (model, backend):
        await model.prefill_only("Hello", session_id="s")
        n_steps = len(backend.steps)
        answer = await model.continue_([], session_id="s", max_tokens=4)
        assert rows_since(backend, n_steps) == 4  # nothing was pending: the last token gives the first draw
        assert answer.generated == await fresh("Hello", max_tokens=4)


async def test_what_continuing_needs():
    """S9: no session named, an unknown one, one in flight; options that contradict it."""
    async with held() as (model, backend):
        with pytest.raises(MissingOption) as missing:
            await model.continue_("x")
        assert missing.value.detail == "session_id"
        with pytest.raises(NoSession):
            await model.continue_("x", session_id="unknown")
        await model.complete("Hello", session_id="s", max_tokens=1)
        n_steps = len(backend.steps)
        for cache in ("read", "off"):
            with pytest.raises(InvalidOption) as invalid:
                await model.continue_("x", session_id="s", cache=cache)
            assert invalid.value.detail["key"] == "cache"
        with pytest.raises(InvalidContent):
            await model.continue_([9999], session_id="s")
        with pytest.raises(erllama.ContextOverflow):
            await model.continue_("x" * 5000, session_id="s")
        assert len(backend.steps) == n_steps
        assert backend.live_samplers == set()
        assert (await model.continue_("x", session_id="s", max_tokens=1)).cache_hit_kind == "continuation"


async def test_an_expected_history_is_compared_token_by_token():
    """S10: where it differs nothing is computed, the session stays, and a corrected call succeeds."""
    async with held() as (model, backend):
        first = await model.complete("Hello there", session_id="s", max_tokens=4)
        good = first.context_tokens
        n_steps = len(backend.steps)
        wrong = [*good[:7], good[7] + 1, *good[8:]]
        for expected, at in ((wrong, 7), (good[:-1], len(good) - 1), ([*good, 1], len(good)), ([], 0)):
            with pytest.raises(TranscriptMismatch) as caught:
                await model.continue_("!", session_id="s", expect_committed=expected)
            assert caught.value.detail == {
                "stored_len": len(good),
                "expected_len": len(expected),
                "diverge_at": at,
            }
        assert len(backend.steps) == n_steps
        assert backend.live_samplers == set()
        answer = await model.continue_("!", session_id="s", expect_committed=good, max_tokens=2)
        assert answer.generated == await fresh(turn(first, "!"), max_tokens=2)


async def test_a_continuation_honours_grammar_and_stop():
    """S11: grammar, stop strings and sampling as in a first turn."""
    async with held(script=lambda text: b"one two three") as (model, _):
        await model.complete("Hello", session_id="s", max_tokens=2)
        answer = await model.continue_("!", session_id="s", stop=" two", max_tokens=50)
        assert (answer.reply, answer.stop_sequence) == ("one", " two")
    async with held() as (model, _):
        first = await model.complete("Hello", session_id="s", max_tokens=2)
        options = {"grammar": "root ::= digits", "seed": 7, "temperature": 0.9, "max_tokens": 6}
        answer = await model.continue_("!", session_id="s", **options)
        assert answer.reply.isdigit()
        assert answer.generated == await fresh(turn(first, "!"), **options)


async def test_many_continuations_equal_one_long_history():
    """S8: twenty turns, never a token computed twice."""
    async with held() as (model, _):
        answer = await model.complete("Begin", session_id="s", max_tokens=3)
        for i in range(20):
            prompt = turn(answer, f" turn {i}")
            answer = await model.continue_(
                f" turn {i}", session_id="s", max_tokens=3, expect_committed=answer.context_tokens
            )
            assert answer.generated == await fresh(prompt, max_tokens=3)
        n = model.statistics()
        assert n.n_prefill_tokens + n.n_decode_rows == len(answer.context_tokens) - 1
