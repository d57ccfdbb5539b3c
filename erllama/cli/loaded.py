"""The model that a command talks to, warm from earlier runs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import erllama

from .kept import POLICY, SAVE_S, TIER, kept_tiers
from .progress import bar, default_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from erllama.options import ContextOptions


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, its file, and whether what it reads is kept between runs."""

    model: erllama.Model
    path: Path
    is_kept: bool


@asynccontextmanager
async def loaded(
    arguments: argparse.Namespace, context: ContextOptions, *, chat_template: str | None = None
) -> AsyncIterator[Loaded]:
    """Load what `--model` names (or fetch the default model), with a bar, on an engine for the block."""
    path = await default_path() if arguments.model is None else Path(arguments.model)
    tiers = [] if arguments.no_cache else kept_tiers(arguments.kv_dir, arguments.kv_max)
    async with erllama.open_engine(tiers=tiers, evict_save_timeout_s=SAVE_S) as engine:
        tier = TIER if tiers else "ram"
        with bar(f"Loading {path.name}") as draw:
            model = await engine.load_model(
                path, context=context, policy=POLICY, tier=tier, progress=draw, chat_template=chat_template
            )
        yield Loaded(model, path, bool(tiers))
