"""`python -m erllama.bench.arithmetic_server --host H --port P`: a server of the model in `arithmetic`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import trio

import erllama
from erllama.server.metrics import Metrics
from erllama.server.serving import serve_pool
from erllama.server.settings import make_settings

from .arithmetic import N_CTX, N_SEQ_MAX, make_backend
from .own_server import NAME

if TYPE_CHECKING:
    from erllama.server.pool import Progress
    from erllama.server.registry import Spec


async def serve(host: str, port: int) -> None:
    """Until the process ends."""
    table = {"path": NAME, "context": {"n_ctx": N_CTX, "n_seq_max": N_SEQ_MAX}}
    values = {"listen": {"host": host, "port": port}, "models": {NAME: table}, "keep_alive_s": -1}
    async with erllama.open_engine() as engine:

        async def load(spec: Spec, progress: Progress) -> erllama.Model:
            return await engine.load_model(backend=make_backend(), model_id=spec.name)

        await serve_pool(make_settings(values), load, metrics=Metrics(), stop=trio.sleep_forever)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    given = parser.parse_args()
    trio.run(serve, given.host, given.port)
