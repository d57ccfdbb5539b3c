"""How much memory a context will take, before it is allocated.

llama.cpp zeroes what it allocates, so a context far too large does not fail: the process is killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from erllama.errors import ModelWouldOom

from .params import GGML_TYPES, N_CTX_PAD, ContextParams

if TYPE_CHECKING:
    from .model import Model

CELL_BYTES = 64  # bookkeeping of one KV cell (llama-kv-cells.h: position, shift, set of sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of KV cache or state, and of compute buffers."""

    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.kv_bytes + self.compute_bytes


def available_bytes() -> int:
    """Memory this process may still take: the machine's, or what its cgroup leaves."""
    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max") as f_max, open("/sys/fs/cgroup/memory.current") as f_now:
            limit = f_max.read().strip()
            if limit != "max":
                free = min(free, int(limit) - int(f_now.read()))
    except (OSError, ValueError):
        return free  # no cgroup v2 limit here
    return free


def estimate(model: Model, params: ContextParams) -> MemoryUse:
    """An upper bound for the KV cache and the compute buffers, from the metadata."""
    facts = model.facts
    n_ctx = -(-params.n_ctx // N_CTX_PAD) * N_CTX_PAD
    heads = facts.n_head_kv or facts.n_head or 1
    head = facts.n_embd // max(facts.n_head, 1)
    n_k = heads * _meta(facts.metadata, facts.architecture, "attention.key_length", head)
    n_v = heads * _meta(facts.metadata, facts.architecture, "attention.value_length", head)
    row_size = model._lib.ggml_row_size
    row = row_size(GGML_TYPES[params.type_k], -(-n_k // 256) * 256)
    row += row_size(GGML_TYPES[params.type_v], -(-n_v // 256) * 256)
    n_layer = 0 if facts.is_recurrent else facts.n_layer
    n_ubatch = min(params.n_ubatch or params.n_batch, params.n_batch)
    outputs = params.n_outputs * facts.n_vocab * 4
    mask = n_ctx * n_ubatch * 4
    return MemoryUse(kv_bytes=n_ctx * (n_layer * row + CELL_BYTES), compute_bytes=outputs + mask)


def check_fits(model: Model, params: ContextParams) -> None:
    """Refuse a context that cannot fit. Raises: `ModelWouldOom` with the estimate."""
    use, free = estimate(model, params), available_bytes()
    if use.total_bytes > free:
        raise ModelWouldOom(
            f"a context of {params.n_ctx} tokens needs about {use.total_bytes >> 20} MiB; "
            f"{free >> 20} MiB are available",
            detail={"kv_bytes": use.kv_bytes, "compute_bytes": use.compute_bytes, "available_bytes": free},
        )


def _meta(metadata: dict[str, str], architecture: str, key: str, default: int) -> int:
    try:
        return int(metadata[f"{architecture}.{key}"])
    except (KeyError, ValueError):
        return default
