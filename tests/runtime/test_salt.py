"""Salts: requests under different ones share no KV, in memory or in the store, and no session."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, EngineReset, InvalidOption, NoSession, SavePolicy, StickyBusy, collect
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from erllama import Model

PROMPT = "A prompt that everybody has, word for word. " * 12
KEPT = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=16)
NOTHING_SAVED = SavePolicy(min_tokens=10_000, cold_min_tokens=10_000)


@asynccontextmanager
async def salted(policy: SavePolicy, **fake: object) -> AsyncIterator[Model]:
    """A model with four sequences, unless told otherwise."""
    backend = FakeBackend(**{"n_slots": 4, **fake})
    with trio.fail_after(240):
        async with erllama.open_engine() as engine:
            context = ContextOptions(n_ctx=4096)
            yield await engine.load_model(backend=backend, model_id="m", context=context, policy=policy)


async def ask(model: Model, **options: object) -> erllama.Completion:
    """The prompt again."""
    return await model.complete(PROMPT, max_tokens=4, **options)


async def test_what_is_in_memory_is_found_under_its_own_salt_only() -> None:
    """Residents of one salt give nothing to another, nor to who has none, and answers are the same."""
    async with salted(NOTHING_SAVED) as model:
        first = await ask(model, salt=b"a", temperature=0.0)
        other = await ask(model, salt=b"b", temperature=0.0)
        without = await ask(model, temperature=0.0)
        again = await ask(model, salt=b"a", temperature=0.0)
    n_all = first.stats.n_prompt - 1
    assert [r.stats.n_cached for r in (first, other, without, again)] == [0, 0, 0, n_all]
    assert first.generated == other.generated == without.generated == again.generated


async def test_what_is_stored_is_found_under_its_own_salt_only() -> None:
    """There is one sequence, and others take it in between, so everything comes from the store."""
    async with salted(KEPT, n_slots=1) as model:
        await ask(model, salt=b"a")
        await model.handle.actor.wait_saved()
        await model.complete("x" * 300, max_tokens=1, cache="off")
        other = await ask(model, salt=b"b")
        await model.complete("x" * 300, max_tokens=1, cache="off")
        again = await ask(model, salt=b"a")
        assert (other.stats.n_cached, other.cache_source) == (0, None)
        assert (again.stats.n_cached, again.cache_source) == (again.stats.n_prompt - 1, "ram")


async def test_those_who_run_together_share_under_one_salt_only() -> None:
    """Four at once, two of each salt: the prompt is computed twice, once for each."""
    async with salted(KEPT) as model:
        async with trio.open_nursery() as nursery:
            for salt in (b"a", b"b", b"a", b"b"):
                nursery.start_soon(lambda s=salt: ask(model, salt=s))
        n_prompt = len(PROMPT)
        assert model.statistics().n_prefill_tokens == 2 * (n_prompt - 1)


async def test_a_session_goes_on_under_its_own_salt_only() -> None:
    """Who has another one is told that there is none; its prompt runs cold, and neither ends the other's."""
    async with salted(KEPT) as model:
        await ask(model, salt=b"a", session_id="s")
        with pytest.raises(NoSession):
            await model.continue_(" more", session_id="s", salt=b"b")
        with pytest.raises(NoSession):
            await model.continue_(" more", session_id="s")
        went_on = await model.continue_(" more", session_id="s", salt=b"a", max_tokens=2)
        assert went_on.cache_hit_kind == "continuation"
        other = await ask(model, salt=b"b", session_id="s")
        assert other.stats.n_cached == 0
        assert (await model.continue_(" more", session_id="s", salt=b"a", max_tokens=2)).stats.n_cached > 0
        assert (await model.continue_(" more", session_id="s", salt=b"b", max_tokens=2)).stats.n_cached > 0


async def test_an_id_that_is_taken_under_one_salt_is_free_under_another() -> None:
    """Nobody is refused, ended or reset because of who has the same id under another salt."""
    async with (
        salted(KEPT) as model,
        model.stream(PROMPT, salt=b"a", session_id="s", max_tokens=500) as events,
    ):
        await anext(events)
        with pytest.raises(StickyBusy):
            await ask(model, salt=b"a", session_id="s")
        for salt in (b"b", b""):
            await ask(model, salt=salt, session_id="s")
        await model.end_session("s")
        with pytest.raises(NoSession):
            await model.continue_(" more", session_id="s")
        assert await model.reset_session("s", salt=b"b") == "recovered"
        assert await model.reset_session("s", salt=b"b") == "not_found"
        await anext(events)
        assert await model.reset_session("s", salt=b"a") == "recovered"
        with pytest.raises(EngineReset):
            await collect(events)


async def test_plain_reads_see_what_has_no_salt() -> None:
    """`cached_prefix_len` asks as who has none; `prefill_only` computes for the salt it is given."""
    async with salted(KEPT) as model:
        await model.prefill_only(PROMPT, salt=b"a")
        assert model.cached_prefix_len(PROMPT) == 0
        found = await ask(model, salt=b"a")
        assert found.stats.n_cached == found.stats.n_prompt - 1
        await model.prefill_only(PROMPT)
        assert model.cached_prefix_len(PROMPT) > 0


@pytest.mark.parametrize("wrong", ["text", 7, b"x" * 65])
async def test_a_salt_is_a_few_bytes(wrong: object) -> None:
    """At most 64."""
    async with salted(KEPT) as model:
        with pytest.raises(InvalidOption, match="at most 64 bytes"):
            await ask(model, salt=wrong)
