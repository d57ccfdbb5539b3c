"""One bench run: the workloads one after the other, the table as they end, then the files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import ErllamaError

from .figure import Outcome
from .plot import charts
from .report import as_json, machine, versions
from .settings import Settings
from .table import print_outcome
from .workload import NotMeasured, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .programs import Programs

BUSY_LOAD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for. `model` is None for the default one; `folder` for a temporary one."""

    workloads: Sequence[Workload]
    default_model: Path
    model: Path | None = None
    programs: Programs | None = None
    n_threads: int = 1
    n_runs: int = 5
    quick: bool = False
    folder: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    say: Callable[[str], None] = lambda _: None


async def run_bench(asked: Request) -> list[Outcome]:
    """Run, print and write everything. What was measured is written even if the run is interrupted.

    Raises: OSError where the files cannot be written. A workload's own failure is in its outcome.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts: dict[str, Any] = {"machine": machine(), "versions": versions()}
    if facts["machine"]["load_before"] > BUSY_LOAD:
        print(
            f"The machine is not idle (load {facts['machine']['load_before']:.1f}): "
            "these figures will say little."
        )
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="erllama-bench-", dir=asked.folder) as folder:
        settings = Settings(
            model=asked.model or asked.default_model,
            folder=Path(folder),
            n_threads=asked.n_threads,
            n_runs=asked.n_runs,
            quick=asked.quick,
            programs=asked.programs,
            say=asked.say,
        )
        try:
            for workload in asked.workloads:
                asked.say(f"{workload.id} {workload.title}")
                outcomes.append(await run_one(workload, settings, own_model=asked.model is not None))
                print_outcome(outcomes[-1], judge=not asked.quick)
        finally:
            with trio.CancelScope(shield=True):  # two small files
                await trio.to_thread.run_sync(_write, asked, settings, started, facts, outcomes)
    _print_summary(outcomes, quick=asked.quick)
    return outcomes


async def run_one(workload: Workload, settings: Settings, *, own_model: bool) -> Outcome:
    """Measure one workload; a failure that is ours to name becomes part of its outcome."""
    blank = Outcome(id=workload.id, title=workload.title, compared=workload.compared)
    began = time.perf_counter()
    try:
        if workload.model is not None and not own_model:
            settings = dataclasses.replace(settings, model=await workload.model())
        found = await workload.measure(settings)
    except (NotMeasured, ErllamaError) as why:
        return dataclasses.replace(blank, failure=str(why), seconds=time.perf_counter() - began)
    return dataclasses.replace(
        blank,
        figures=tuple(found.figures),
        notes=tuple(found.notes),
        seconds=time.perf_counter() - began,
    )


def _write(
    asked: Request, settings: Settings, started: str, facts: dict[str, Any], outcomes: list[Outcome]
) -> None:
    if asked.json is not None:
        text = json.dumps(as_json(settings, started, facts, outcomes), indent=1, ensure_ascii=False)
        asked.json.write_text(text + "\n", encoding="utf-8")
    if asked.plots is not None:
        asked.plots.mkdir(parents=True, exist_ok=True)
        for name, chart in charts(outcomes).items():
            (asked.plots / name).write_text(chart.svg(), encoding="utf-8")


def _print_summary(outcomes: list[Outcome], *, quick: bool) -> None:
    judged = [figure.met for outcome in outcomes for figure in outcome.figures if figure.met is not None]
    if quick:
        print("\nQuick sizes: no bar was judged.")
        return
    print(f"\n{sum(judged)} bars met, {len(judged) - sum(judged)} missed.")
    if not_measured := [outcome.id for outcome in outcomes if outcome.failure is not None]:
        print(f"Not measured: {', '.join(not_measured)}.")
