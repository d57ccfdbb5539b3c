"""llama-server: started on a free loopback port, asked over HTTP, always stopped."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import trio

from erllama.errors import EngineError

from .answer import Answer
from .http import LOOPBACK, peer_failed, request, stream_events
from .process import running

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Sequence

    from .settings import Settings

START_WITHIN_S = 120.0
_TRIES = 3  # somebody else may take the free port before the server does
_LOOK_EVERY_S = 0.02
_LAST_LINES = 8
# Its threads spin for some 0.15 s behind their last graph (ggml-cpu.c: 6.5 million rounds): whoever computes
# next would share a core with one of them. Ours end with each graph.
SPINS_S = 0.5


class LlamaServer:
    """A running llama-server. Implements `answer.Side`."""

    name = "llama-server"

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(
        self, prompt: Sequence[int], n_out: int, *, cache: bool, seen: list[float] | None = None
    ) -> Answer:
        """See `answer.Side`; `times` has one reading per piece of text that the server sends."""
        times = [] if seen is None else seen
        clock = time.perf_counter
        body = {
            "prompt": list(prompt),
            "n_predict": n_out,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": cache,
            # The likeliest token, found without sorting anything: the fastest that the server can do.
            "temperature": 0.0,
            "samplers": ["temperature"],
        }
        began = clock()
        last = await stream_events(self.port, "/completion", body, lambda _: times.append(clock()))
        ended = clock()
        await trio.sleep(SPINS_S)
        final = json.loads(last)
        if "timings" not in final:
            raise peer_failed(f"llama-server broke off: {last[:500].decode(errors='replace')}")
        if len(times) > 1:
            times.pop()  # the closing event carries no token
        timings = final["timings"]
        return Answer(
            n_prompt=len(prompt),
            n_computed=timings["prompt_n"],
            n_generated=timings["predicted_n"],
            began=began,
            times=tuple(times),
            ended=ended,
        )

    async def slot(self, action: str, file: str) -> float:
        """Save or restore slot 0; returns the seconds it took. Raises: `EngineError`."""
        began = time.perf_counter()
        status, reply = await request(self.port, "POST", f"/slots/0?action={action}", {"filename": file})
        if status != 200:
            raise peer_failed(f"llama-server could not {action} its slot: {reply}")
        return time.perf_counter() - began


@asynccontextmanager
async def open_peer(
    settings: Settings,
    *,
    n_ctx: int,
    n_seq_max: int = 1,
    kv_unified: bool = True,
    cache_ram_mib: int = 0,
    path: Path | None = None,
) -> AsyncIterator[LlamaServer]:
    """A server for the block. `n_ctx` is all its cells; `cache_ram_mib` its own prompt cache in RAM.

    Raises: `EngineError` with its last lines if it does not come up.
    Cancellation: it is ended, and waited for.
    """
    assert settings.programs is not None
    options = [
        *("--model", str(path or settings.model), "--ctx-size", str(n_ctx), "--parallel", str(n_seq_max)),
        *("--batch-size", str(settings.n_batch), "--ubatch-size", str(settings.n_batch)),
        *("--threads", str(settings.n_threads), "--threads-batch", str(settings.n_threads)),
        *("--flash-attn", "on" if settings.flash_attn else "off"),
        *("--cache-type-k", settings.type_kv, "--cache-type-v", settings.type_kv),
        "--kv-unified" if kv_unified else "--no-kv-unified",
        *("--cache-ram", str(cache_ram_mib), "--n-gpu-layers", "0", "--fit", "off", "--no-ui"),
        *("--slot-save-path", str(settings.folder)),
    ]
    async with serving([str(settings.programs.server), *options], settings.folder) as port:
        yield LlamaServer(port)


@asynccontextmanager
async def serving(
    command: Sequence[str], folder: Path, *, within_s: float = START_WITHIN_S
) -> AsyncIterator[int]:
    """Run a server that takes `--host` and `--port` and answers /health; yields its port.

    It ends with the block, and with us, however we end. Raises and cancels as `open_peer`.
    """
    log = folder / f"{Path(command[0]).name}.log"
    async with contextlib.AsyncExitStack() as stack:
        for left in reversed(range(_TRIES)):
            port = _free_port()
            process = await stack.enter_async_context(
                running([*command, "--host", LOOPBACK, "--port", str(port)], log)
            )
            if await _is_up(process, port, within_s):
                break
            ended = process.poll() is not None
            await stack.aclose()
            if not (left and ended and _in_use(port)):
                raise peer_failed(_last_words(command, log, process.returncode if ended else None, within_s))
        yield port


async def _is_up(process: subprocess.Popen[Any], port: int, within_s: float) -> bool:
    """Wait until the server is ready; False if it ended or took too long."""
    with trio.move_on_after(within_s):
        while process.poll() is None:
            with contextlib.suppress(OSError, EngineError):
                status, _ = await request(port, "GET", "/health")
                # Somebody else may hold the port and answer, before ours finds it taken and ends.
                if status == 200 and _holds(process, port):
                    return True
            await trio.sleep(_LOOK_EVERY_S)
    return False


def _last_words(command: Sequence[str], log: Path, code: int | None, within_s: float) -> str:
    name = Path(command[0]).name
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    how = f"was not ready after {within_s:g} s" if code is None else f"ended at its start with status {code}"
    return f"{name} {how}; its last lines: {' | '.join(lines) or '(none)'}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _holds(process: subprocess.Popen[Any], port: int) -> bool:
    """Whether the program, or one that it started, listens on the port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            for socket_ in child.net_connections("tcp4"):
                if socket_.status == psutil.CONN_LISTEN and socket_.laddr.port == port:
                    return True
    return False


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
