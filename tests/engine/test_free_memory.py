"""What is free on this machine, and on machines made up."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from erllama.engine import free_memory as module
from erllama.engine.free_memory import FreeMemory, free_memory
from erllama.llama.backend import Device

GIB = 1 << 30


def device(kind: str, free: int, total: int) -> Device:
    """One of ggml's."""
    return Device(name=kind, description="", kind=kind, free_bytes=free, total_bytes=total)


@pytest.mark.parametrize(
    ("available", "mapped", "cgroup", "devices", "expected"),
    [
        (8, 0, 8, [], (8, None)),
        (8, 3, 8, [], (5, None)),  # the kernel would drop our models' pages, we need them
        (8, 3, 4, [], (4, None)),  # the cgroup has counted them
        (2, 3, 8, [], (0, None)),
        (8, 0, 8, [("cpu", 8, 16), ("igpu", 8, 16)], (8, None)),  # its memory is the machine's
        (8, 0, 8, [("gpu", 5, 24), ("gpu", 6, 24)], (8, 11)),
        (8, 0, 8, [("gpu", 0, 0)], (8, None)),  # it does not tell
    ],
)
def test_what_is_free(monkeypatch, available, mapped, cgroup, devices, expected):
    """Available memory without what our models have mapped, and that of all GPUs."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(shared=mapped * GIB))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available * GIB))
    monkeypatch.setattr(module, "available_bytes", lambda: cgroup * GIB)
    found = [device(kind, free * GIB, total * GIB) for kind, free, total in devices]
    monkeypatch.setattr(module.llama, "devices", lambda: found)
    system, gpu = expected
    assert free_memory() == FreeMemory(
        system_bytes=system * GIB, gpu_bytes=None if gpu is None else gpu * GIB
    )


@pytest.mark.model
def test_this_machine_has_memory():
    """And less of it is free than there is."""
    assert 0 < free_memory().system_bytes < psutil.virtual_memory().total
