"""One bench run: the workloads one after the other, the table as they end, the files as figures come."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import ErllamaError

from .figure import Outcome
from .plot import charts
from .report import as_json, machine, versions
from .settings import Settings
from .table import print_outcome
from .workload import Found, NotMeasured, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .programs import Programs

BUSY_LOAD = 0.5
UNFINISHED = "the run ended before it did"


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


@dataclass(slots=True, kw_only=True)
class Record:
    """What was measured so far, and the files that hold it."""

    asked: Request
    settings: Settings
    started: str
    facts: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    async def check(self) -> None:
        """Raises: OSError if the files cannot be written; what is in them stays until there is a figure."""
        await trio.to_thread.run_sync(self._check)

    async def write(self) -> None:
        """Write the files anew. Raises: OSError. Cancellation: waits for two small files."""
        await trio.to_thread.run_sync(self._write)

    def _check(self) -> None:
        if self.asked.plots is not None:
            self.asked.plots.mkdir(parents=True, exist_ok=True)
        if self.asked.json is not None:
            self.asked.json.open("ab").close()

    def _write(self) -> None:
        if self.asked.json is not None:
            told = as_json(self.settings, self.started, self.facts, self.outcomes)
            _replace(self.asked.json, json.dumps(told, indent=1, ensure_ascii=False) + "\n")
        if self.asked.plots is not None:
            for name, chart in charts(self.outcomes).items():
                _replace(self.asked.plots / name, chart.svg())


async def run_bench(asked: Request) -> list[Outcome]:
    """Run, print and write everything. What was measured is written at once, whatever ends the run later.

    Raises: OSError where the files cannot be written. A workload's own failure is in its outcome.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts: dict[str, Any] = {"machine": machine(), "versions": versions()}
    if facts["machine"]["load_before"] > BUSY_LOAD:
        print(
            f"The machine is not idle (load {facts['machine']['load_before']:.1f}): "
            "these figures will say little."
        )
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
        record = Record(asked=asked, settings=settings, started=started, facts=facts)
        await record.check()  # now, not in an hour
        for workload in asked.workloads:
            asked.say(f"{workload.id} {workload.title}")
            await run_one(workload, record)
    _print_summary(record.outcomes, quick=asked.quick)
    return record.outcomes


async def run_one(workload: Workload, record: Record) -> None:
    """Measure and print one workload. A failure becomes part of its outcome; the next one may do better."""
    blank = Outcome(id=workload.id, title=workload.title, compared=workload.compared)
    began = time.perf_counter()

    async def keep(failure: str | None = UNFINISHED) -> None:
        record.outcomes[-1] = dataclasses.replace(
            blank,
            figures=tuple(found.figures),
            notes=tuple(found.notes),
            seconds=time.perf_counter() - began,
            failure=failure,
        )
        await record.write()

    settings, found = record.settings, Found(keep)
    failure: str | None = UNFINISHED
    record.outcomes.append(dataclasses.replace(blank, failure=UNFINISHED))
    try:
        if workload.model is not None and record.asked.model is None:
            settings = dataclasses.replace(settings, model=await workload.model())
        await workload.measure(settings, found)
        failure = None
    except Exception as why:  # a mistake in one workload must not cost those that come after it
        failure = _reason(why)
    finally:
        with trio.CancelScope(shield=True):  # two small files
            await keep(failure)
        print_outcome(record.outcomes[-1], judge=not settings.quick)


def _reason(failure: Exception) -> str:
    """What the table says of it. What is no failure of ours to name is a bug, and shows where it happened."""
    causes = list(_leaves(failure))
    if not all(isinstance(cause, NotMeasured | ErllamaError) for cause in causes):
        traceback.print_exception(failure)
    return "; ".join(dict.fromkeys(_sentence(cause) for cause in causes))


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group and its subgroups."""
    if isinstance(failure, BaseExceptionGroup):
        for inner in failure.exceptions:
            yield from _leaves(inner)
    else:
        yield failure


def _sentence(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, NotMeasured | ErllamaError) else f"{type(cause).__name__}: {cause}"


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a run that is killed leaves the file as it was after the figure before."""
    if path.is_symlink() or not path.is_file():  # a device or a pipe is no place for a new file
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _print_summary(outcomes: list[Outcome], *, quick: bool) -> None:
    judged = [figure.met for outcome in outcomes for figure in outcome.figures if figure.met is not None]
    if quick:
        print("\nQuick sizes: no bar was judged.")
        return
    print(f"\n{sum(judged)} bars met, {len(judged) - sum(judged)} missed.")
    if not_measured := [outcome.id for outcome in outcomes if outcome.failure is not None]:
        print(f"Not measured: {', '.join(not_measured)}.")
