"""One llama_context: decoding, outputs, state.

Rule 1: nothing reaches llama.cpp that it would assert on; `decode` checks the batch in C first.
Rule 2: one call at a time (a lock), whatever thread it comes from; only `abort` is free of it.
Rule 3: outputs are valid until the next decode, and only rows that were marked have any.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from erllama.errors import (
    EngineError,
    InvalidBatch,
    LoadFailed,
    ModelWouldOom,
    NoLogits,
    NotSupported,
)
from erllama.options import Pooling

from . import logs
from .abort import Abort
from .handle import Exclusive
from .memory import Memory, MemoryKind
from .model import MEMORY_FAULTS
from .params import MAX_THREADS, check_range
from .probe import find_memory_kind
from .sizing import MemoryUse, check_fits, memory_use
from .threads import ComputeThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .adapter import Adapter
    from .batch import Batch
    from .ffi import Library
    from .handle import Owned
    from .model import Model
    from .params import ContextParams

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
PARTIAL_ONLY = 1  # llama.h: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

# shim.cpp: enum batch_fault
FAULTS = {
    1: "the batch is empty",
    2: "{value} rows, the context takes {limit}",
    3: "row {row}: token {value} is not in the vocabulary of {limit}",
    4: "row {row}: sequence {value}, the context has {limit}",
    5: "{value} rows are marked for output, the context keeps {limit}",
    6: "row {row}: position {value}, the sequence goes on at {limit}",
    7: "row {row}: position {value} follows {limit} - 1 in the batch",
}
NO_SUCH_POSITION = "position {value}, and this model has {limit}"
NON_CAUSAL_ROWS = "{value} rows, but a non-causal model takes at most n_ubatch = {limit}"
EMBEDDED_ROWS = "{value} rows, but this embedding context keeps {limit}"


class Context:
    """A model's working memory. Use as a context manager, or `close()` it; keeps its model alive."""

    def __init__(self, model: Model, params: ContextParams, lib: Library, ptr: Any, abort: Abort) -> None:
        self.lib = lib
        self.model = model
        self.params = params
        self.abort = abort
        self.handle = Exclusive(lib, ptr, "free", "context", model.handle.owned, keep=(abort.fields,))
        self._threads = ComputeThreads(lib, self.handle.owned)
        self._threads.provide(ptr, params.n_threads, params.n_threads_batch or params.n_threads)
        self.n_ctx: int = lib.n_ctx(ptr)
        self.n_ctx_seq: int = lib.n_ctx_seq(ptr)
        self.n_batch: int = lib.n_batch(ptr)
        self.n_ubatch: int = lib.n_ubatch(ptr)
        self.n_seq_max: int = lib.n_seq_max(ptr)
        self.is_causal: bool = lib.get_causal_attn(ptr)
        self.n_outputs_max: int = min(params.n_outputs, self.n_batch)
        self.n_vocab = model.facts.n_vocab
        self._n_scores: int = lib.model_n_cls_out(lib.get_model(ptr))
        self._n_positions = model.facts.n_positions
        self._output_rows = b""  # one byte per row of the last decode
        memory = lib.get_memory(ptr)
        self._memory = Memory(self, memory) if memory != lib.ffi.NULL else None
        self._memory_ptr = memory
        self._limits = lib.ffi.new(
            "struct el_batch_limits *", (self.n_batch, self.n_outputs_max, self.n_seq_max, self.n_vocab)
        )
        self._fault = lib.ffi.new("struct el_batch_fault *")
        self.times: Any = lib.ffi.new(
            "struct el_step_times *"
        )  # for `decode_rows`, while it holds the handle
        self._adapters: set[Owned] = set()
        self.memory_kind = MemoryKind.NONE  # until `open` has looked

    @classmethod
    def open(cls, model: Model, params: ContextParams) -> Context:
        """Allocate a context. Blocks; the first decode of a new architecture is part of it.

        Raises: `NotSupported`, `InvalidOption`, `ModelWouldOom` (estimated before allocating),
        `LoadFailed` with llama.cpp's last log lines, `HandleClosed`.
        """
        params.check(model.facts)
        context = cls._allocate(model, params)
        try:
            context.memory_kind = find_memory_kind(context)
        except BaseException:
            context.close()
            raise
        return context

    @classmethod
    def _allocate(cls, model: Model, params: ContextParams) -> Context:
        with model.handle as model_ptr:
            lib = model.lib
            check_fits(model, params, model_ptr)
            abort = Abort(lib)
            with logs.captured(lib) as log:
                ptr = lib.init_from_model(model_ptr, params.native(lib))
            if ptr == lib.ffi.NULL:
                raise _open_error(log, params)
            lib.context_set_abort(ptr, abort.fields)
            return cls(model, params, lib, ptr, abort)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.n_ctx} cells, {self.n_seq_max} sequences"
        return f"<Context of {self.model!r}: {state}>"

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context, after the call that is running. Idempotent."""
        self.handle.close()

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self.handle.closed

    @property
    def memory(self) -> Memory:
        """The memory. Raises: `NotSupported` for models that have none (embedding only)."""
        if self._memory is None:
            raise NotSupported("this model keeps no memory: it only makes embeddings")
        return self._memory

    @property
    def has_memory(self) -> bool:
        """False for models that only make embeddings."""
        return self._memory is not None

    # --- computing --------------------------------------------------------------------------------

    def decode(self, batch: Batch) -> int:
        """Run the rows through the model.

        Returns: llama_decode's code. 0: done. 1: no room in the KV cache, nothing changed. 2: aborted
        (`abort.cause`): processed pieces stay in memory, the caller repairs each sequence. Below -1:
        fatal, the context must go.
        Raises: `InvalidBatch` before anything happened, `NativeError`, `HandleClosed`.
        """
        return self.decode_with(self.lib.decode_checked, batch)

    def decode_with(self, call: Callable[..., int], batch: Batch, *more: Any) -> int:
        """`decode` through another native call that takes what `decode_checked` does, and `more`."""
        with self.handle as ptr:
            self._check_rows(batch)
            self._output_rows = b""
            fault, seconds = self._fault, self.abort.take_next()
            rc: int = call(
                ptr, batch.native, self._limits, self._memory_ptr, fault, self.abort.fields, seconds, *more
            )
            if rc != 0 and fault.code:
                raise self._refusal()
            return self._computed(batch, rc)

    def encode(self, batch: Batch) -> int:
        """Run the rows without memory (embedding models); every row is an output. As `decode`.

        Raises: `NotSupported` for a model with memory: its graph reads what only a decode sets up.
        """
        if self._memory is not None:
            raise NotSupported("this model has a memory: it decodes, and does not encode")
        with self.handle as ptr:
            if not self.lib.batch_check(batch.native, self._limits, self._memory_ptr, self._fault):
                raise self._refusal()
            self._check_rows(batch)
            self._output_rows = b""
            return self._computed(batch, int(self.lib.encode(ptr, batch.native[0])))

    def _computed(self, batch: Batch, rc: int) -> int:
        if rc == 0:
            n = batch.n_tokens
            self._output_rows = (
                b"\1" * n if self._needs_all else self.lib.ffi.buffer(batch.native.logits, n)[:]
            )
        return rc

    def _refusal(self) -> InvalidBatch:
        fault = self._fault
        detail = {"fault": fault.code, "row": fault.row, "value": fault.value, "limit": fault.limit}
        return InvalidBatch(FAULTS[fault.code].format(**detail), detail=detail)

    @property
    def _needs_all(self) -> bool:
        """Whether every row is an output, marked or not."""
        return self.params.embeddings or self._memory is None

    def _check_rows(self, batch: Batch) -> None:
        if self._n_positions is not None and batch.n_tokens:
            last = int(batch.positions[: batch.n_tokens].max())
            if last >= self._n_positions:
                _refuse_rows(NO_SUCH_POSITION, last, self._n_positions)
        if self._needs_all and batch.n_tokens > self.n_outputs_max:
            _refuse_rows(EMBEDDED_ROWS, batch.n_tokens, self.n_outputs_max)
        if (not self.is_causal or self._memory is None) and batch.n_tokens > self.n_ubatch:
            _refuse_rows(NON_CAUSAL_ROWS, batch.n_tokens, self.n_ubatch)

    def has_output(self, i: int) -> bool:
        """True if row `i` of the last decode has an output; -1 is the last output."""
        rows = self._output_rows
        return (0 <= i < len(rows) and rows[i] != 0) or (i == -1 and 1 in rows)

    def logits(self, i: int) -> npt.NDArray[np.float32]:
        """Logits of row `i` of the last decode: (n_vocab,), a copy.

        Not a view: llama.cpp frees the memory with the context, and when a later decode needs more.
        Raises: `NoLogits` if that row has none.
        """
        with self.handle as ptr:
            self.need_logits(i)
            return self._floats(self.lib.get_logits_ith(ptr, i), self.n_vocab)

    @property
    def pooling(self) -> Pooling:
        """How the vectors of a sequence's tokens become one; "none": they do not."""
        with self.handle as ptr:
            kind = self.lib.pooling_type(ptr)
        return next(name for name in POOLINGS if self.lib.constant("LLAMA_POOLING_TYPE", name) == kind)

    @property
    def n_embedding(self) -> int:
        """Numbers of one embedding: the model's width, or with rank pooling its scores."""
        return self._n_scores if self.pooling == "rank" else self.model.facts.n_embd_out

    def embeddings(self, i: int) -> npt.NDArray[np.float32]:
        """The embedding of row `i`: (n_embd_out,), a copy. Raises: `NoLogits`."""
        with self.handle as ptr:
            self._need_output(i)
            return self._floats(self.lib.get_embeddings_ith(ptr, i), self.model.facts.n_embd_out)

    def embeddings_seq(self, seq_id: int) -> npt.NDArray[np.float32]:
        """The pooled embedding of a sequence of the last decode, a copy; with rank pooling its scores.

        Raises: `NoLogits`.
        """
        n = self.n_embedding
        with self.handle as ptr:
            if not 0 <= seq_id < self.n_seq_max:
                raise NoLogits(f"sequence {seq_id} of {self.n_seq_max}", detail={"seq_id": seq_id})
            return self._floats(self.lib.get_embeddings_seq(ptr, seq_id), n)

    def with_logits(self, rows: Sequence[int], batch: Batch | None = None) -> list[bool]:
        """Which of these rows of the last decode have logits; of `batch`: will have, once it is decoded."""
        if self._memory is None:
            return [False] * len(rows)
        if batch is None:
            marks: Any = self._output_rows
            n = len(marks)
        else:
            n = batch.n_tokens
            marks = b"\1" * n if self._needs_all else batch.native.logits
        return [0 <= i < n and marks[i] != 0 for i in rows]

    def need_logits(self, i: int) -> None:
        """Raises: `NoLogits` if row `i` of the last decode has no logits."""
        if self._memory is None:
            raise NoLogits("this model only makes embeddings")
        self._need_output(i)

    def _need_output(self, i: int) -> None:
        if not self.has_output(i):
            raise NoLogits(f"row {i} of the last decode has no output", detail={"row": i})

    def _floats(self, ptr: Any, n: int) -> npt.NDArray[np.float32]:
        if ptr == self.lib.ffi.NULL:
            raise NoLogits("the last decode left no such output")
        return np.frombuffer(self.lib.ffi.buffer(ptr, n * 4), np.float32).copy()

    def synchronize(self) -> None:
        """Wait until the last decode's results are there (GPU backends compute asynchronously)."""
        with self.handle as ptr:
            self.lib.synchronize(ptr)

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Threads for single rows and for more; from the next decode on. Raises: `InvalidOption`."""
        n_more = n_threads if n_threads_batch is None else n_threads_batch
        check_range("n_threads", n_threads, 1, MAX_THREADS)
        check_range("n_threads_batch", n_more, 1, MAX_THREADS)
        with self.handle as ptr:
            self._threads.provide(ptr, n_threads, n_more)
            self.lib.set_n_threads(ptr, n_threads, n_more)

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Apply these adapters with these scales, and no others, from the next decode on.

        All rows of a decode share them. Changing them reserves the graph anew.
        Raises: `NotSupported` (an adapter of another model), `LoadFailed`, `HandleClosed`.
        """
        chosen = tuple(adapters)
        if any(adapter.model is not self.model for adapter, _ in chosen):
            raise NotSupported("an adapter fits the model it was loaded for, and no other")
        ffi = self.lib.ffi
        with self.handle as ptr, ExitStack() as stack:
            pointers = [stack.enter_context(adapter.handle) for adapter, _ in chosen]
            scales = ffi.new("float[]", [scale for _, scale in chosen])
            array = ffi.new("struct llama_adapter_lora *[]", pointers)
            rc = self.lib.set_adapters_lora(ptr, array, len(pointers), scales)
            if rc != 0:
                raise LoadFailed(f"llama.cpp refused the adapters ({rc})")
            before, self._adapters = self._adapters, {adapter.handle.owned for adapter, _ in chosen}
            for owned in self._adapters - before:
                self.handle.owned.lean_on(owned)
            for owned in before - self._adapters:
                self.handle.owned.let_go_of(owned)

    # --- state ------------------------------------------------------------------------------------

    def state_size(self, seq_id: int, *, partial: bool = False) -> int:
        """Bytes `state_get` needs now; `partial`: only the window or recurrent part."""
        self.memory._check(seq_id)
        with self.handle as ptr:
            return int(self.lib.state_seq_get_size_ext(ptr, seq_id, PARTIAL_ONLY if partial else 0))

    def state_get(self, seq_id: int, into: Any, *, partial: bool = False) -> int:
        """Write one sequence's state into a writable buffer; leaves running sequences untouched.

        Returns: bytes written. llama.cpp's own format: valid for the same build, model and KV layout.
        Raises: `EngineError` if the buffer is too small.
        """
        self.memory._check(seq_id)
        with self.handle as ptr:
            view = self.lib.ffi.from_buffer("uint8_t[]", into, require_writable=True)
            n = int(
                self.lib.state_seq_get_data_ext(ptr, view, len(view), seq_id, PARTIAL_ONLY if partial else 0)
            )
        if n == 0:
            raise EngineError(f"the state of sequence {seq_id} does not fit into {len(view)} bytes")
        return n

    def state_set(self, seq_id: int, data: Any, *, partial: bool = False) -> int:
        """Replace one sequence by a saved state, whose integrity the caller has checked.

        Returns: bytes read; 0 if it was refused (no room, or damaged), and then the sequence is empty.
        Thread: the context's. Restore into a scratch sequence: a refused one is cleared.
        """
        memory = self.memory
        memory._check(seq_id)
        with self.handle as ptr:
            view = self.lib.ffi.from_buffer("uint8_t[]", data)
            n = int(
                self.lib.state_seq_set_data_ext(ptr, view, len(view), seq_id, PARTIAL_ONLY if partial else 0)
            )
            if n == 0:
                # Window memory keeps the base half of a refused state and calls itself empty.
                memory.rm(seq_id, -1, -1)
            return n

    @property
    def memory_bytes(self) -> MemoryUse:
        """Bytes of KV cache (or state) and of compute buffers that this context holds."""
        with self.handle as ptr:
            return memory_use(self.lib, ptr)


def _refuse_rows(text: str, value: int, limit: int) -> None:
    detail = {"value": value, "limit": limit}
    raise InvalidBatch(text.format(**detail), detail=detail)


def _open_error(log: logs.CapturedLog, params: ContextParams) -> Exception:
    said = log.tail()
    detail = {"log": log.errors[-8:]}
    if any(sign in said for sign in MEMORY_FAULTS):
        return ModelWouldOom(f"no memory for a context of {params.n_ctx} tokens: {said}", detail=detail)
    return LoadFailed(f"llama.cpp cannot make this context: {said}", detail=detail)
