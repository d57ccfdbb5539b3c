"""P14: streams that are opened and left."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import trio

from .figure import Bar, Figure, single
from .own import Own, open_own
from .spread import Spread
from .workload import Found, Workload

if TYPE_CHECKING:
    from .settings import Settings

LEFT_BAR, STEP_BAR = Bar("<=", 0, "value"), Bar("<=", 1.0)
N_AT_ONCE = 8
LOOK_EVERY_S = 0.001


async def measure(settings: Settings, found: Found) -> None:
    """Left before, at or after their first token, eight at a time."""
    n_streams = settings.pick(10_000, 64)
    async with open_own(settings, n_ctx=1024, n_seq_max=N_AT_ONCE) as own:
        await _round(own, 0, [])
        before, steps = await _held(own), own.statistics
        leaving_s: list[float] = []
        for run in range(n_streams // N_AT_ONCE):
            await _round(own, run, leaving_s)
        after, last = await _held(own), own.statistics
    step_s = (last.compute_s + last.sample_s - steps.compute_s - steps.sample_s) / (
        last.n_steps - steps.n_steps
    )
    leaving = Spread.of(leaving_s)
    await found.add(
        *(
            single(f"left behind: {name}", "", [float(after[name] - before[name])], LEFT_BAR)
            for name in before
        ),
        Figure(
            name="from leaving until nothing is left of it",
            unit="ms",
            ours=Spread(1000 * leaving.median, 1000 * leaving.half, leaving.n),
            other=Spread(1000 * step_s, 0.0, 1),
            other_name="one step",
            ratio=Spread(leaving.median / step_s, 0.0, 1),
            bar=STEP_BAR,
        ),
        notes=(f"{n_streams // N_AT_ONCE * N_AT_ONCE} streams.",),
    )


async def _round(own: Own, run: int, leaving_s: list[float]) -> None:
    async with trio.open_nursery() as nursery:
        for i in range(N_AT_ONCE):
            nursery.start_soon(partial(_open_and_leave, own, run, i, leaving_s))


async def _open_and_leave(own: Own, run: int, i: int, leaving_s: list[float]) -> None:
    """`i` decides how many events are read first: none, one, two or three."""
    async with own.model.stream(own.prompts.prompt(6, 14, run, i), max_tokens=64, temperature=0.0) as events:
        for _ in range(i % 4):
            await anext(events)
        left = time.perf_counter()
    while own.engine.request_info(events.request) is not None:  # noqa: ASYNC110  # as in `_held`
        await trio.sleep(LOOK_EVERY_S)
    leaving_s.append(time.perf_counter() - left)


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
    compared="slots, tasks, leases, nodes and files after against before; leaving against a step; no peer",
    measure=measure,
)
