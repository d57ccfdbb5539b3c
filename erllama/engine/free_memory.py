"""How much memory there is for one more model, now."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from erllama import llama
from erllama.llama.sizing import available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free bytes of the machine, and of its GPUs; None where there is none, or it does not tell."""

    system_bytes: int
    gpu_bytes: int | None = None


def free_memory() -> FreeMemory:
    """A look at the machine. Raises: `NativeLibraryError`. Thread: a worker; the first call loads a library.

    Pages of the model files that this process has mapped count as available for the kernel, which may drop
    them; models that are loaded need them, so they are taken off. What a cgroup has used holds them already.
    """
    mapped = int(getattr(psutil.Process().memory_info(), "shared", 0))
    system = min(int(psutil.virtual_memory().available) - mapped, available_bytes())
    gpus = [device for device in llama.devices() if device.kind == "gpu" and device.total_bytes]
    return FreeMemory(
        system_bytes=max(0, system),
        gpu_bytes=sum(gpu.free_bytes for gpu in gpus) if gpus else None,
    )
