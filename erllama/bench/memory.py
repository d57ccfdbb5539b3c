"""P12: memory after many prompts. P18: what an extra resume point costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import psutil

from .figure import Bar, single
from .own import Own, open_own
from .restore import fetch_window_model
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from .figure import Figure
    from .settings import Settings

BUDGET_BYTES = 64 << 20
RSS_BAR, GROWTH_BAR = Bar("<=", 1.05, "value"), Bar("<=", 0.02, "value")
BLOCK = 256
N_STATES = 2  # that llama.cpp holds in a context for one request: its own, and the scratch sequence's
STATE_SHARE = 0.05
HEADER_BYTES = 128  # of an exported state, at most (llama.cpp: state_write of a recurrent memory)


async def measure_rss(settings: Settings, found: Found) -> None:
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
    growth = (above[-1] - above[n_prompts // 2]) / BUDGET_BYTES
    await found.add(
        single(
            "most RSS above the start, as a share of the budget", "×", [max(above) / BUDGET_BYTES], RSS_BAR
        ),
        single("growth in the second half, of the budget", "×", [growth], GROWTH_BAR),
        notes=(
            f"{n_prompts} prompts; budget {BUDGET_BYTES >> 20} MiB, in use "
            f"{counters.memory_bytes / 2**20:.0f} MiB, {counters.evictions} evictions.",
        ),
    )


async def measure_resume_points(settings: Settings, found: Found) -> None:
    """One more place to go on from: a branch of a stored chat, or the end of a prompt."""
    async with open_own(settings, n_ctx=512) as own:
        kind = own.memory_kind
    if kind == "window":
        note = "A recurrent state: with --model and a hybrid or recurrent GGUF."
        await found.add(await _window_parts(settings), notes=(note,))
    elif kind in ("hybrid", "recurrent"):
        await found.add(await _state_bytes(settings))
    else:
        raise NotMeasured(f"{settings.model.name} keeps every block alike; this is about windows and states")


async def _window_parts(settings: Settings) -> Figure:
    n = settings.pick(2048, 1100)
    async with open_own(settings, n_ctx=n + 256) as own:
        n_swa = int(own.model.info().details["n_swa"])
        chat = own.prompts.prompt(n, 18)
        before = await _sizes_after(own, chat, "window")
        branch = [*chat[: n - n % BLOCK - BLOCK], *own.prompts.tail(40, 18, 2)]
        after = await _sizes_after(own, branch, "window")
    if not before:
        raise NotMeasured("no window part is stored")
    added = (sum(after) - sum(before)) / max(before)
    bar = Bar("<=", math.ceil(n_swa / BLOCK), "value")
    return single(f"window of {n_swa}: window parts of one more place", "parts", [added], bar)


async def _state_bytes(settings: Settings) -> Figure:
    """The state as stored, against what llama.cpp's memory grows by nothing but cells from 512 to 1,024."""
    native = []
    for n_ctx in (512, 1024):
        async with open_own(settings, n_ctx=n_ctx) as own:
            native.append(own.model.info().details["memory"].kv_bytes)
            states = await _sizes_after(own, own.prompts.prompt(300, 18), "state")
    if not states:
        raise NotMeasured("no state is stored")
    state_bytes = (2 * native[0] - native[1]) / N_STATES
    # A tiny model's state is so small that llama.cpp's own header would be more than 5 % of it.
    most = max(STATE_SHARE * state_bytes, HEADER_BYTES)
    name = f"bytes of one more place beyond its state of {state_bytes:,.0f}"
    return single(name, "bytes", [max(states) - state_bytes], Bar("<=", most, "value"))


async def _sizes_after(own: Own, prompt: list[int], kind: str) -> list[int]:
    """Bytes of each stored part of a kind, once the prompt is answered and saved."""
    await own.ask(prompt, 1, cache=True)
    await own.engine.cache.flush()
    return [node["parts"][kind]["bytes"] for node in own.engine.cache.dump() if kind in node["parts"]]


RSS = Workload(
    id="P12",
    title="memory after 1,000 different prompts",
    compared="resident memory above that of the warmed-up model against the RAM tier's budget; no peer",
    measure=measure_rss,
)
RESUME_POINTS = Workload(
    id="P18",
    title="bytes of an extra resume point",
    compared="what one more branch of a stored chat adds: window parts, or (--model) a state; no peer",
    measure=measure_resume_points,
    model=fetch_window_model,
)
