"""How a store runs: its tiers, its writers, its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from erllama.options import Rejected, integer, number, option, optional, options, string

from .files import Files
from .score import PrefillCost
from .tiers import FileTierOptions, RamTier

if TYPE_CHECKING:
    from .runner import Runner


def _instance(of: type, what: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, of):
            raise Rejected(what)
        return value

    return check


def _file_tiers(value: object) -> tuple[FileTierOptions, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(tier, FileTierOptions) for tier in value):
        raise Rejected("a sequence of DiskTier and RamFileTier")
    return tuple(value)


def _callable(value: object) -> object:
    if not callable(value):
        raise Rejected("a function")
    return value


@options
class StoreOptions:
    """Options of `open_store`.

    `writer_max_concurrent` saves are written at once; when `writer_max_bytes` wait for them, further saves to
    file tiers are refused. `n_threads`: worker threads for file work, at least one more than writers is wise.
    `shutdown_s`: how long leaving waits for pending writes. `pin_fraction`: share of a tier that pins may
    take. `cost`: what prefill costs, until the engine has measured it. `lookup_log`: a file that `kvc sim`
    can replay; it holds prompts. `clock` (seconds since the epoch), `run` and `files` are for tests.
    """

    ram: RamTier = option(default=RamTier(), check=_instance(RamTier, "a RamTier"))
    tiers: Sequence[FileTierOptions] = option(default=(), check=_file_tiers)
    writer_max_concurrent: int = option(default=2, check=integer(0, 64))
    writer_max_bytes: int = option(default=256 << 20, check=integer(0))
    n_threads: int = option(default=4, check=integer(1, 64))
    shutdown_s: float = option(default=30.0, check=number(0))
    pin_fraction: float = option(default=0.25, check=number(0, 1))
    cost: PrefillCost = option(default=PrefillCost(), check=_instance(PrefillCost, "a PrefillCost"))
    lookup_log: str | None = option(default=None, check=optional(string))
    clock: Callable[[], float] = option(default=time.time, check=_callable)
    run: Runner | None = option(default=None, check=optional(_callable))
    files: Files | None = option(default=None, check=optional(_instance(Files, "a Files")))
