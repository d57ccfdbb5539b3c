"""P11: what saving costs those who decode meanwhile."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .answer import wall_s
from .figure import Bar, against, single
from .own import Own, open_own, together
from .spread import take_turns
from .workload import Found, Workload

if TYPE_CHECKING:
    from .settings import Settings

BAR = Bar(">=", 0.97)


async def measure(settings: Settings, found: Found) -> None:
    """Eight requests, all cold: with saving to disk beside, and with nothing saved at all."""
    n, n_prompt, n_out = settings.pick((8, 256, 128), (4, 96, 8))
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        n_ctx = n * (n_prompt + n_out + 32)
        async with open_own(settings, n_ctx=n_ctx, n_seq_max=n, disk=Path(folder)) as own:
            sides = [partial(_run, own, n, n_prompt, n_out, cache) for cache in (True, False)]
            on, off = await take_turns(settings.n_runs, *sides)
            written = own.engine.cache.counters().bytes_written
    rates, left_s = [run.rate for run in on], [run.left_s for run in on]
    await found.add(
        against("disk tier on", "tokens/s", rates, [run.rate for run in off], "nothing saved", BAR),
        single("… saving that was left behind the last token", "s", left_s),
        single("written", "MB", [sum(written.values()) / 1e6]),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens per second, and how long the disk was busy after the last token."""

    rate: float
    left_s: float


async def _run(own: Own, n: int, n_prompt: int, n_out: int, cache: bool, run: int) -> _Run:
    prompts = [own.prompts.prompt(n_prompt, 11, int(cache), run, i) for i in range(n)]
    answers = await together([partial(own.ask, p, n_out, cache=cache) for p in prompts])
    rate = sum(a.n_generated for a in answers) / wall_s(answers)
    began = time.perf_counter()
    await own.engine.cache.flush()  # what is left of one run must not slow the next one, which saves nothing
    return _Run(rate, time.perf_counter() - began)


SAVING = Workload(
    id="P11",
    title="saving beside decoding",
    compared="throughput of eight cold requests saved to disk meanwhile, against saving nothing; no peer",
    measure=measure,
)
