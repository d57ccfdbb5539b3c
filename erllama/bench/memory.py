"""P12: memory after many prompts. P18: what an extra resume point costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import psutil

from .figure import Bar, single
from .own import open_own
from .restore import fetch_window_model
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from .settings import Settings

BUDGET_BYTES = 64 << 20
RSS_BAR, GROWTH_BAR = Bar("<=", 1.05, "value"), Bar("<=", 0.02, "value")
STATE_BAR = Bar("<=", 1.05, "value")
BLOCK = 256


async def measure_rss(settings: Settings) -> Found:
    """Different prompts that together are many times the RAM tier's budget."""
    n_prompts = settings.pick(1000, 40)
    process = psutil.Process()
    async with open_own(settings, n_ctx=512, ram_max_bytes=BUDGET_BYTES) as own:
        for i in range(4):  # what is allocated once is there
            await own.ask(own.prompts.prompt(72, 12, 12, i), 1, cache=False)
        base = process.memory_info().rss
        above: list[float] = []
        for i in range(n_prompts):
            await own.ask(own.prompts.prompt(72, 12, i), 1, cache=True)
            above.append(process.memory_info().rss - base)
        await own.engine.cache.flush()
        counters = own.engine.cache.counters()
    half = above[n_prompts // 2]
    return Found(
        figures=[
            single("RSS above the start, as a share of the budget", "×", [above[-1] / BUDGET_BYTES], RSS_BAR),
            single(
                "growth in the second half, of the budget",
                "×",
                [(above[-1] - half) / BUDGET_BYTES],
                GROWTH_BAR,
            ),
        ],
        notes=[
            f"{n_prompts} prompts; budget {BUDGET_BYTES >> 20} MiB, in use "
            f"{counters.memory_bytes / 2**20:.0f} MiB, {counters.evictions} evictions."
        ],
    )


async def measure_resume_points(settings: Settings) -> Found:
    """A chat on a model with a window or a state: what is stored for each point where it can be resumed."""
    n_turns, n_turn = settings.pick((8, 300), (3, 280))
    async with open_own(settings, n_ctx=n_turns * n_turn + 64) as own:
        info = own.model.info()
        if info.memory_kind not in ("window", "hybrid", "recurrent"):
            raise NotMeasured(
                f"{settings.model.name} keeps every block alike; this is about windows and states"
            )
        history: list[int] = own.prompts.prompt(n_turn, 18)
        for turn in range(1, n_turns + 1):
            await own.ask(history, 1, cache=True)
            await own.engine.cache.flush()
            history = [*history, *own.prompts.tail(n_turn, 18, turn)]
        nodes = list(own.engine.cache.dump())
        n_swa = int(info.details["n_swa"])
    return _resume_points(nodes, n_turns, info.memory_kind, n_swa)


def _resume_points(nodes: list[dict[str, Any]], n_points: int, kind: str, n_swa: int) -> Found:
    wanted = {"window": "window", "hybrid": "state", "recurrent": "state"}[kind]
    sizes = [part["bytes"] for node in nodes for name, part in node["parts"].items() if name == wanted]
    if not sizes:
        return Found(
            figures=[single(f"{wanted} parts stored", "parts", [0.0])],
            notes=[f"No {wanted} part is stored: this memory kind is not kept."],
        )
    if kind == "window":
        most = math.ceil(n_swa / BLOCK)
        bar = Bar("<=", most, "value")
        return Found(figures=[single("window parts a resume point", "parts", [len(sizes) / n_points], bar)])
    each = sum(sizes) / n_points / max(min(sizes), 1)
    return Found(figures=[single("state bytes a resume point, of one state", "×", [each], STATE_BAR)])


RSS = Workload(
    id="P12",
    title="memory after 1,000 different prompts",
    compared="resident memory above that of the warmed-up model against the RAM tier's budget; no peer",
    measure=measure_rss,
)
RESUME_POINTS = Workload(
    id="P18",
    title="bytes of an extra resume point",
    compared="parts stored for a turn's end: windows on gemma-3-270m, states with --model HYBRID; no peer",
    measure=measure_resume_points,
    model=fetch_window_model,
)
