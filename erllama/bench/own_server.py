"""Our side over HTTP: `erllama serve` in a process of its own, asked as the peer is."""

from __future__ import annotations

import json
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psutil

from .answer import Answer
from .http import peer_failed, request, stream_events
from .peer import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .settings import Settings

NAME = "bench"
PATH = "/v1/completions"
BAN = -1000.0  # JSON has no infinity; no logit comes near
N_CLOSING = 3  # events without text: why it ended, usage, [DONE]


class OwnServer:
    """A running `erllama serve`. Implements `answer.Side`."""

    name = "erllama over HTTP"

    def __init__(self, port: int, banned: Sequence[int]) -> None:
        self.port = port
        self._bias = {str(token): BAN for token in banned}

    def body(self, prompt: Sequence[int], n_out: int, *, cache: bool) -> dict[str, Any]:
        """A request that generates exactly `n_out` tokens, always the likeliest."""
        return {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": n_out,
            "temperature": 0,
            "logit_bias": self._bias,
            "cache": "on" if cache else "off",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(
        self, prompt: Sequence[int], n_out: int, *, cache: bool, seen: list[float] | None = None
    ) -> Answer:
        """See `answer.Side`; `times` has one reading per piece of text that the server sends."""
        times = [] if seen is None else seen
        clock = time.perf_counter
        usage = b""

        def on_event(data: bytes) -> None:
            nonlocal usage
            times.append(clock())
            if b'"usage"' in data:
                usage = data

        began = clock()
        await stream_events(self.port, PATH, self.body(prompt, n_out, cache=cache), on_event)
        ended = clock()
        if not usage:
            raise peer_failed("erllama serve broke off: its stream has no usage")
        del times[-N_CLOSING:]
        told = json.loads(usage)["usage"]
        return Answer(
            n_prompt=told["prompt_tokens"],
            n_computed=told["prompt_tokens"] - told["prompt_tokens_details"]["cached_tokens"],
            n_generated=told["completion_tokens"],
            began=began,
            times=tuple(times),
            ended=ended,
        )

    async def cpu_s(self) -> float:
        """CPU seconds of its process so far."""
        for connection in psutil.net_connections("tcp4"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (self.port,):
                times = psutil.Process(connection.pid).cpu_times()
                return float(times.user + times.system)
        raise peer_failed("nobody listens on the server's port")


@asynccontextmanager
async def open_server(
    settings: Settings, banned: Sequence[int], *, n_ctx: int, n_seq_max: int
) -> AsyncIterator[OwnServer]:
    """A server for the block, its model loaded. Raises and cancels as `open_peer`."""
    config = settings.folder / "server.toml"
    config.write_text(_config(settings, n_ctx, n_seq_max), encoding="utf-8")
    command = [sys.executable, "-m", "erllama", "serve", "--quiet", "--no-cache", "--config", str(config)]
    async with serving(command, settings.folder) as port:
        server = OwnServer(port, banned)
        status, reply = await request(port, "POST", "/tokenize", {"model": NAME, "content": "load"})
        if status != 200:
            raise peer_failed(f"erllama serve cannot load its model: {reply}")
        yield server


def _config(settings: Settings, n_ctx: int, n_seq_max: int) -> str:
    context = {
        "n_ctx": n_ctx,
        "n_seq_max": n_seq_max,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_batch,
        "n_threads": settings.n_threads,
        "flash_attn": settings.flash_attn,
        "type_k": settings.type_kv,
        "type_v": settings.type_kv,
    }
    pairs = "".join(f"{name} = {json.dumps(value)}\n" for name, value in context.items())
    return (
        f"keep_alive_s = -1\n[queue]\ndepth = 1000\ntimeout_s = 3600\n"
        f"[models.{NAME}]\npath = {json.dumps(str(settings.model.resolve()))}\n"
        f"[models.{NAME}.context]\n{pairs}"
    )
