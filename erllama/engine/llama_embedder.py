"""The context that a model embeds with: one of its own, beside the one that generates.

llama.cpp can switch a context between both (`llama_set_embeddings`), but with embeddings every row is an
output, and a context with room for few outputs, as generating wants it, would end the process. Apart, each
has the buffers it needs, and inputs to embed never lie in the memory of those who generate.

Nothing is kept: an input that begins finds memory empty.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from erllama import llama
from erllama.backend import EmbedResult, StepStatus
from erllama.errors import ErllamaError, LoadCancelled, NotSupported
from erllama.types import EmbeddingFacts

from .context_threads import ContextThreads
from .native_params import embedding_params
from .permit import PROCESS_PERMIT
from .return_code import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from erllama.backend import EmbedRow
    from erllama.options import ContextOptions


RANK = "4"  # gguf: pooling_type of models that score


class LlamaEmbedder:
    """Thread: the model's, except `abort` and `clear_abort`."""

    def __init__(
        self, path: str, model: llama.Model, options: ContextOptions, *, adapt_threads: bool = False
    ) -> None:
        """`options` are resolved. Nothing is allocated before `open`."""
        self._path = path
        self._model = model
        self._n_ctx = min(options.n_ctx or model.facts.n_ctx_train, model.facts.n_ctx_train)
        self._params = params = embedding_params(options, model.facts)
        self._threads = ContextThreads(path, params.n_threads, params.n_threads_batch, adapt=adapt_threads)
        self._permit = PROCESS_PERMIT.ticket()
        self._context: llama.Context | None = None
        self._batch = llama.Batch(self._params.n_rows or 1, self._params.n_seq_max)
        declared = model.facts.metadata.get(f"{model.facts.architecture}.pooling_type")
        if options.pooling == "rank" and declared != RANK:
            raise NotSupported(f"{path}: pooling='rank' needs a model that scores, and this one does not")
        self._is_declared = declared not in (None, "0")

    def open(self) -> EmbeddingFacts:
        """Make the context. Raises: what `llama.Context.open` raises, `LoadCancelled`."""
        with self._permit.held(self._params.n_threads) as granted:  # opening may decode two tokens
            if not granted:
                raise LoadCancelled(f"{self._path}: given up while another model was computing")
            self._context = context = llama.Context.open(self._model, self._params)
            self._threads.opened(context)
        # A mean, or a vector that saw what comes later, is right only if all tokens are computed at once.
        whole = not context.has_memory or not context.is_causal or context.pooling not in ("none", "last")
        self.facts = EmbeddingFacts(
            n_embd=context.n_embedding,
            pooling=context.pooling,
            n_ctx=self._n_ctx,
            n_rows=min(context.n_ubatch, context.n_outputs_max),
            n_lanes=context.n_seq_max,
            whole=whole,
        )
        self.only_embeds = self._is_declared or not context.has_memory or not context.is_causal
        return self.facts

    @property
    def memory_use(self) -> llama.MemoryUse:
        """What its context holds."""
        return self._live().memory_bytes

    @property
    def memory_kind(self) -> llama.MemoryKind:
        """How its memory remembers."""
        return self._live().memory_kind

    def close(self) -> None:
        """Free the context. Idempotent; the next `embed` makes a new one."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def embed(self, rows: Sequence[EmbedRow], budget_s: float | None) -> EmbedResult:
        """See `OptionalBackend.embed`. After a fatal code or an error the context is made anew."""
        try:
            result = self._embed(rows, budget_s)
        except ErllamaError:
            self.close()
            raise
        if result.status is StepStatus.FATAL:
            self.close()
        return result

    def _embed(self, rows: Sequence[EmbedRow], budget_s: float | None) -> EmbedResult:
        context, batch = self._live(), self._batch
        if context.has_memory and rows[0].pos == 0:
            context.memory.clear(data=False)
        batch.clear()
        ends = [batch.add(row.lane, row.tokens, row.pos, output="all") + len(row.tokens) - 1 for row in rows]
        n_threads = self._threads.n_for(sum(len(row.tokens) for row in rows))
        with self._permit.held(n_threads, at_most_s=budget_s) as granted:
            if not granted:
                return EmbedResult(status=StepStatus.ABORTED)
            context.abort.arm_next(budget_s)
            began, cpu_began = time.perf_counter(), time.process_time()
            rc = context.decode(batch)
            status = status_of(rc, context.abort.cause)
            vectors = tuple(map(self._vector, rows, ends)) if status is StepStatus.OK else ()
            compute_s = time.perf_counter() - began
            self._threads.observe(context, compute_s, time.process_time() - cpu_began)
        return EmbedResult(status=status, vectors=vectors, rc=rc, compute_s=compute_s)

    def _vector(self, row: EmbedRow, end: int) -> npt.NDArray[np.float32] | None:
        if not row.is_last:
            return None
        context = self._live()
        return context.embeddings(end) if self.facts.pooling == "none" else context.embeddings_seq(row.lane)

    def _live(self) -> llama.Context:
        if self._context is None:
            self.open()
        assert self._context is not None
        return self._context

    # --- any thread ---

    def abort(self) -> None:
        """End the call that runs, or is about to."""
        self._permit.give_up()
        if (context := self._context) is not None:
            context.abort.raise_flag()

    def clear_abort(self) -> None:
        """Forget an earlier `abort`."""
        self._permit.renew()
        if (context := self._context) is not None and context.abort.is_raised:
            context.abort.clear()
