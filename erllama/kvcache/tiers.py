"""Tiers as users name them, and what the store knows of a running one."""

from __future__ import annotations

import enum
import math
import os
from dataclasses import dataclass
from typing import Final

from erllama.checks import checked_arguments
from erllama.errors import InvalidOption

RAM_TIER: Final = "ram"


class TierKind(enum.StrEnum):
    """What happens to a tier's content: gone with the process, with the machine, or never."""

    RAM = "ram"
    RAM_FILE = "ram_file"
    DISK = "disk"


@checked_arguments
@dataclass(frozen=True, slots=True)
class RamTier:
    """The pooled RAM tier. `spill` names the tier that receives what it evicts."""

    max_bytes: int = 1 << 30
    spill: str | None = None
    name: str = RAM_TIER

    def __post_init__(self) -> None:
        _check(self.name, self.max_bytes)


@checked_arguments
@dataclass(frozen=True, slots=True)
class _FileTierOptions:
    name: str
    root: str  # any path; `~` is the user's home
    max_bytes: int = 20 << 30
    max_write_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        _check(self.name, self.max_bytes)
        object.__setattr__(self, "root", _path(self.name, self.root))
        if self.name == RAM_TIER:
            raise InvalidOption('the name "ram" is taken by the RAM tier', detail={"key": "name"})
        rate: object = self.max_write_bytes_per_s
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            key = "max_write_bytes_per_s"
            raise InvalidOption(f"{key} must be a number above 0", detail={"key": key, "value": rate})

    @property
    def kind(self) -> TierKind:
        """Disk or memory-backed."""
        raise NotImplementedError


class RamFileTier(_FileTierOptions):
    """Files on a memory-backed file system: they outlive the process, not the machine's next start."""

    __slots__ = ()

    @property
    def kind(self) -> TierKind:
        """`ram_file`."""
        return TierKind.RAM_FILE


class DiskTier(_FileTierOptions):
    """Files on disk. `max_write_bytes_per_s` bounds wear: what exceeds it stays in RAM only."""

    __slots__ = ()

    @property
    def kind(self) -> TierKind:
        """`disk`."""
        return TierKind.DISK


FileTierOptions = RamFileTier | DiskTier


def _check(name: object, max_bytes: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidOption("a tier needs a name", detail={"key": "name", "value": name})
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise InvalidOption(
            f"tier {name!r}: max_bytes must be a whole number of bytes",
            detail={"key": "max_bytes", "value": max_bytes},
        )


def _path(name: str, root: object) -> str:
    path = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidOption(f"tier {name!r}: root must be a path", detail={"key": "root", "value": root})
    return path
