"""Where `erllama generate` keeps what a model has read, so that the next run need not read it again."""

from __future__ import annotations

import logging
import os
import shutil
from typing import Final

from erllama import DiskTier, SavePolicy
from erllama.files import cache_dir

log = logging.getLogger("erllama.cli")
TIER: Final = "disk"
MAX_BYTES: Final = 4 << 30
# Computing fewer tokens takes less time than starting the command: not worth a file.
POLICY: Final = SavePolicy(min_tokens=64, cold_min_tokens=64)
SAVE_S: Final = 10.0  # how long the end of a run waits for what is still to be written


def kept_tiers(folder: str | None = None, max_bytes: int | None = None) -> list[DiskTier]:
    """The disk tier that runs share, in `folder` or erllama's cache folder.

    `max_bytes`: its budget; by default 4 GiB, or a quarter of what the disk has free if that is less. Where
    the folder cannot be used, a warning and no tier: the run is cold, and that is all.
    """
    path = os.path.abspath(os.path.expanduser(folder)) if folder is not None else str(cache_dir() / "kv")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        free = shutil.disk_usage(path).free
    except OSError as why:
        log.warning("nothing is kept between runs: %s: %s", path, why.strerror)
        return []
    # One that can only be read still serves what it holds; the store says so itself.
    if not os.access(path, os.W_OK | os.X_OK) and not os.path.isdir(os.path.join(path, "nodes")):
        log.warning("nothing is kept between runs: %s cannot be written", path)
        return []
    return [DiskTier(TIER, path, min(MAX_BYTES, free // 4) if max_bytes is None else max_bytes)]
