"""How much memory a context will take, before it is allocated.

llama.cpp zeroes what it allocates, so a context far too large does not fail: the process is killed.
First a cheap upper bound from the metadata. Where that comes close to what is there, two small
contexts of the same shape are measured and extrapolated: every buffer grows linearly with `n_ctx`
once it is beyond the window, and only llama.cpp knows how many layers keep all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from erllama.errors import ModelWouldOom

from .backend import devices
from .params import N_CTX_PAD, ContextParams

if TYPE_CHECKING:
    from .ffi import Library
    from .model import Model

CGROUP = Path("/sys/fs/cgroup")  # cgroup v2
CELL_BYTES = 64  # bookkeeping of one KV cell (llama-kv-cells.h: position, shift, set of sequences)
USABLE = 0.9  # share of the available memory that one context may take; the rest is everybody else's
CLOSE = 0.5  # share of the available memory from which the upper bound is not good enough
BLOCK = 256  # ggml's largest quantisation block, in elements
ACTIVATIONS = 16  # rows of n_embd floats that the widest layer keeps at once, roughly


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
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free  # no cgroup v2 limit here
    return free


def estimate(model: Model, params: ContextParams) -> MemoryUse:
    """An upper bound for the KV cache, and roughly the compute buffers, from the metadata alone."""
    facts = model.facts
    n_ctx = n_cells(params)
    heads = facts.n_head_kv or facts.n_head or 1
    head = facts.n_embd // max(facts.n_head, 1)
    n_k = heads * _meta(facts.metadata, facts.architecture, "attention.key_length", head)
    n_v = heads * _meta(facts.metadata, facts.architecture, "attention.value_length", head)
    row = _row_bytes(model.lib, params.type_k, n_k) + _row_bytes(model.lib, params.type_v, n_v)
    n_layer = 0 if facts.is_recurrent else facts.n_layer
    n_ubatch = params.n_rows
    outputs = params.n_outputs * facts.n_vocab * 4
    mask = n_ctx * n_ubatch * 4
    activations = n_ubatch * facts.n_embd * 4 * ACTIVATIONS
    return MemoryUse(
        kv_bytes=n_ctx * (n_layer * row + CELL_BYTES), compute_bytes=outputs + mask + activations
    )


def check_fits(model: Model, params: ContextParams, model_ptr: Any) -> None:
    """Refuse a context that cannot fit. Raises: `ModelWouldOom` with the estimate."""
    free = available_bytes()
    if model.options.n_gpu_layers != 0:
        free += sum(device.free_bytes for device in devices() if device.kind == "gpu")
    free = int(free * USABLE)
    use = estimate(model, params)
    if use.total_bytes > free * CLOSE:
        use = _measured(model, params, model_ptr, free) or use
    if use.total_bytes > free:
        raise ModelWouldOom(
            f"a context of {params.n_ctx} tokens needs about {use.total_bytes >> 20} MiB; "
            f"{free >> 20} MiB may be used",
            detail={"kv_bytes": use.kv_bytes, "compute_bytes": use.compute_bytes, "available_bytes": free},
        )


def _measured(model: Model, params: ContextParams, model_ptr: Any, free: int) -> MemoryUse | None:
    """Extrapolated from two small contexts; None if those are no smaller than what is asked for."""
    per_sequence = padded(max(model.facts.n_swa, 0) + params.n_rows) + N_CTX_PAD
    low = per_sequence * params.n_seq_max
    high = 2 * low
    small = dataclass_replace(params, n_ctx=high)
    if high >= params.n_ctx or estimate(model, small).total_bytes > free * CLOSE:
        return None
    first = _measure(model.lib, dataclass_replace(params, n_ctx=low), model_ptr)
    second = _measure(model.lib, small, model_ptr)
    if first is None or second is None:
        return None
    n_ctx = n_cells(params)

    def at(low_bytes: int, high_bytes: int) -> int:
        return low_bytes + (high_bytes - low_bytes) * (n_ctx - low) // (high - low)

    return MemoryUse(
        kv_bytes=at(first.kv_bytes, second.kv_bytes) + n_ctx * CELL_BYTES,
        compute_bytes=at(first.compute_bytes, second.compute_bytes),
    )


def _measure(lib: Library, params: ContextParams, model_ptr: Any) -> MemoryUse | None:
    ptr = lib.init_from_model(model_ptr, params.native(lib))
    if ptr == lib.ffi.NULL:
        return None
    try:
        return memory_use(lib, ptr)
    finally:
        lib.free(ptr)


def memory_use(lib: Library, context_ptr: Any) -> MemoryUse:
    """What a context holds."""
    use = lib.ffi.new("struct el_memory_use *")
    lib.context_memory_use(context_ptr, use)
    return MemoryUse(kv_bytes=use.context_bytes, compute_bytes=use.compute_bytes)


def n_cells(params: ContextParams) -> int:
    """The cells llama.cpp makes: `n_ctx`, or each separate stream's share of it, rounded up."""
    if params.kv_unified:
        return padded(params.n_ctx)
    return padded(max(1, params.n_ctx // params.n_seq_max)) * params.n_seq_max


def padded(n_ctx: int) -> int:
    """`n_ctx` as llama.cpp rounds it."""
    return -(-n_ctx // N_CTX_PAD) * N_CTX_PAD


def _row_bytes(lib: Library, kind: str, n: int) -> int:
    return int(lib.ggml_row_size(lib.constant("GGML_TYPE", kind), -(-n // BLOCK) * BLOCK))


def _meta(metadata: dict[str, str], architecture: str, key: str, default: int) -> int:
    try:
        return int(metadata[f"{architecture}.{key}"])
    except (KeyError, ValueError):
        return default
