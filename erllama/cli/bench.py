"""`erllama bench`: how fast it is, beside llama.cpp's own server if wanted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from erllama.bench.catalog import choose
from erllama.bench.programs import find_programs
from erllama.bench.run import Request, run_bench
from erllama.errors import EngineError, InvalidOption
from erllama.options import default_threads

from .progress import default_path, show_warnings

if TYPE_CHECKING:
    import argparse

    from erllama.bench.programs import Programs
    from erllama.bench.workload import Workload


def run(arguments: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded, then measure."""
    try:
        workloads = choose(arguments.workloads)
    except InvalidOption as why:
        arguments.parser.error(str(why))
    for name in ("runs", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            arguments.parser.error(f"argument --{name}: at least 1")
    programs = find_programs() if arguments.vs else None
    with show_warnings():
        trio.run(_bench, arguments, workloads, programs)


async def _bench(arguments: argparse.Namespace, workloads: list[Workload], programs: Programs | None) -> None:
    model = None if arguments.model is None else Path(arguments.model)
    asked = Request(
        workloads=workloads,
        default_model=model or await default_path(),
        model=model,
        programs=programs,
        n_threads=arguments.threads or default_threads(),
        n_runs=arguments.runs or (1 if arguments.quick else 5),
        quick=arguments.quick,
        folder=None if arguments.folder is None else Path(arguments.folder),
        json=None if arguments.json is None else Path(arguments.json),
        plots=None if arguments.plots is None else Path(arguments.plots),
        say=_say,
    )
    outcomes = await run_bench(asked)
    if failed := [outcome.id for outcome in outcomes if outcome.failure is not None]:
        raise EngineError(
            f"not measured, or not to the end: {', '.join(failed)}; the table says why", reason="not_measured"
        )


def _say(what: str) -> None:
    print(f"erllama: {what} …", file=sys.stderr, flush=True)
