"""Embeddings of one model: clients' inputs, computed together, beside whatever the model generates.

Inputs of several clients share a call. A call runs on the model's own thread, between two steps; while
anybody generates, it is no longer than a piece of a prompt.

Rule 1: a call in flight is aborted only if every row of it belongs to clients who left.
Rule 2: vectors are handed out when all inputs of a client are done, in the order of the inputs.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Never, cast

import numpy as np
import trio

from erllama.backend import EmbedRow, StepStatus
from erllama.errors import (
    BatchOverflow,
    ContextOverflow,
    DecodeAborted,
    DecodeFailed,
    DecodeTimeout,
    EngineError,
    ErllamaError,
    InvalidContent,
    NotLoaded,
)

from .embed_plan import plan_portions
from .planner import Chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from erllama.backend import Backend, BackendFacts, EmbedResult, OptionalBackend
    from erllama.options import ContextOptions
    from erllama.types import EmbeddingFacts

    from .runner import Runner

UNASKED_ABORTS = 3  # in a row; then the inputs of the call fail


@dataclass(eq=False)
class Job:
    """One client's inputs, and what became of them."""

    vectors: npt.NDArray[np.float32]
    n_left: int
    over: trio.Event = field(default_factory=trio.Event)
    error: ErllamaError | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return not self.over.is_set()

    def fail(self, error: ErllamaError) -> None:
        """It ends without vectors."""
        self.error = error
        self.over.set()


@dataclass(eq=False)
class Input:
    """One input of a job; [0, n_done) of its tokens are computed."""

    job: Job
    index: int
    tokens: list[int]
    n_done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedStatistics:
    """Counters since the model was loaded: requests, their inputs and tokens, and native calls."""

    n_requests: int
    n_inputs: int
    n_tokens: int
    n_calls: int
    n_aborted_calls: int
    compute_s: float
    n_waiting: int  # inputs, at this moment


class Embedder:
    """The only one who asks a backend for embeddings. `run` owns its life."""

    def __init__(
        self,
        model_id: str,
        backend: Backend,
        facts: BackendFacts,
        options: ContextOptions,
        runner: Runner,
        is_generating: Callable[[], bool],
        pause: Callable[[], None],
    ) -> None:
        """`pause` lets the running step of who generates be the last before the next call."""
        assert facts.embeddings is not None
        self.facts: EmbeddingFacts = facts.embeddings
        self._model_id = model_id
        self._n_vocab = facts.n_vocab
        self._backend = cast("OptionalBackend", backend)
        self._options = options
        self._runner = runner
        self._is_generating = is_generating
        self._pause = pause
        self._waiting: deque[Input] = deque()
        self._in_flight: list[Input] = []
        self._wakeup = trio.Event()
        self._stopped: ErllamaError | None = None
        self._unasked_aborts = 0
        self._n = dict.fromkeys(("requests", "inputs", "tokens", "calls", "aborted_calls"), 0)
        self._compute_s = 0.0

    def __repr__(self) -> str:
        return f"<Embedder {self._model_id}: {len(self._waiting)} inputs wait>"

    def statistics(self) -> EmbedStatistics:
        """A consistent reading; never waits."""
        return EmbedStatistics(
            **{f"n_{name}": count for name, count in self._n.items()},
            compute_s=self._compute_s,
            n_waiting=len(self._waiting),
        )

    # --- what clients may do ---

    async def embed(self, inputs: Sequence[list[int]]) -> npt.NDArray[np.float32]:
        """The vectors (n_inputs, n_embd) of token ids, in their order.

        Raises: `InvalidContent`, `ContextOverflow` and `BatchOverflow` before anything is computed,
        `EngineError`, `NotLoaded`. Cancellation: what is not computed yet is not.
        """
        for index, tokens in enumerate(inputs):
            self._check(index, tokens)
        if self._stopped is not None:
            raise copy.copy(self._stopped)
        job = Job(np.empty((len(inputs), self.facts.n_embd), np.float32), len(inputs))
        if not inputs:
            await trio.lowlevel.checkpoint()
            return job.vectors
        self._n["requests"] += 1
        self._waiting += [Input(job, index, tokens) for index, tokens in enumerate(inputs)]
        self._wakeup.set()
        try:
            await job.over.wait()
        finally:
            self._leave(job)
        if job.error is not None:
            raise copy.copy(job.error)
        return job.vectors

    def _check(self, index: int, tokens: list[int]) -> None:
        facts, n = self.facts, len(tokens)
        if not tokens:
            raise InvalidContent(f"input {index} has no tokens", detail={"index": index})
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            token = next(t for t in tokens if not 0 <= t < self._n_vocab)
            raise InvalidContent(
                f"input {index}: token {token} is not in the vocabulary of {self._n_vocab}",
                detail={"index": index, "token": token, "n_vocab": self._n_vocab},
            )
        if n > facts.n_ctx:
            raise ContextOverflow(
                f"input {index} has {n} tokens, and the context length is {facts.n_ctx}; shorten it",
                detail={"index": index, "n_prompt": n, "n_ctx": facts.n_ctx},
            )
        if n > facts.n_tokens_max:
            raise BatchOverflow(
                f"input {index} has {n} tokens, and {facts.n_rows} are computed at once; this model needs "
                f"all tokens of an input at once: load it with larger n_batch and n_ubatch",
                detail={"index": index, "n_tokens": n, "n_ubatch": facts.n_rows},
            )

    def _leave(self, job: Job) -> None:
        """The client is gone, or has what it wanted."""
        if not job.is_wanted:
            return
        job.over.set()
        self._waiting = deque(each for each in self._waiting if each.job is not job)
        if self._in_flight and not any(each.job.is_wanted for each in self._in_flight):
            self._backend.abort_embed()

    # --- the loop ---

    async def run(self) -> Never:
        """Serve until cancelled; then every client gets `NotLoaded`. The call in flight is aborted."""
        reason: ErllamaError = EngineError(f"the embedder of {self._model_id!r} stopped")
        try:
            while True:
                self._wakeup = trio.Event()
                if self._waiting:
                    await self._call()
                else:
                    await self._wakeup.wait()
        except trio.Cancelled:
            reason = NotLoaded(f"model {self._model_id!r} was unloaded")
            raise
        finally:
            self._stopped = reason
            for each in (*self._in_flight, *self._waiting):
                if each.job.is_wanted:
                    each.job.fail(reason)
            self._waiting.clear()

    def _n_most(self) -> int:
        """Tokens of the next call: those who generate wait for it no longer than for a prompt's piece."""
        if not self._is_generating():
            return self.facts.n_rows
        return Chunks.of(self._options.prefill_chunk_size, self.facts.n_rows).beside

    async def _call(self) -> None:
        first = islice(self._waiting, self.facts.n_lanes)  # there may be many thousands
        progress = [(len(each.tokens), each.n_done) for each in first]
        portions = plan_portions(progress, self.facts, self._n_most())
        inputs = [self._waiting[portion.place] for portion in portions]
        rows = [
            EmbedRow(lane, start, each.tokens[start : start + n], start + n == len(each.tokens))
            for lane, (each, (_, start, n)) in enumerate(zip(inputs, portions, strict=True))
        ]
        self._in_flight = inputs
        self._backend.clear_abort_embed()
        budget_s = self._options.decode_budget_s or None  # 0: no limit
        self._pause()
        try:
            result = await self._runner.run(
                self._backend.embed, rows, budget_s, on_cancel=self._backend.abort_embed
            )
        except ErllamaError as error:
            self._fail(inputs, error)
            return
        finally:
            self._in_flight = []
        self._compute_s += result.compute_s
        self._apply(inputs, rows, result)

    def _apply(self, inputs: list[Input], rows: list[EmbedRow], result: EmbedResult) -> None:
        match result.status:
            case StepStatus.OK:
                self._unasked_aborts = 0
                self._n["calls"] += 1
                self._n["tokens"] += sum(len(row.tokens) for row in rows)
                for each, row, vector in zip(inputs, rows, result.vectors, strict=True):
                    self._computed(each, row, vector)
            case StepStatus.ABORTED:
                self._aborted(inputs)
            case StepStatus.TIMEOUT:
                budget_s = self._options.decode_budget_s or 0.0
                self._fail(inputs, DecodeTimeout(f"an embedding took longer than {budget_s:.3g} s"))
            case _:
                self._fail(inputs, DecodeFailed(rc=result.rc))

    def _computed(self, each: Input, row: EmbedRow, vector: npt.NDArray[np.float32] | None) -> None:
        if not each.job.is_wanted:  # it left meanwhile, and its inputs do not wait any more
            return
        each.n_done += len(row.tokens)
        if not row.is_last:
            return
        if vector is None or not np.isfinite(vector).all():
            self._fail([each], EngineError(f"input {each.index}: the model gave no finite numbers"))
            return
        self._waiting.remove(each)
        self._n["inputs"] += 1
        each.job.vectors[each.index] = vector
        each.job.n_left -= 1
        if not each.job.n_left:
            each.job.over.set()

    def _aborted(self, inputs: list[Input]) -> None:
        """Nothing of the call is kept; who still waits is computed again."""
        self._n["aborted_calls"] += 1
        for each in inputs:
            each.n_done = 0
        wanted = [each for each in inputs if each.job.is_wanted]
        self._unasked_aborts = self._unasked_aborts + 1 if wanted else 0
        if self._unasked_aborts >= UNASKED_ABORTS:
            self._unasked_aborts = 0
            self._fail(wanted, DecodeAborted(f"{self._model_id!r} aborts calls that nobody cancelled"))

    def _fail(self, inputs: list[Input], error: ErllamaError) -> None:
        """End the jobs that these inputs belong to."""
        jobs = {each.job for each in inputs}
        for job in jobs:
            if job.is_wanted:
                job.fail(error)
        self._waiting = deque(each for each in self._waiting if each.job not in jobs)
