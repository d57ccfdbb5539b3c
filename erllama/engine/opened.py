"""An opened backend and what goes with it from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erllama.backend import Backend, BackendFacts
    from erllama.options import ContextOptions

    from .runner import Runner


@dataclass(frozen=True, slots=True)
class Opened:
    """`facts` are what `backend.open` told, `options` are resolved, `runner` makes all native calls."""

    model_id: str
    backend: Backend
    facts: BackendFacts
    options: ContextOptions
    runner: Runner
