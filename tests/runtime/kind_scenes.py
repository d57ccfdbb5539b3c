"""A model of any kind of memory with its store; beside it one that never drops a sequence nor keeps one."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
import trio.testing

import erllama
from erllama import ContextOptions, DiskTier, RamFileTier, SavePolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# With one thread a single row's bits do not depend on how many cells others hold beside it: see exactness.md.
N_THREADS = 1
BLOCK = 64
POLICY = SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=BLOCK)
NO_STORE = SavePolicy(min_tokens=math.inf)
GREEDY = {"max_tokens": 12, "temperature": 0.0, "logprobs": 2}
TIE = 0.03
MOST_MOVED = 0.2  # by neighbours, of a log-probability
KINDS = ("dense", "window", "hybrid", "recurrent")


def some_tokens(n: int, seed: int = 0) -> list[int]:
    """Ordinary tokens of the tiny vocabularies, different for each seed from the first one on."""
    return [20 + (i * 7919 + (i * i + 1) * seed * 31 + 11) % 200 for i in range(n)]


def changed(tokens: list[int], at: int, seed: int = 1) -> list[int]:
    """The same with another token there; a seed below 100 each another one."""
    return [*tokens[:at], (tokens[at] + seed) % 200 + 20, *tokens[at + 1 :]]


def bits(answer: erllama.Completion) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """What must be equal where answers are equal bit for bit."""
    assert answer.logprobs is not None
    return [(one.token, one.logprob, one.top) for one in answer.logprobs]


def agree(answer: erllama.Completion, expected: erllama.Completion, *, moved: float = MOST_MOVED) -> bool:
    """Whether the ids are equal, up to where the two best are so close that neighbours in memory decide."""
    assert answer.logprobs is not None
    assert expected.logprobs is not None
    for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
        if ours.token != theirs.token:
            (_, best), (second, next_best), *_ = theirs.top
            return ours.token == second and best - next_best < max(TIE, moved - MOST_MOVED)
        if abs(ours.logprob - theirs.logprob) > moved:
            return False
    return True


@dataclass
class Scene:
    """`model` keeps its sequences in `engine`'s store."""

    engine: erllama.Engine
    model: erllama.Model
    n_slots: int
    calm: erllama.Model | None = None  # the reference, on an engine of its own that keeps nothing
    n_others: int = field(default=0)

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens that `model` has computed so far, their last ones not counted."""
        return self.model.statistics().n_prefill_tokens

    async def drop_live(self) -> None:
        """Save everything, then let others take all sequences, so that the store is all there is."""
        await self.engine.cache.flush()
        async with trio.open_nursery() as nursery:
            for _ in range(self.n_slots):
                self.n_others += 1
                nursery.start_soon(self._other, some_tokens(20, 1000 + self.n_others))
        await trio.testing.wait_all_tasks_blocked()

    async def _other(self, prompt: list[int]) -> None:
        await self.model.complete(prompt, cache="off", **{**GREEDY, "max_tokens": 2})

    async def uninterrupted(self, *turns: list[int], **options: object) -> erllama.Completion:
        """Last answer of a conversation whose sequence is never dropped; each turn is what is new in it."""
        assert self.calm is not None
        options = {**GREEDY, **options}
        await self.calm.end_session("r")
        answer = await self.calm.complete(turns[0], session_id="r", **options)
        for tail in turns[1:]:
            answer = await self.calm.continue_(tail, session_id="r", **options)
        return answer


def tiers_of(tier: str, root: Path) -> dict[str, object]:
    """Engine options for a tier of that kind, named "kv" unless it is RAM."""
    match tier:
        case "disk":
            return {"tiers": [DiskTier("kv", str(root))]}
        case "ram_file":
            return {"tiers": [RamFileTier("kv", str(root))]}
    return {}


@asynccontextmanager
async def kept(
    path: Path,
    tier: str,
    root: Path,
    *,
    n_seq_max: int = 2,
    n_ctx: int = 2048,
    n_batch: int = 512,
    n_threads: int = N_THREADS,
    policy: SavePolicy = POLICY,
    reference: bool = False,
    config: dict[str, object] | None = None,
    **loading: object,
) -> AsyncIterator[Scene]:
    """A model on that tier; afterwards nothing is leased, nothing is wrong with the store."""
    with trio.fail_after(600):
        async with AsyncExitStack() as outside:
            engine = await outside.enter_async_context(
                erllama.open_engine(**tiers_of(tier, root), **(config or {}))
            )
            context = ContextOptions(n_threads=n_threads, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
            model = await engine.load_model(
                path, context=context, policy=policy, tier="ram" if tier == "ram" else "kv", **loading
            )
            scene = Scene(engine, model, n_seq_max)
            if reference:
                alone = ContextOptions(n_threads=N_THREADS, n_ctx=n_ctx, n_seq_max=1, n_batch=n_batch)
                calm = await outside.enter_async_context(erllama.open_engine(ram_max_bytes=0))
                scene.calm = await calm.load_model(path, context=alone, policy=NO_STORE)
            yield scene
            await engine.cache.flush()
            await trio.testing.wait_all_tasks_blocked()
            counters = engine.cache.counters()
            assert (counters.leases, counters.loads_in_flight) == (0, 0)
            assert await engine.cache.check() == []


async def reload(scene: Scene, path: Path, **loading: object) -> None:
    """Unload the model of a RAM tier and load it again."""
    context = ContextOptions(n_threads=N_THREADS, n_ctx=scene.model.info().n_ctx, n_seq_max=scene.n_slots)
    await scene.model.unload()
    scene.model = await scene.engine.load_model(path, context=context, policy=POLICY, **loading)
