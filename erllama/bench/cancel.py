"""P14: streams that are opened and left."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import trio

from erllama.types import TokenId

from .figure import Bar, against, single
from .own import Own, open_own
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .settings import Settings

LEFT_BAR, STEP_BAR = Bar("<=", 0, "value"), Bar("<=", 1.0)
N_AT_ONCE = 8
# Tokens that each of eight reads before it leaves: most want none, which costs little to compute.
N_READ = (0, 1, 0, 0, 2, 0, 1, 0)
LOOK_EVERY_S = 0.0005
N_STAYED = 24  # tokens of the stream that stays: more than it gets to


async def measure(settings: Settings, found: Found) -> None:
    """What is left behind by very many; then how long a few take to be gone, beside one that stays."""
    n_streams, n_rounds = settings.pick((10_000, 24), (64, 4))
    async with open_own(settings, n_ctx=1024, n_seq_max=N_AT_ONCE) as own:
        await _round(own, 0)
        before = await _held(own)
        for run in range(n_streams // N_AT_ONCE):
            await _round(own, run)
        after = await _held(own)
        left = [single(f"left behind: {name}", "", [after[name] - n], LEFT_BAR) for name, n in before.items()]
        await found.add(*left, notes=(f"{n_streams // N_AT_ONCE * N_AT_ONCE} streams.",))
        pairs = [pair for run in range(n_rounds) for pair in await _beside_one_that_stays(own, run)]
    if not pairs:
        raise NotMeasured("no stream left while another one decoded")
    leaving_ms, steps_ms = ([1000 * seconds for seconds in side] for side in zip(*pairs, strict=True))
    name = "from leaving until nothing is left of it"
    await found.add(
        against(name, "ms", leaving_ms, steps_ms, "the step meanwhile", STEP_BAR),
        single("… the slowest", "ms", [max(leaving_ms)]),
    )


def _prompt(own: Own, run: int, i: int) -> list[int]:
    """All differ in their last token only: little has to be computed, by whoever comes first."""
    n_ordinary = own.model.handle.facts.n_vocab // 2
    return [*own.prompts.prompt(5, 14), n_ordinary // 2 + (run * N_AT_ONCE + i) % n_ordinary]


async def _round(own: Own, run: int) -> None:
    """Eight at once: some leave before they have a place, some in their first step, some behind a token."""
    async with trio.open_nursery() as nursery:
        for i, n_read in enumerate(N_READ):
            wait = partial(trio.sleep, i * LOOK_EVERY_S)
            nursery.start_soon(partial(_open_and_leave, own, run, i, n_read, wait))


async def _open_and_leave(
    own: Own, run: int, i: int, n_read: int, wait: Callable[[], Awaitable[None]]
) -> tuple[float, float]:
    """Read so many tokens, wait, leave; when it left, and how long it took until nothing was left of it."""
    async with own.model.stream(_prompt(own, run, i), max_tokens=64, temperature=0.0) as events:
        n_more = n_read
        while n_more:
            n_more -= type(await anext(events)) is TokenId
        await wait()
        left = time.perf_counter()
    while own.engine.request_info(events.request) is not None:  # noqa: ASYNC110  # as in `_held`
        await trio.sleep(LOOK_EVERY_S)
    return left, time.perf_counter() - left


async def _beside_one_that_stays(own: Own, run: int) -> list[tuple[float, float]]:
    """Seven leave at different moments of a step; pairs of how long it took and how long that step was."""
    seen: list[float] = []
    ended: list[tuple[float, float]] = []

    async def leave(i: int) -> None:
        async def wait() -> None:
            await trio.sleep((seen[-1] - seen[-2]) * i / N_AT_ONCE if len(seen) > 1 else 0)

        ended.append(await _open_and_leave(own, run, i, 2 + i % 4, wait))

    async with trio.open_nursery() as nursery:
        stays = partial(own.ask, own.prompts.prompt(6, 14, 14), N_STAYED, cache=False, seen=seen)
        nursery.start_soon(stays)
        async with trio.open_nursery() as leavers:
            for i in range(1, N_AT_ONCE):
                leavers.start_soon(leave, i)
    return [
        (took_s, end - begin)
        for left, took_s in ended
        for begin, end in itertools.pairwise(seen)
        if begin <= left < end
    ]


async def _held(own: Own) -> dict[str, int]:
    """What could leak, once the model is idle."""
    while own.model.queue_depth():  # noqa: ASYNC110  # nothing tells of it: a cancelled request just goes
        await trio.sleep(LOOK_EVERY_S)
    counters, statistics = own.engine.cache.counters(), own.statistics
    return {
        "slots": statistics.n_slots - statistics.n_available,
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "leases": counters.leases,
        "nodes": counters.n_nodes,
        "files": psutil.Process().num_fds(),
    }


CANCEL = Workload(
    id="P14",
    title="10,000 streams opened and cancelled",
    compared=(
        "slots, tasks, leases, nodes and files after against before; leaving in the middle of a step against "
        "how long that step takes for one that stays; no peer"
    ),
    measure=measure,
)
