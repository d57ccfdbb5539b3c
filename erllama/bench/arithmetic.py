"""A model whose computing takes time and no CPU, here and behind HTTP: what is left is what we cost."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import erllama
from erllama.testing import FakeBackend

from .own import Own
from .own_server import NAME, OwnServer
from .peer import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .settings import Settings

N_SEQ_MAX = 4
N_CTX = 4096
STEP_S = 0.005  # as a small model takes: each token leaves on its own
ANSWER = list(b"A word. " * 400)


def make_backend() -> FakeBackend:
    """The model: it says always the same, a byte for each token."""
    return FakeBackend(
        n_ctx=N_CTX, n_slots=N_SEQ_MAX, threaded=True, step_delay_s=STEP_S, script=lambda _: ANSWER
    )


@asynccontextmanager
async def open_here() -> AsyncIterator[Own]:
    """It in this process, for the block."""
    async with erllama.open_engine() as engine:
        yield Own(engine, await engine.load_model(backend=make_backend(), model_id=NAME))


@asynccontextmanager
async def open_behind_http(settings: Settings, banned: Sequence[int]) -> AsyncIterator[OwnServer]:
    """It in a server, a process of its own, for the block. Raises and cancels as `open_peer`."""
    command = [sys.executable, "-m", "erllama.bench.arithmetic_server"]
    async with serving(command, settings.folder) as port:
        yield OwnServer(port, banned)
