"""What holds for a whole bench run, and is the same on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from erllama.options import ContextOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .programs import Programs

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`programs` are upstream's, None when only our side runs. `folder` is scratch space on a real disk.

    `n_threads` is fixed on both sides, so that erllama does not give way to its peer's spinning threads.
    `quick` takes small sizes, at which no bar is judged.
    """

    model: Path
    folder: Path
    n_threads: int
    n_runs: int = 5
    quick: bool = False
    programs: Programs | None = None
    n_batch: int = 512
    flash_attn: bool = True
    type_kv: Any = "f16"
    say: Callable[[str], None] = lambda _: None

    def pick(self, full: T, quick: T) -> T:
        """A size: the workload's own, or one that takes a moment."""
        return quick if self.quick else full

    def runs(self, most: int) -> int:
        """How many runs are counted: as asked for, but at most `most` of a long one."""
        return min(self.n_runs, most)

    def context(self, *, n_ctx: int, n_seq_max: int = 1, **more: Any) -> ContextOptions:
        """The context of our side."""
        given: dict[str, Any] = {
            "n_batch": self.n_batch,
            "n_ubatch": self.n_batch,
            "n_threads": self.n_threads,
            "flash_attn": self.flash_attn,
            "type_k": self.type_kv,
            "type_v": self.type_kv,
        }
        return ContextOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, **{**given, **more})

    def with_kv(self, type_kv: str) -> Settings:
        """The same with another type of KV."""
        return replace(self, type_kv=type_kv)
