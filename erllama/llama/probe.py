"""What kind of memory a context has, without trying what would abort the process.

No memory: embeddings only. Recurrent or hybrid: the model says so, except for one that says hybrid and
aborts on ranged copies. Else two tokens are decoded and one
is cut: a memory that refuses can only be kept whole; one that allows it is dense, or has windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.errors import LoadFailed

from .batch import Batch
from .memory import MemoryKind

if TYPE_CHECKING:
    from .context import Context


# llama-kv-cache-dsv4.cpp: `seq_cp` asserts on a range; llama_model_is_hybrid says true all the same.
NO_RANGES = frozenset({"deepseek4"})


def find_memory_kind(context: Context) -> MemoryKind:
    """The kind, by decision table; found once per model and layout of its cache.

    Leaves the context empty. Raises: `LoadFailed` if its first decode fails.
    """
    facts = context.model.facts
    if not context.has_memory:
        return MemoryKind.NONE
    if facts.is_recurrent:
        return MemoryKind.RECURRENT
    if facts.is_hybrid:
        return MemoryKind.WHOLE if facts.architecture in NO_RANGES else MemoryKind.HYBRID
    layout = (context.params.kv_unified, context.params.swa_full)
    known = context.model.memory_kinds
    if layout not in known:
        known[layout] = _cuttable(context)
    return known[layout]


def _cuttable(context: Context) -> MemoryKind:
    seq_id = context.n_seq_max - 1
    batch = Batch(1, context.n_seq_max)
    for pos in (0, 1):  # one row each, which every context has room for
        batch.clear()
        batch.add(seq_id, [0], pos, output="last" if context.params.embeddings else "none")
        rc = context.decode(batch)
        if rc != 0:
            raise LoadFailed(f"the first decode of this context failed: llama_decode answered {rc}")
    can_cut = context.memory.rm(seq_id, 1)
    context.memory.clear()
    if not can_cut:
        return MemoryKind.WHOLE
    return MemoryKind.WINDOW if context.model.facts.n_swa > 0 else MemoryKind.DENSE
