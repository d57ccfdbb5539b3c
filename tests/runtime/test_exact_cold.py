"""E3: `exact="cold"` gives the bits of a fresh context, whatever is stored and whoever runs besides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

import erllama
from erllama import ContextOptions, NotSupported, SavePolicy
from erllama.machine import usable_cpus
from erllama.testing import FakeBackend

from .kind_scenes import GREEDY, KINDS, N_THREADS, NO_STORE, bits, changed, kept, some_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

W = 64  # make_tiny_gguf.WINDOW
PIECE = 256
BORDERS = (63, 64, 65, 128, 252, 255, 256, 257, 511, 512, 513, 700)
TWO = pytest.param(2, marks=pytest.mark.skipif(usable_cpus() < 2, reason="more threads than cores are cut"))
COLD = {**GREEDY, "max_tokens": 6, "exact": "cold"}
POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16)

Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


async def fresh(
    path: Path,
    prompts: list[list[int]],
    *,
    n_threads: int = N_THREADS,
    n_seq_max: int = 2,
    n_batch: int = 512,
    **options: object,
) -> list[Bits]:
    """What a context says to each prompt that has never seen anything else: rebuilt in between."""
    seen = []
    context = ContextOptions(n_threads=n_threads, n_ctx=2048, n_seq_max=n_seq_max, n_batch=n_batch)
    async with erllama.open_engine(ram_max_bytes=0) as engine:
        model = await engine.load_model(path, context=context, policy=NO_STORE)
        for prompt in prompts:
            model.handle.backend.rebuild()  # nobody runs
            seen.append(bits(await model.complete(prompt, cache="off", **{**COLD, **options})))
    return seen


def at_borders(seed: int = 0) -> list[list[int]]:
    """Prompts around the borders of pieces and windows, no two with a common beginning."""
    return [some_tokens(n, seed + i) for i, n in enumerate(BORDERS)]


@pytest.mark.parametrize("kind", [*KINDS, "hybrid_window"])
async def test_warm_and_restarted_answers_have_cold_bits(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """X3: around block and window borders; pieces are restored, the last token and the rest computed."""
    path, prompts = tiny_gguf(kind), at_borders()
    expected = await fresh(path, prompts)
    for life in range(2):
        async with kept(path, "disk", tmp_path, policy=POLICY) as scene:
            assert scene.model.info().exactness.default == "session"
            for _ in range(2):
                for prompt, wanted in zip(prompts, expected, strict=True):
                    before = scene.n_prefilled
                    answer = await scene.model.complete(prompt, **COLD)
                    assert bits(answer) == wanted, len(prompt)
                    n_computed = scene.n_prefilled - before
                    first_time = life == 0 and answer.cache_hit_kind == "cold" and len(prompt) > PIECE
                    n_pieces = 0 if first_time else (len(prompt) - 1) // PIECE
                    assert n_computed == len(prompt) - 1 - n_pieces * PIECE
                await scene.engine.cache.flush()
            assert scene.model.info().exactness.cold


async def around_the_ring(
    path: Path, root: Path, prompts: list[list[int]], other: list[int], **shape: int
) -> None:
    """The longest prompt is computed, then all are answered from it, each after another took the memory."""
    expected = await fresh(path, prompts, **shape)
    async with kept(path, "disk", root, policy=POLICY, **shape) as scene:
        await scene.model.complete(prompts[-1], **COLD)
        await scene.engine.cache.flush()
        for prompt, wanted in zip(prompts, expected, strict=True):
            await scene.model.complete(other, cache="off", **{**GREEDY, "max_tokens": 2})
            answer = await scene.model.complete(prompt, **COLD)
            assert answer.stats.n_cached == (len(prompt) - 1) // PIECE * PIECE
            assert bits(answer) == wanted, len(prompt)
        assert scene.model.info().exactness.cold


RING = 768  # 64 * (2 + 1) + 512, padded to 256
LENGTHS = {  # with two threads, those whose window lies around a border between shares, of 768 or of less
    1: (767, 768, 769, 1023, 1024, 1025, 1040, 1184, 1281, 1535, 1536, 1537, 1808),
    2: (769, RING + 270, RING + 416, 2 * RING + 270),
}


@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
@pytest.mark.parametrize("n_threads", [1, TWO])
async def test_cold_bits_where_a_window_ring_has_started_over(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str, n_threads: int
) -> None:
    """Threads share the cells of a single row by how many were ever used: all, once the ring was full."""
    text = some_tokens(LENGTHS[n_threads][-1])
    prompts = [text[:n] for n in LENGTHS[n_threads]]
    await around_the_ring(
        tiny_gguf(kind), tmp_path, prompts, some_tokens(1000, 5), n_threads=n_threads, n_seq_max=2
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_who_runs_before_and_beside_changes_nothing(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Others of both sorts, their blocks in the store, cancelled ones: the bits stay those of a fresh one."""
    path, prompt = tiny_gguf(kind), some_tokens(600)
    head = prompt[:500]
    [expected] = await fresh(path, [prompt])
    answers: list[erllama.Completion] = []
    async with kept(path, "ram", tmp_path, policy=POLICY) as scene:
        model = scene.model

        async def ask() -> None:
            answers.append(await model.complete(prompt, **COLD))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(model.complete, [*head, 25, 26], **GREEDY))
            nursery.start_soon(ask)
            nursery.start_soon(partial(model.complete, [*head, 35, 36], **{**GREEDY, "max_tokens": 40}))
            nursery.start_soon(partial(model.complete, changed(prompt, 555), **COLD))
            nursery.start_soon(ask)
            with trio.move_on_after(0.02):
                await model.complete(some_tokens(900, 3), **COLD)
        await ask()
    assert [bits(answer) for answer in answers] == [expected] * 3
    assert answers[-1].stats.n_cached == 2 * PIECE


@pytest.mark.parametrize("kind", KINDS)
async def test_neither_sort_finds_the_blocks_of_the_other(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """The same prompt of each sort is stored twice, and each reads its own."""
    prompt = some_tokens(600)
    async with kept(tiny_gguf(kind), "ram", tmp_path, policy=POLICY) as scene:

        async def kind_of_hit(**options: object) -> tuple[str, int]:
            await scene.drop_live()
            answer = await scene.model.complete(prompt, **{**GREEDY, **options})
            return answer.cache_hit_kind, answer.stats.n_cached

        assert await kind_of_hit(exact="cold") == ("cold", 0)
        assert await kind_of_hit() == ("cold", 0)
        assert await kind_of_hit(exact="cold") == ("partial", 2 * PIECE)
        hit, n_cached = await kind_of_hit(exact="session")
        assert (hit, n_cached) in [("exact", 599), ("partial", 2 * PIECE)]  # a window may end before
        assert n_cached == 599 or scene.model.info().parts == ("base", "window")


@pytest.mark.parametrize("kind", KINDS)
async def test_replies_are_computed_again(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """A reply was computed row by row: as part of the next prompt it is prefilled, with cold bits."""
    path, prompt = tiny_gguf(kind), some_tokens(250)
    async with kept(path, "ram", tmp_path, policy=POLICY) as scene:
        first = await scene.model.complete(prompt, **{**COLD, "max_tokens": 300})
        turn = [*first.context_tokens, *some_tokens(20, 1)]
        before = scene.n_prefilled
        later = await scene.model.complete(turn, **COLD)
        assert scene.n_prefilled - before == len(turn) - 1  # the first piece holds six tokens of the reply
        again = await scene.model.complete(turn, **COLD)
        assert again.stats.n_cached == 2 * PIECE
    assert [bits(later), bits(again)] == await fresh(path, [turn]) * 2


async def test_sessions_are_no_short_cut(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """A session's next turn with exact="cold" is computed like any other, and the pin is gone."""
    path, prompt = tiny_gguf("dense"), some_tokens(300)
    async with kept(path, "ram", tmp_path, policy=POLICY) as scene:
        first = await scene.model.complete(prompt, session_id="s", **GREEDY)
        turn = [*first.context_tokens, 33, 34]
        answer = await scene.model.complete(turn, session_id="s", **COLD)
        assert (answer.cache_hit_kind, bits(answer)) == ("cold", (await fresh(path, [turn]))[0])


@pytest.mark.parametrize("kind", [*KINDS, "hybrid_window"])
async def test_deterministic_at_any_concurrency(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Six at once, some with a common head, greedy and seeded: each with the bits that it has alone."""
    path = tiny_gguf(kind)
    head = some_tokens(300)
    prompts = [*(([*head, *some_tokens(30 + i, i + 1)]) for i in range(3)), *at_borders(20)[4:7]]
    options = [{**GREEDY, "temperature": 0.0 if i % 2 else 1.0, "seed": i, "max_tokens": 6} for i in range(6)]
    alone = [(await fresh(path, [p], **o))[0] for p, o in zip(prompts, options, strict=True)]
    async with kept(path, "ram", tmp_path, policy=POLICY, deterministic=True) as scene:
        exactness = scene.model.info().exactness
        assert (exactness.cold, exactness.default, exactness.deterministic) == (True, "cold", True)
        for _ in range(2):
            together: dict[int, Bits] = {}

            async def ask(i: int, into: dict[int, Bits]) -> None:
                into[i] = bits(await scene.model.complete(prompts[i], **options[i]))

            async with trio.open_nursery() as nursery:
                for i in range(6):
                    nursery.start_soon(ask, i, together)
            assert [together[i] for i in range(6)] == alone
        with pytest.raises(erllama.InvalidOption) as caught:
            await scene.model.complete(head, exact="session")
        assert caught.value.detail["key"] == "exact"


async def test_a_model_s_default_can_be_overruled(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """load_model(exact="cold") holds for requests that do not say; others say exact="session"."""
    prompt = some_tokens(300)
    async with kept(tiny_gguf("dense"), "ram", tmp_path, policy=POLICY, exact="cold") as scene:
        assert (await scene.model.complete(prompt, **GREEDY)).cache_hit_kind == "cold"
        assert (await scene.model.complete(prompt, **GREEDY)).stats.n_cached == PIECE
        answer = await scene.model.complete(prompt, exact="session", **GREEDY)
        assert answer.stats.n_cached > PIECE  # it may share what a cold request left in its cells


# --- where it does not hold ---


class Inexact(FakeBackend):
    """Its trial fails."""

    def probe_cold(self) -> str | None:
        return "a restored prompt gives other logits"


@pytest.mark.parametrize("loading", [{"exact": "cold"}, {"deterministic": True}])
async def test_a_failed_trial_refuses_the_load(loading: dict[str, object]) -> None:
    """With the reason, and nothing stays loaded."""
    async with erllama.open_engine() as engine:
        with pytest.raises(NotSupported, match="other logits"):
            await engine.load_model(backend=Inexact(), **loading)
        assert engine.models() == []


async def test_a_failed_trial_refuses_the_request() -> None:
    """With the reason; other requests go on, and info() knows why."""
    async with erllama.open_engine() as engine:
        model = await engine.load_model(backend=Inexact())
        assert model.info().exactness.cold is None
        for _ in range(2):
            with pytest.raises(NotSupported, match="other logits"):
                await model.complete("x", exact="cold")
        assert (await model.complete("x", max_tokens=2)).finish_reason == "length"
        assert model.info().exactness == erllama.Exactness(
            cold=False,
            reason="a restored prompt gives other logits",
            default="session",
            deterministic=False,
        )


async def test_small_batches_are_refused(tiny_gguf: Callable[[str], Path]) -> None:
    """n_batch below 64: pieces would not have the bits of larger ones; 64 itself is enough."""
    path, prompt = tiny_gguf("dense"), some_tokens(100)
    async with erllama.open_engine() as engine:
        small = ContextOptions(n_ctx=512, n_batch=63)
        with pytest.raises(NotSupported, match="n_batch=63"):
            await engine.load_model(path, context=small, exact="cold")
        model = await engine.load_model(path, context=small)
        with pytest.raises(NotSupported, match="n_batch=63"):
            await model.complete(prompt, exact="cold")
        enough = ContextOptions(n_ctx=512, n_batch=64)
        model = await engine.load_model(path, context=enough, exact="cold", model_id="enough")
        assert model.info().exactness.cold


# --- real models ---


async def real(path: Path, root: Path, lengths: tuple[int, ...]) -> None:
    """One text cut at several lengths: fresh, warm and restarted, the same bits."""
    async with kept(path, "disk", root, policy=POLICY) as scene:
        text = " ".join(f"Item {i} costs {i * 7919 % 1000} coins." for i in range(200))
        tokens = scene.model.tokenize(text)
        prompts = [tokens[:n] for n in lengths]
        warm = [bits(await scene.model.complete(prompt, **COLD)) for prompt in prompts]
        await scene.model.complete(prompts[0], **{**GREEDY, "max_tokens": 1})
    expected = await fresh(path, prompts)
    assert warm == expected
    async with kept(path, "disk", root, policy=POLICY) as scene:
        assert [bits(await scene.model.complete(prompt, **COLD)) for prompt in prompts] == expected
        assert scene.n_prefilled <= len(lengths) * (PIECE - 1)


async def test_cold_bits_of_a_real_dense_model(smollm2_path: Path, tmp_path: Path) -> None:
    """SmolLM2 around two pieces."""
    await real(smollm2_path, tmp_path, (300, 512, 513))


async def test_cold_bits_of_a_real_window_model(gemma_path: Path, tmp_path: Path) -> None:
    """gemma-3-270m around its window of 512 tokens, and where a restore reaches past it."""
    await real(gemma_path, tmp_path, (513, 700, 1024))


async def test_cold_bits_of_a_real_window_model_whose_ring_has_started_over(
    gemma_path: Path, tmp_path: Path
) -> None:
    """gemma-3-270m: 512 tokens seen, a ring of 1,280; restored are 1,792, so most of the ring is not."""
    shape = {"n_threads": min(2, usable_cpus()), "n_seq_max": 1, "n_batch": 256}
    async with kept(gemma_path, "ram", tmp_path, policy=POLICY, **shape) as scene:
        model = scene.model
        text = model.tokenize(" ".join(f"Item {i} costs {i * 7919 % 1000} coins." for i in range(300)))
        cold = await model.complete(text[:1800], **COLD)
        await scene.engine.cache.flush()
        await model.complete(text[300:700], cache="off", **{**GREEDY, "max_tokens": 1})
        warm = await model.complete(text[:1800], **COLD)
        assert (cold.stats.n_cached, warm.stats.n_cached) == (0, 1792)
        assert bits(warm) == bits(cold)
