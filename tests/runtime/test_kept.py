"""What is kept of prompts, on the arithmetic model: prefilled, pinned, measured, explained."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, DecodeFailed, DiskTier, InvalidOption, NotLoaded, SavePolicy
from erllama.backend import StepResult, StepStatus
from erllama.kvcache.files import Files
from erllama.kvcache.read import read_head
from erllama.kvcache.store import KvStore
from erllama.testing import FakeBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from erllama import Engine, Model

POLICY = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=32)
GREEDY = {"temperature": 0.0, "max_tokens": 2}


@asynccontextmanager
async def keeping(
    n_slots: int = 1, policy: SavePolicy = POLICY, tier: str = "ram", **engine_options: object
) -> AsyncIterator[tuple[Engine, Model, FakeBackend]]:
    """An engine, a model with so many sequences, and the fake behind it."""
    backend = FakeBackend(n_slots=n_slots)
    with trio.fail_after(240):
        async with erllama.open_engine(**engine_options) as engine:
            model = await engine.load_model(
                backend=backend,
                model_id="m",
                policy=policy,
                tier=tier,
                context=ContextOptions(n_ctx=4096, n_seq_max=n_slots),
            )
            yield engine, model, backend


def text(n: int, seed: int = 0) -> str:
    """n characters that begin unlike those of another seed."""
    return "".join(chr(33 + (i * i + seed * 7 + i) % 90) for i in range(n))


async def saved(model: Model) -> None:
    """Until everything computed so far is in the store."""
    await model.handle.actor.wait_saved()


async def overwrite(model: Model, seed: int = 9) -> None:
    """Another prompt takes the only sequence."""
    await saved(model)
    await model.complete(text(20, seed), max_tokens=1)


async def fresh(prompt: str) -> list[int]:
    """What a model without any history says."""
    async with keeping() as (_, model, _):
        return (await model.complete(prompt, **GREEDY)).generated


# --- prefill_only, parent_key ---


async def test_prefilling_computes_and_samples_nothing(monkeypatch: pytest.MonkeyPatch):
    """G19: the whole prompt is in memory and stored; no sampler is made; the next call finds it."""
    drawn: list[object] = []
    async with keeping() as (_, model, backend):
        with monkeypatch.context() as patch:
            patch.setattr(FakeBackend, "new_sampler", lambda *a: drawn.append(a))
            patch.setattr(FakeBackend, "_draw", lambda *a: drawn.append(a))
            done = await model.prefill_only(text(100))
        assert drawn == []
        assert sum(step.n_tokens for step in backend.steps) == 100
        assert done.context_tokens == list(text(100).encode())
        assert (done.committed_tokens, done.cache_hit_kind) == (100, "cold")
        assert done.cache_delta == erllama.CacheDelta(read=0, created=100)
        assert done.finish_key is not None
        await overwrite(model)
        n_steps = len(backend.steps)
        more = await model.prefill_only(text(100) + "xyz", parent_key=done.finish_key)
        assert sum(step.n_tokens for step in backend.steps[n_steps:]) == 3
        assert (more.cache_hit_kind, more.cache_source) == ("partial", "ram")
        assert more.cache_delta == erllama.CacheDelta(read=100, created=3)
        answer = await model.complete(text(100) + "xyz", parent_key=more.finish_key, **GREEDY)
        assert (answer.cache_hit_kind, answer.stats.n_computed) == ("exact", 1)
        assert answer.generated == await fresh(text(100) + "xyz")


async def test_prefilling_below_the_gate_gives_no_key():
    """G19, K19: what is not stored has no name, and is in memory all the same."""
    async with keeping() as (_, model, _):
        done = await model.prefill_only(text(10))
        assert (done.finish_key, done.cache_delta.created) == (None, 0)
        assert (await model.complete(text(10), **GREEDY)).cache_hit_kind == "exact"


async def test_cancelling_a_prefill_keeps_what_was_computed(autojump_clock: object):
    """G19: the caller leaves after two of many steps; those are not computed again."""
    async with keeping() as (_, model, backend):
        backend.step_delay_s = 1.0
        with trio.move_on_after(2.5):
            await model.prefill_only(text(1000))
        backend.step_delay_s = 0.0
        answer = await model.complete(text(1000), **GREEDY)
        assert answer.stats.n_cached == 3 * 256
        assert answer.generated == await fresh(text(1000))


class SlowStore:
    """Saves take this long, on the mock clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
        save = KvStore.save

        async def slowly(store: KvStore, *args: object, **options: object) -> object:
            await trio.sleep(delay_s)
            return await save(store, *args, **options)

        monkeypatch.setattr(KvStore, "save", slowly)


async def parent_scene(model: Model, backend: FakeBackend) -> erllama.Prefilled:
    """A prompt whose save is under way, and memory lost in the meantime."""
    done = await model.prefill_only(text(600))
    for _ in range(10):
        await trio.lowlevel.checkpoint()  # its export is done, its save is not
    backend.before_step = lambda _: StepResult(status=StepStatus.FATAL, rc=-3)
    with pytest.raises(DecodeFailed):
        await model.complete("x")
    backend.before_step = None
    return done


@pytest.mark.parametrize(("delay_s", "kind", "waited_s"), [(0.2, "exact", 0.2), (0.8, "cold", 0.5)])
async def test_a_parent_still_being_written_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object, delay_s: float, kind: str, waited_s: float
):
    """K23: published after 0.2 s it is a hit; after 0.8 s the wait ends at 0.5 s, and the answer is right."""
    SlowStore(monkeypatch, delay_s)
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=1024)
    async with keeping(2, policy) as (_, model, backend):
        parent = await parent_scene(model, backend)
        began = trio.current_time()
        answer = await model.complete(text(600) + "?", parent_key=parent.finish_key, **GREEDY)
        assert answer.cache_hit_kind == kind
        assert trio.current_time() - began == pytest.approx(waited_s, abs=0.01)
        assert answer.stats.restore_s == pytest.approx(waited_s, abs=0.01)
    assert answer.generated == await fresh(text(600) + "?")


async def test_without_the_hint_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
):
    """K23: the same scene with no parent_key, and with one that nobody knows: cold at once."""
    SlowStore(monkeypatch, 0.2)
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=1024)
    async with keeping(2, policy) as (_, model, backend):
        await parent_scene(model, backend)
        began = trio.current_time()
        answer = await model.complete(text(600) + "?", parent_key=bytes(32), cache="read", **GREEDY)
        assert (answer.cache_hit_kind, trio.current_time() - began) == ("cold", 0.0)


async def test_the_longest_match_wins_whatever_the_hint_says():
    """K22: the key of a shorter history does not shorten the match."""
    async with keeping() as (_, model, _):
        short = await model.prefill_only(text(64))
        await model.prefill_only(text(128))
        await overwrite(model)
        answer = await model.complete(text(128) + "?", parent_key=short.finish_key, **GREEDY)
        assert answer.stats.n_cached == 128


async def test_one_scenario_per_kind():
    """G22, G23: how each kind comes about, and what it read and stored."""
    async with keeping(3) as (_, model, _):
        seen = {}

        def note(answer: erllama.Completion | erllama.Prefilled) -> None:
            seen[answer.cache_hit_kind] = answer.cache_delta.read, answer.cache_delta.created

        first = await model.complete(text(100), session_id="s", **GREEDY)  # 101 tokens in memory, 1 pending
        note(first)
        note(await model.complete(text(100), **GREEDY))
        note(await model.complete(text(50) + "!?", **GREEDY))
        sticky = await model.complete([*first.context_tokens, 65, 66], session_id="s", **GREEDY)
        note(sticky)
        note(await model.continue_("CD", session_id="s", **GREEDY))
        assert seen == {
            "cold": (0, 101),
            "exact": (99, 0),
            "partial": (50, 53 - 32),
            "sticky": (101, 105 - 101),
            "continuation": (105, 109 - 105),
        }


# --- read-outs ---


async def test_the_last_cache_hit():
    """M10: None before the first admission, then kind and length of the latest."""
    async with keeping() as (_, model, _):
        assert model.last_cache_hit() is None
        await model.complete(text(100), max_tokens=1)
        assert model.last_cache_hit() == erllama.CacheHit(kind="cold", n_tokens=0)
        await model.complete(text(100) + "more", max_tokens=1)
        assert model.last_cache_hit() == erllama.CacheHit(kind="partial", n_tokens=100)
        assert model.info().last_cache_hit == model.last_cache_hit()


async def test_bytes_of_the_longest_cached_beginning(tmp_path: Path):
    """K37: over live sequences, RAM and disk, the largest, as the length of its text; 0 without any."""
    prompt = "ünïcödé " + text(120)
    tier = DiskTier("kv", str(tmp_path))
    async with keeping(tier="kv", tiers=[tier]) as (engine, model, _):
        assert model.cached_prefix_len(prompt) == 0
        tokens = model.tokenize(prompt)
        await model.prefill_only(tokens[:64])
        assert model.cached_prefix_len(tokens) == len(model.detokenize(tokens[:64]).encode())  # live
        await overwrite(model)
        await engine.cache.flush()
    async with keeping(tier="kv", tiers=[tier]) as (_, model, _):
        assert model.cached_prefix_len(prompt) == 64  # disk
        await model.prefill_only(tokens[:100])
        await overwrite(model)
        assert model.cached_prefix_len(tokens) == await model.cached_prefix_len_async(prompt) == 100  # RAM
        assert model.cached_prefix_len("something else") == 0
        before = model.handle.actor.cache.store.statistics().tokens_asked
        model.cached_prefix_len(tokens)
        assert model.handle.actor.cache.store.statistics().tokens_asked == before  # counts as no use
    with pytest.raises(NotLoaded):
        model.cached_prefix_len(tokens)


# --- pins ---


async def flood(engine: Engine, model: Model) -> None:
    """Throw out everything that may go."""
    await overwrite(model)
    await saved(model)
    await engine.cache.gc()


async def test_a_pinned_prompt_outlives_a_flood():
    """X7: it is computed and stored however short, kept from eviction, and let go by unpin."""
    async with keeping() as (engine, model, _):
        assert await model.pin("be brief") == 8
        await model.prefill_only(text(100))
        await flood(engine, model)
        answer = await model.complete("be brief, please", **GREEDY)
        assert (answer.stats.n_cached, answer.cache_source) == (8, "ram")
        assert answer.generated == await fresh("be brief, please")
        assert (await model.complete(text(100), **GREEDY)).miss.reason == "evicted"
        assert await model.unpin("be brief")
        assert not await model.unpin("be brief")
        await flood(engine, model)
        assert (await model.complete("be brief, please", **GREEDY)).stats.n_cached == 0


async def test_pins_expire():
    """X7: after ttl_s it may go like everything else; a span of no time is refused."""
    async with keeping() as (engine, model, _):
        assert await model.pin(text(40), ttl_s=0.05) == 40
        await trio.sleep(0.1)
        await flood(engine, model)
        assert (await model.complete(text(41), max_tokens=1)).stats.n_cached == 0
        for ttl_s in (0, -1.0, float("inf"), "1"):
            with pytest.raises(InvalidOption) as caught:
                await model.pin("x", ttl_s=ttl_s)
            assert caught.value.detail["key"] == "ttl_s"


async def test_pins_have_a_budget():
    """K33: a prompt beyond the share of the tier that may be pinned is computed, and not pinned."""
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=1024)
    async with keeping(1, policy, ram_max_bytes=80 << 10) as (_, model, _):
        assert await model.pin(text(3000)) == 0
        assert model.cached_prefix_len(text(3000)) == 3000
        assert await model.pin(text(40, 1)) == 40


async def test_a_pin_too_many_ends_the_one_unused_for_longest():
    """K33: four tool sets in turn stay warm in a flood; the fifth unpins the oldest, and that is counted."""
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=1024)
    async with keeping(1, policy, ram_max_bytes=128 << 10) as (engine, model, _):
        for i in range(4):
            assert await model.pin(text(900, i)) == 900
        for _ in range(2):
            for i in range(4):
                await flood(engine, model)
                assert (await model.complete(text(900, i) + "?", max_tokens=1)).stats.n_cached == 900
        assert engine.cache.counters().pins_forced == 0
        assert await model.pin(text(900, 4)) == 900
        assert engine.cache.counters().pins_forced == 1
        await flood(engine, model)
        warm = [model.cached_prefix_len(text(900, i)) for i in range(5)]
        assert warm == [0, 900, 900, 900, 900]


@pytest.mark.parametrize("warmed", [False, True])
async def test_a_head_is_kept(warmed: bool):
    """K32: the path up to the head's end is pinned, no step is cut there, and a new conversation with that
    head computes only its tail; also when the head was stored before by somebody who did not say so."""
    async with keeping() as (engine, model, backend):
        head = text(100)
        if warmed:
            await model.complete(head + "nobody said how long", max_tokens=1)
            await saved(model)
        n_steps = len(backend.steps)
        await model.complete(head + "first " * 10, prefix_checkpoint_len=100, max_tokens=1)
        if not warmed:
            assert len(backend.steps) - n_steps == 2  # the last token is a step of its own
        await flood(engine, model)
        answer = await model.complete(head + "second", prefix_checkpoint_len=100, **GREEDY)
        assert answer.stats.n_computed == len("second")
        assert answer.generated == await fresh(head + "second")


@pytest.mark.parametrize(("fraction", "n_pins"), [(0.0, 0), (0.25, 3)])
async def test_a_model_s_policy_bounds_its_pins(fraction: float, n_pins: int):
    """K33: `pin_fraction` of the model's own policy counts for heads, new or stored before, and for pins."""
    policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=32, pin_fraction=fraction)
    async with keeping(policy=policy) as (_, model, _):
        prompt = text(100) + "first " * 10
        for head in (None, 100):  # the second time its nodes are there
            await model.complete(prompt, prefix_checkpoint_len=head, max_tokens=1)
            await saved(model)
        await model.complete(text(200, 3), prefix_checkpoint_len=100, max_tokens=1)
        await saved(model)
        assert await model.pin(text(900)) == (900 if n_pins else 0)
        assert len(model.handle.actor.cache.store.list_pins()) == n_pins


async def test_without_saying_so_a_head_is_not_kept():
    """K32: the same flood takes everything that nobody pinned."""
    async with keeping() as (engine, model, _):
        await model.complete(text(100) + "first " * 10, max_tokens=1)
        await flood(engine, model)
        assert (await model.complete(text(100) + "second", max_tokens=1)).stats.n_cached == 0


# --- misses ---


async def test_a_miss_explains_itself(caplog: pytest.LogCaptureFixture):
    """X8: each reason that can be established, as a word, a sentence and a line in the debug log."""
    caplog.set_level(logging.DEBUG, logger="erllama.engine")
    async with keeping() as (engine, model, _):

        async def why(prompt: str, **options: object) -> erllama.Miss | None:
            return (await model.complete(prompt, max_tokens=1, **options)).miss

        assert (await why(text(10))).reason == "below_gate"
        assert "32 tokens" in str(await why(text(11, 1)))
        assert (await why(text(100, 2))).reason == "nothing_stored"
        assert (await why(text(100, 2), cache="off")).reason == "cache_off"
        assert await why(text(100, 2)) is None  # only the last token had to be computed

        edited = text(100, 2)[:60] + "EDITED" + text(100, 2)[66:]
        live = await why(edited)
        assert (live.reason, live.index) == ("differs_at", 60)
        assert live.stored == text(100, 2)[52:68]
        assert live.asked == edited[52:68]
        assert repr(live.asked) in str(live)

        await overwrite(model)
        stored = await why(text(100, 2)[:50] + "OTHER" + text(100, 2)[55:])
        assert (stored.reason, stored.index, stored.asked[8:13]) == ("differs_at", 50, "OTHER")

        longer = await why(text(100, 2) + "and on it goes")
        assert (longer.reason, longer.index) == ("ends_at", 100)

        await flood(engine, model)
        gone = await why(text(100, 2))
        assert gone.reason == "evicted"
        assert "had to make room" in str(gone)
        assert [r for r in caplog.records if "had to make room" in r.getMessage()]


async def test_a_restore_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    """X8: more was stored than could be brought back."""
    async with keeping() as (_, model, _):
        await model.complete(text(100), max_tokens=1)
        await overwrite(model)
        monkeypatch.setattr(FakeBackend, "import_", lambda *a: False)
        answer = await model.complete(text(100), max_tokens=1)
        assert (answer.cache_hit_kind, answer.miss.reason) == ("cold", "restore_failed")


async def test_eight_at_once_explain_what_they_did_not_share():
    """X8: who takes a head from a running neighbour parts from it where their prompts do."""
    async with keeping(4) as (_, model, _):
        head, misses = text(200), []

        async def ask(i: int) -> None:
            misses.append((await model.complete(f"{head}{i} asks", max_tokens=2)).miss)

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(ask, i)
        reasons = [(m.reason, m.index) for m in misses]
        assert sorted(reasons) == [("differs_at", 200)] * 3 + [("nothing_stored", 0)]


async def test_cache_files_say_where_they_come_from(tmp_path: Path):
    """K12: model, quantisation, kind of memory, host and versions, for people and tools."""
    async with erllama.open_engine(tiers=[DiskTier("kv", str(tmp_path))]) as engine:
        policy = SavePolicy(min_tokens=1, cold_min_tokens=1)
        model = await engine.load_model(backend=FakeBackend(), model_id="mine", policy=policy, tier="kv")
        await model.complete("hello", max_tokens=2)
        await model.complete("hello" * 60, max_tokens=2, exact="cold")
        await engine.cache.flush()
    files = list(tmp_path.rglob("*.kvc"))  # noqa: ASYNC240  # nothing else runs
    told = [read_head(Files(), str(file))[1].facts for file in files]
    assert told
    for facts in told:
        assert facts["model"] == "mine"
        assert facts["memory"] == "dense"
        assert facts["erllama"] == erllama.__version__
        assert facts["host"]


async def test_a_file_tier_that_nobody_uses_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The default keeps a model in RAM only; with a file tier beside it that is rarely meant."""
    async with erllama.open_engine(tiers=[DiskTier("kv", str(tmp_path))]) as engine:
        await engine.load_model(backend=FakeBackend(), model_id="used", tier="kv")
        assert not caplog.records
        await engine.load_model(backend=FakeBackend(), model_id="unused")
    assert "tier='kv'" in caplog.text


async def test_what_ram_has_no_room_for_spills_and_lookups_are_logged(tmp_path: Path):
    """`ram_spill` and `lookup_log` of an engine are those of its store."""
    log = tmp_path / "lookups"
    options = {"ram_max_bytes": 1 << 20, "ram_spill": "kv", "lookup_log": str(log)}
    async with erllama.open_engine(tiers=[DiskTier("kv", str(tmp_path / "kv"))], **options) as engine:
        model = await engine.load_model(backend=FakeBackend(), policy=POLICY)
        for i in range(40):
            await model.complete([i + 1] * 400, **GREEDY)
            await engine.cache.flush()
        assert {tier.name: tier.used_bytes for tier in engine.cache.list_tiers()}["kv"] > 0
    assert log.stat().st_size > 0  # nothing else runs


@pytest.mark.parametrize("text", [5, None, b"x"])
async def test_what_is_no_text_is_said(text: object):
    """A typed error, not whatever Python says deep inside."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=FakeBackend())
        with pytest.raises(erllama.InvalidContent):
            model.tokenize(text)
        with pytest.raises(erllama.InvalidContent):
            await model.continue_(text, session_id="s")


async def test_a_policy_is_a_policy():
    """Before the model is loaded."""
    async with erllama.open_engine() as engine:
        backend = FakeBackend()
        with pytest.raises(InvalidOption, match="policy"):
            await engine.load_model(backend=backend, policy={"min_tokens": 1})
        assert backend.n_opened == 0
