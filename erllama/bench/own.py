"""Our side: an engine with one model, asked through the public API."""

from __future__ import annotations

import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

import erllama
from erllama.types import Done, TokenId

from .answer import Answer
from .prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from erllama.engine.statistics import ActorStatistics

    from .settings import Settings

MIN_TOKENS = 64  # the bench saves short prompts too: what is measured is restoring, not the policy's gate
RAM_BYTES = 4 << 30


class Own:
    """A loaded model. Implements `answer.Side`."""

    name = "erllama"

    def __init__(self, engine: erllama.Engine, model: erllama.Model) -> None:
        self.engine, self.model = engine, model
        # Ended early, a run would do less work than its peer's.
        self._banned = banned_tokens(model)
        first = model.tokenize("")
        self.prompts = Prompts(lambda text: model.tokenize(text, add_special=False), first)

    async def ask(
        self, prompt: Sequence[int], n_out: int, *, cache: bool, seen: list[float] | None = None
    ) -> Answer:
        """See `answer.Side`."""
        times = [] if seen is None else seen
        clock = time.perf_counter
        began = clock()
        async with self.model.stream(
            prompt,
            max_tokens=n_out,
            temperature=0.0,
            logit_bias=self._banned,
            cache="on" if cache else "off",
        ) as events:
            async for event in events:
                if type(event) is TokenId:
                    times.append(clock())
                elif type(event) is Done:
                    done, ended = event.completion, clock()
        return Answer(
            n_prompt=done.stats.n_prompt,
            n_computed=done.stats.n_computed,
            n_generated=done.stats.n_generated,
            began=began,
            times=tuple(times),
            ended=ended,
            source=done.cache_source,
            restore_s=done.stats.restore_s,
            generated=tuple(done.generated),
        )

    async def displace(self, *key: int) -> None:
        """Let another prompt take the only sequence, so that what comes next has to be restored."""
        await self.ask(self.prompts.prompt(MIN_TOKENS, 99, *key), 1, cache=False)

    @property
    def banned(self) -> list[int]:
        """Tokens that would end an answer early."""
        return list(self._banned)

    @property
    def statistics(self) -> ActorStatistics:
        """The counters of the model's actor."""
        return self.model.statistics()

    @property
    def memory_kind(self) -> str:
        """Which memory the model has: "dense", "window", …"""
        return self.model.info().memory_kind

    @property
    def kv_bytes_per_token(self) -> float:
        """What a token of KV takes in all layers: in the model's own memory, where that is dense.

        With a window that memory forgets: there it is what the store holds of a token, once it holds one.
        """
        if self.memory_kind != "window":
            details = self.model.info().details
            return float(details["memory"].kv_bytes / self.model.handle.facts.n_cells)
        per_token: dict[str, float] = {}
        for node in self.engine.cache.dump():
            for kind, part in node["parts"].items():
                per_token[kind] = max(per_token.get(kind, 0.0), part["bytes"] / node["n_tokens"])
        return sum(per_token.values())


@asynccontextmanager
async def open_own(
    settings: Settings,
    *,
    n_ctx: int,
    n_seq_max: int = 1,
    disk: Path | None = None,
    ram_max_bytes: int = RAM_BYTES,
    path: Path | None = None,
    **context: Any,
) -> AsyncIterator[Own]:
    """Our side for the block; `disk` is where a disk tier lies, None for RAM only."""
    tiers = [] if disk is None else [erllama.DiskTier("disk", str(disk))]
    policy = erllama.SavePolicy(min_tokens=MIN_TOKENS, cold_min_tokens=MIN_TOKENS)
    async with erllama.open_engine(tiers=tiers, ram_max_bytes=ram_max_bytes) as engine:
        model = await engine.load_model(
            path or settings.model,
            context=settings.context(n_ctx=n_ctx, n_seq_max=n_seq_max, **context),
            policy=policy,
            tier="ram" if disk is None else "disk",
        )
        yield Own(engine, model)


def banned_tokens(model: erllama.Model) -> dict[int, float]:
    """A bias that forbids every end-of-generation token."""
    handle = model.handle
    is_eog: Callable[[int], bool] = handle.optional("is_eog")
    return {token: -math.inf for token in range(handle.facts.n_vocab) if is_eog(token)}


async def together(ask: Sequence[Callable[[], Any]]) -> list[Answer]:
    """Start all at once; their answers in order. Cancellation: all end."""
    answers: list[Any] = [None] * len(ask)

    async def one(i: int) -> None:
        answers[i] = await ask[i]()

    async with trio.open_nursery() as nursery:
        for i in range(len(ask)):
            nursery.start_soon(one, i)
    return answers


def memcpy_bytes_per_s(n_bytes: int) -> float:
    """How fast this machine copies that many bytes into memory that was used before; best of five."""
    source, target = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return n_bytes / min(times)
