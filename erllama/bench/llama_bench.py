"""llama-bench: upstream's own measure of raw prefill and decode."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import trio

from .http import peer_failed
from .process import running

if TYPE_CHECKING:
    from .settings import Settings


async def bench_prefill(settings: Settings, n_prompt: int) -> float:
    """Tokens per second of one cold prefill, after llama-bench's own warm-up.

    Raises: `EngineError`. Cancellation: it is ended.
    """
    assert settings.programs is not None
    command = [
        *(str(settings.programs.bench), "--model", str(settings.model), "--output", "json"),
        *("--n-prompt", str(n_prompt), "--n-gen", "0", "--repetitions", "1"),
        *("--batch-size", str(settings.n_batch), "--ubatch-size", str(settings.n_batch)),
        *("--threads", str(settings.n_threads), "--n-gpu-layers", "0"),
        *("--flash-attn", "1" if settings.flash_attn else "0"),
        *("--cache-type-k", settings.type_kv, "--cache-type-v", settings.type_kv),
    ]
    log = settings.folder / "llama-bench.log"
    async with running(command, log) as process:
        code = await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    text = log.read_text(errors="replace")
    if code != 0:
        raise peer_failed(f"llama-bench ended with status {code}; its last lines: {text[-500:]}")
    return read_rate(text)


def read_rate(text: str) -> float:
    """The rate in llama-bench's JSON, around which its log may stand. Raises: `EngineError`."""
    lines = text.splitlines()
    try:
        began, ended = lines.index("["), len(lines) - lines[::-1].index("]")
        found: list[dict[str, Any]] = json.loads("\n".join(lines[began:ended]))
        return float(found[0]["avg_ts"])
    except (ValueError, KeyError, IndexError) as why:
        raise peer_failed(f"llama-bench's output cannot be read ({why}): {text[-300:]}") from None
