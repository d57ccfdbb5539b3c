"""What can be read about models and requests, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from erllama.types import CacheHit, EmbeddingFacts, Exactness

Phase = Literal["idle", "prefilling", "generating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One loaded model. `details` holds what its backend tells: architecture, sizes, memory, build.

    `available_seqs` sequences are free, `pinned_idle_seqs` are held for sessions and are taken back when
    nothing else is free; the others run. `parts`: what of its memory is kept ("base", "window", "state"; none
    where nothing is, `details["not_kept"]` says why). `embeddings`: how it embeds; None if it was not
    loaded for that. `generates`: False of a model that does nothing else.
    `vram_estimate_bytes`: weights, KV and compute buffers together, wherever they are.
    """

    model_id: str
    path: str | None
    phase: Phase
    pending_len: int
    n_ctx: int
    n_seq_max: int
    available_seqs: int
    pinned_idle_seqs: int
    last_cache_hit: CacheHit | None
    memory_kind: str
    status: Literal["loaded", "stopping"]
    quant_tag: str
    exactness: Exactness
    parts: tuple[str, ...]
    embeddings: EmbeddingFacts | None
    generates: bool
    vram_estimate_bytes: int
    loaded_at_monotonic: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """One request that waits or runs. `n_cached`: prompt tokens that were reused, once it is admitted."""

    id: int
    model_id: str
    phase: Literal["queued", "restore", "prefill", "decode", "finished"]
    n_prompt: int
    n_cached: int
    n_generated: int
    n_kv: int
