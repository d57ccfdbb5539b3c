"""What the machine offers: CPUs and threads."""

from __future__ import annotations

import math
import os


def usable_cpus() -> int:
    """CPUs this process may use: its affinity mask, capped by a cgroup quota where there is one."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:  # cgroup v2: "<quota|max> <period>", microseconds
            quota, period = f.read().split()
        if quota != "max":
            n = min(n, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return n  # no cgroup v2 here: the affinity mask is all there is to know
    return n


def busy_load() -> float | None:
    """The machine's load average over the last minute if it is more than half its CPUs, else None."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return load if load > cpus / 2 else None


def default_threads() -> int:
    """Physical cores, but never more than the usable CPUs."""
    import psutil  # 30 ms that `erllama --help` need not spend

    return max(1, min(psutil.cpu_count(logical=False) or usable_cpus(), usable_cpus()))
