"""The whole run as JSON: figures, and everything needed to repeat them."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import erllama
from erllama.llama.backend import build_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .figure import Figure, Outcome
    from .settings import Settings
    from .spread import Spread

SCHEMA = 1  # raise it when a key changes its meaning


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "usable_cpus": erllama.options.usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def versions() -> dict[str, Any]:
    """Ours and llama.cpp's; `commit` is None outside a checkout, with `+` where files were changed."""
    build = build_info()
    return {
        "erllama": erllama.__version__,
        "commit": _commit(Path(erllama.__file__).parent.parent),
        "llama_cpp": build.llama_version,
        "pin": build.pin,
        "backend": build.backend,
        "cpu_variant": build.cpu_variant,
    }


def flags(settings: Settings) -> dict[str, Any]:
    """What both sides were given alike; what a workload changes is said in its `compared`."""
    return {
        "model": settings.model.name,
        "n_threads": settings.n_threads,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_batch,
        "flash_attn": settings.flash_attn,
        "type_kv": settings.type_kv,
        "kv_unified": True,
        "temperature": 0.0,
        "n_runs": settings.n_runs,
        "quick": settings.quick,
        "peer": None if settings.programs is None else "llama-server",
    }


def as_json(
    settings: Settings, started: str, facts: dict[str, Any], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """`facts` holds `machine` and `versions`, read before anything was measured."""
    return {
        "schema": SCHEMA,
        "started": started,
        **facts,
        "flags": flags(settings),
        "workloads": [_outcome(outcome, judge=not settings.quick) for outcome in outcomes],
    }


def _outcome(outcome: Outcome, *, judge: bool) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "title": outcome.title,
        "compared": outcome.compared,
        "seconds": round(outcome.seconds, 1),
        "failure": outcome.failure,
        "notes": list(outcome.notes),
        "figures": [_figure(figure, judge=judge) for figure in outcome.figures],
    }


def _figure(figure: Figure, *, judge: bool) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "at": figure.at,
        "ours": _spread(figure.ours),
        "other": _spread(figure.other),
        "other_name": figure.other_name or None,
        "ratio": _spread(figure.ratio),
        "bar": None if figure.bar is None else dataclasses.asdict(figure.bar),
        "met": figure.met if judge else None,
    }


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else dataclasses.asdict(spread)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def _commit(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
