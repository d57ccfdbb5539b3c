"""What every row of the warm benchmark needs: a served model, prompts of exact lengths, figures with bars."""

from __future__ import annotations

import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import erllama
from erllama.cli.demo_text import house_rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from erllama.types import Completion

TIER = "kv"
POLICY = erllama.SavePolicy(min_tokens=32, cold_min_tokens=32)
RAM_BYTES = 4 << 30
N_CTX_PAD = 256  # llama.cpp: cells come in multiples of this
N_ROOM_TOKENS = 24  # of `house_rules`, at least


class NotWarm(Exception):
    """A request that the row needs to be warm was not, so there is nothing to measure."""


@dataclass(frozen=True)
class Bench:
    """What is measured, and how thoroughly. `quick`: tiny sizes, one run, to see that it works."""

    path: Path
    gemma: Path
    hybrid: Path
    folder: Path
    runs: int = 3
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """A number of tokens, or of anything else."""
        return quick if self.quick else full

    @property
    def n_runs(self) -> int:
        """How often a timing is repeated."""
        return 1 if self.quick else self.runs

    def subfolder(self, name: str) -> str:
        """A place for one row's files."""
        return str(self.folder / name)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table. `met`: None where a quick run, or this script alone, cannot tell."""

    row: str
    what: str
    bar: str
    figure: str
    met: bool | None
    details: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def served(
    path: Path, n_ctx: int, *, folder: str | None = None, ram_bytes: int = RAM_BYTES, n_seq_max: int = 1
) -> AsyncIterator[tuple[erllama.Engine, erllama.Model]]:
    """A model on an engine of its own; with a `folder` it keeps its KV on disk."""
    n_ctx += -n_ctx % N_CTX_PAD  # llama.cpp would do so, and say less
    tiers = [erllama.DiskTier(TIER, folder)] if folder is not None else []
    async with erllama.open_engine(tiers=tiers, ram_max_bytes=ram_bytes) as engine:
        options = erllama.ContextOptions(n_ctx=n_ctx, n_seq_max=n_seq_max)
        tier = TIER if tiers else "ram"
        yield engine, await engine.load_model(path, context=options, policy=POLICY, tier=tier)


def ids(model: erllama.Model, n: int, seed: int) -> list[int]:
    """That many tokens of natural text; another seed is another text from its first words on."""
    text = f"{seed} and {seed * 7919 % 1000}. {house_rules(n // N_ROOM_TOKENS + 2, seed)}"
    found = model.tokenize(text)[:n]
    assert len(found) == n, f"{n} tokens wanted, the text has {len(found)}"
    return found


async def ask(
    model: erllama.Model, prompt: Sequence[int], *, n_answer: int = 1, **options: Any
) -> Completion:
    """One greedy answer."""
    return await model.complete(list(prompt), max_tokens=n_answer, temperature=0.0, **options)


async def displace(model: erllama.Model) -> None:
    """Take the only slot, so that what was in it can come from the store alone."""
    await ask(model, ids(model, 40, 999_999), cache="off")


def must_be_warm(answer: Completion, *sources: str) -> Completion:
    """Raises: `NotWarm` unless all but the last token came from one of `sources`."""
    n, source = answer.stats.n_computed, answer.cache_source
    if n > 1 or source not in sources:
        raise NotWarm(f"computed {n} of {answer.stats.n_prompt} tokens, source {source}: {answer.miss}")
    return answer


def kv_token_bytes(model: erllama.Model) -> float:
    """KV bytes of a token, for models whose layers all keep everything."""
    info = model.info()
    return float(info.details["memory"].kv_bytes / info.n_ctx)


def memcpy_s(n_bytes: int, n: int = 5) -> float:
    """Median time to copy that much into memory that is in use already."""
    source, target = np.ones(n_bytes, np.uint8), np.ones(n_bytes, np.uint8)
    times = []
    for _ in range(n):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(
    bench: Bench, row: str, what: str, values: Sequence[float], *, least: float = 0.0, most: float = 0.0,
    unit: str = "x", **details: Any,
) -> Figure:  # fmt: skip
    """The median of a ratio of times, against the least or the most it may be (0: no bar)."""
    median = statistics.median(values)
    bar = f"≥ {least:g} {unit}" if least else f"≤ {most:g} {unit}" if most else "-"
    met = None if bench.quick or bar == "-" else median >= least if least else median <= most
    shown = f"{median:.3g} {unit}" if median < 1000 else f"{median:,.0f} {unit}"
    return Figure(
        row=row, what=what, bar=bar, figure=shown, met=met, details={"values": list(values), **details}
    )


def counted(row: str, what: str, n: float, most: float, **details: Any) -> Figure:
    """A count, or a ratio of counts, against the most it may be."""
    return Figure(row=row, what=what, bar=f"≤ {most:g}", figure=f"{n:g}", met=n <= most, details=details)
