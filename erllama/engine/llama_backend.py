"""The backend that runs GGUF models: one llama.cpp model and context behind `erllama.backend.Backend`.

It turns a step into one `llama_decode` under the compute permit, samples the rows that ask for it on
the same thread, and knows what each kind of memory can be cut to. Native values that follow from the
user's options (output rows, the scratch sequence, cells of separate streams) are computed here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from erllama import llama
from erllama.backend import BackendFacts, Layout, MemoryKind, Sampled, StepResult, StepStatus
from erllama.errors import ErllamaError, HandleClosed, LoadCancelled, NotSupported
from erllama.kvcache.key import control_piece
from erllama.llama.variant import cache_dir
from erllama.types import TokenLogprob

from .fingerprint import file_sha256, model_files, shape_hash
from .governor import ThreadGovernor
from .permit import PROCESS_PERMIT
from .sampling import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from erllama.backend import SamplingParams, Step
    from erllama.options import ContextOptions, ModelOptions

log = logging.getLogger("erllama.engine")

N_SCRATCH = 1  # one sequence more than users see, where ranges can be copied: for saving and restoring


class LlamaSampler:
    """A native sampler chain, and how many alternatives to report beside each token."""

    def __init__(self, chain: llama.SamplerChain, n_alternatives: int | None) -> None:
        self.chain = chain
        self.n_alternatives = n_alternatives

    def close(self) -> None:
        """Free the chain."""
        self.chain.close()


class LlamaBackend:
    """One GGUF file, loaded. See `erllama.backend` for threads and for what each method promises."""

    def __init__(
        self, path: str, model: ModelOptions, context: ContextOptions, *, adapt_threads: bool = False
    ) -> None:
        """`context` is resolved. `adapt_threads`: use fewer threads while other programs want the cores."""
        self._path = path
        self._model_options = model
        self._options = context
        self._progress = llama.LoadProgress()
        self._model: llama.Model | None = None
        self._context: llama.Context | None = None
        self._batch: llama.Batch | None = None
        self._longest_piece: int | None = None
        self._permit = PROCESS_PERMIT.ticket()
        self._adapt_threads = adapt_threads
        self._governor: ThreadGovernor | None = None

    def __repr__(self) -> str:
        return f"<LlamaBackend {self._path!r}{'' if self._context else ' closed'}>"

    # --- life ---

    def load_fraction(self) -> float:
        """How far a running `open` is."""
        return self._progress.fraction

    def cancel_open(self) -> None:
        """Make a running `open` give up."""
        self._progress.cancel()
        self._permit.give_up()

    def open(self) -> BackendFacts:
        """Load the weights and make the context.

        Raises: `MalformedGguf`, `NotSupported` (architectures that cannot generate), `LoadFailed`,
        `ModelWouldOom`, `NativeLibraryError`.
        """
        if self._options.embeddings or self._options.pooling is not None:
            raise NotSupported("embeddings and pooling: erllama cannot embed yet; leave them out to generate")
        self._model = model = llama.Model.open(self._path, self._model_options, progress=self._progress)
        self._params = _native_params(self._options, model.facts)
        self._context = context = self._open_context(model)
        _warn_of_what_will_disappoint(self._path, self._options, self._model_options, model.facts)
        self._batch = llama.Batch(context.n_batch, self._params.n_seq_max)
        self._kind = context.memory_kind
        if self._kind is MemoryKind.NONE:
            raise NotSupported(f"{self._path}: this model only embeds, it cannot generate")
        n_slots, use = self._options.n_seq_max, context.memory_bytes
        per_request = min(self._options.n_ctx or model.facts.n_ctx_train, context.n_ctx_seq)
        return BackendFacts(
            n_ctx=per_request,
            n_cells=context.n_ctx,
            n_batch=context.n_batch,
            n_slots=n_slots,
            n_vocab=model.facts.n_vocab,
            memory_kind=self._kind,
            streams_separate=not self._options.kv_unified,
            shape_hash=self._shape_hash(),
            layout=Layout() if self._kind is MemoryKind.DENSE and self._options.kv_unified else None,
            quant_tag=model.facts.ftype,
            memory_bytes=model.facts.size_bytes + use.kv_bytes + use.compute_bytes,
            sampling_defaults=_sampling_defaults(model.facts.sampling),
            details=self._details(),
        )

    def _shape_hash(self) -> bytes:
        """Everything that decides whether saved KV may be restored here."""
        facts, build, options = self._live_model().facts, llama.build_info(), self._options
        memory = cache_dir() / "fingerprints"
        return shape_hash(
            {
                "model": [file_sha256(file, memory) for file in model_files(self._path)],
                "architecture": facts.architecture,
                "type_k": options.type_k,
                "type_v": options.type_v,
                "flash_attn": options.flash_attn,
                "unified": options.kv_unified,
                # LongRoPE chooses its factors by the context length (llama.cpp: get_rope_factors).
                "n_ctx": self._live_context().n_ctx_seq
                if facts.metadata.get(f"{facts.architecture}.rope.scaling.type") == "longrope"
                else None,
                "build": build.stamp,
            }
        )

    def _details(self) -> dict[str, Any]:
        model, context = self._live_model(), self._live_context()
        facts = dataclasses.asdict(model.facts)
        for bulky in ("metadata", "chat_template", "sampling"):
            facts.pop(bulky)
        return {
            **facts,
            "memory": context.memory_bytes,
            "n_threads": self._params.n_threads,
            "build": llama.build_info(),
        }

    def close(self) -> None:
        """Free everything; harmless when nothing was opened."""
        self._batch = None
        if self._context is not None:
            self._context.close()
            self._context = None
        if self._model is not None:
            self._model.close()
            self._model = None

    def rebuild(self) -> None:
        """A fresh context on the same weights."""
        self._live_context().close()
        self._context = self._open_context(self._live_model())

    def _open_context(self, model: llama.Model) -> llama.Context:
        if self._adapt_threads and self._params.n_threads > 1:
            self._governor = ThreadGovernor(self._params.n_threads, time.monotonic(), _idle_s)
        with self._permit.held(self._params.n_threads) as granted:  # opening decodes two tokens
            if not granted:
                raise LoadCancelled(f"{self._path}: given up while another model was computing")
            return llama.Context.open(model, self._params)

    def _live_model(self) -> llama.Model:
        if self._model is None:
            raise HandleClosed(f"{self._path} is closed")
        return self._model

    def _live_context(self) -> llama.Context:
        if self._context is None:
            raise HandleClosed(f"the context of {self._path} is closed")
        return self._context

    # --- steps ---

    def step(self, step: Step) -> StepResult:
        """One `llama_decode`, then one sample per row that carries a sampler."""
        context, batch = self._live_context(), self._batch
        assert batch is not None
        batch.clear()
        outputs = [
            batch.add(row.slot, row.tokens, row.pos, output="none" if row.sampler is None else "last")
            for row in step.rows
        ]
        with self._permit.held(self._n_threads(step), at_most_s=step.budget_s) as granted:
            if not granted:
                return StepResult(status=StepStatus.ABORTED)
            context.abort.arm(step.budget_s)
            began, cpu_began = time.perf_counter(), time.process_time()
            rc = context.decode(batch)
            computed = time.perf_counter()
            self._govern(context, computed - began, time.process_time() - cpu_began)
        if rc != 0:
            return StepResult(status=_status(rc, context.abort.cause), rc=rc, compute_s=computed - began)
        sampled = tuple(
            None if row.sampler is None else self._sample(row.sampler, output)
            for row, output in zip(step.rows, outputs, strict=True)
        )
        return StepResult(
            status=StepStatus.OK,
            sampled=sampled,
            compute_s=computed - began,
            sample_s=time.perf_counter() - computed,
        )

    def _govern(self, context: llama.Context, wall_s: float, cpu_s: float) -> None:
        if self._governor is None:
            return
        before = self._governor.n
        after = self._governor.observe(wall_s, cpu_s, time.monotonic())
        if after != before:
            context.set_threads(after, after)
            log.info("%s: computing with %d threads now, was %d", self._path, after, before)

    def _n_threads(self, step: Step) -> int:
        """Threads that llama.cpp computes this step with: those for single rows, or for batches."""
        if self._governor is not None:
            return self._governor.n
        single, many = self._params.n_threads, self._params.n_threads_batch
        return single if step.n_tokens == 1 or many is None else many

    def _sample(self, sampler: Any, output: int) -> Sampled | ErllamaError:
        assert isinstance(sampler, LlamaSampler)
        context = self._live_context()
        try:
            token = sampler.chain.sample(context, output)
        except ErllamaError as error:  # this request's grammar or memory; its neighbours go on
            return error
        if sampler.n_alternatives is None:
            return Sampled(token=token)
        return Sampled(token=token, logprob=_logprob(context.logits(output), token, sampler.n_alternatives))

    def abort(self) -> None:
        """Raise the flag that ggml's abort callback reads. Any thread."""
        self._permit.give_up()
        context = self._context
        if context is not None:
            context.abort.raise_flag()

    def clear_abort(self) -> None:
        """Lower the flag. Any thread."""
        self._permit.renew()
        context = self._context
        if context is not None:
            context.abort.clear()

    # --- memory ---

    def n_kv(self, slot: int) -> int:
        """Tokens that can be trusted to be in memory.

        After an abort, recurrent states are ahead of what `pos_max` says (tried on the pinned build),
        so they count as lost.
        """
        if self._kind not in (MemoryKind.DENSE, MemoryKind.WINDOW):
            return 0
        return self._live_context().memory.pos_max(slot) + 1

    def cut(self, slot: int, n_keep: int) -> bool:
        """Keep [0, n_keep); False where llama.cpp would answer true and be wrong, or cannot."""
        memory = self._live_context().memory
        if n_keep == 0:
            return memory.rm(slot, -1, -1)
        if not memory.can_cut(slot, n_keep):
            return False
        return memory.rm(slot, n_keep, -1) and memory.pos_max(slot) == n_keep - 1

    @property
    def _scratch(self) -> int:
        """The sequence through which ranges are exported and imported; users never see it."""
        return self._options.n_seq_max

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """Ranged `seq_cp`: metadata only."""
        self._live_context().memory.cp(src, dst, start, end)

    def export_bytes(self, slot: int, start: int, end: int) -> int:
        """Size of the range's state."""
        context = self._live_context()
        with self._on_scratch(slot, start, end):
            return context.state_size(self._scratch)

    def export(self, slot: int, start: int, end: int, into: memoryview) -> int:
        """Serialise the range through the scratch sequence, so equal KV gives equal bytes."""
        context = self._live_context()
        with self._on_scratch(slot, start, end):
            return context.state_get(self._scratch, into)

    @contextmanager
    def _on_scratch(self, slot: int, start: int, end: int) -> Iterator[None]:
        memory = self._live_context().memory
        memory.cp(slot, self._scratch, start, end)
        try:
            yield
        finally:
            memory.rm(self._scratch)

    def import_(self, slot: int, block: tuple[int, int], wanted: tuple[int, int], data: memoryview) -> bool:
        """Restore into the scratch sequence, check what arrived, then let the slot hold what it wants."""
        context, memory = self._live_context(), self._live_context().memory
        try:
            if context.state_set(self._scratch, data) != len(data):
                return False
            if (memory.pos_min(self._scratch), memory.pos_max(self._scratch)) != (block[0], block[1] - 1):
                return False
            memory.cp(self._scratch, slot, *wanted)
            return True
        finally:
            memory.rm(self._scratch)

    # --- vocabulary and samplers: any thread ---

    def new_sampler(self, params: SamplingParams) -> LlamaSampler:
        """A native chain. Raises `InvalidGrammar`."""
        model = self._live_model()
        native = llama.SamplerParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            seed=params.seed,
            logit_bias=dict(params.logit_bias),
            grammar=params.grammar,
            grammar_first=params.grammar_first,
            guide=params.guide,
        )
        return LlamaSampler(llama.SamplerChain(model.vocab, native), params.logprobs)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Text to token ids."""
        return self._live_model().vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes, control tokens written out."""
        return self._live_model().vocab.detokenize(tokens)

    def piece(self, token: int) -> bytes:
        """The bytes a token shows."""
        return self._live_model().vocab.piece(token)

    def key_pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Text of ordinary tokens, id of control tokens."""
        vocab = self._live_model().vocab
        return [control_piece(t) if vocab.is_control(t) else vocab.piece(t) for t in tokens]

    def chat_templates(self, text: str | None) -> llama.ChatTemplates:
        """The model's chat templates, or `text` as one of them. Raises: `InvalidContent`."""
        return llama.ChatTemplates.of_model(self._live_model(), text)

    def special_texts(self) -> list[tuple[int, str, bool]]:
        """Control and user-defined tokens."""
        return self._live_model().vocab.special_texts()

    def longest_piece(self) -> int:
        """Found once, by looking at every token: tens of milliseconds."""
        if self._longest_piece is None:
            vocab = self._live_model().vocab
            self._longest_piece = max(
                len(vocab.piece(t, special=True)) for t in range(self._live_model().facts.n_vocab)
            )
        return self._longest_piece

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return self._live_model().vocab.is_eog(token)


def _idle_s() -> float:
    """Seconds that this machine's cores have been idle, summed."""
    idle: float = psutil.cpu_times().idle
    return idle


def _sampling_defaults(sampling: llama.SamplingFacts) -> dict[str, float]:
    """What the model file says about sampling, by the names of `GenerationOptions`."""
    given = dataclasses.asdict(sampling)
    return {name: given[name] for name in DEFAULTS if given[name] is not None}


def _native_params(options: ContextOptions, facts: llama.ModelFacts) -> llama.ContextParams:
    n_ctx = options.n_ctx or facts.n_ctx_train
    unified = options.kv_unified
    assert options.n_threads is not None
    assert options.n_threads_batch is not None
    assert options.n_ubatch is not None
    return llama.ContextParams(
        n_ctx=n_ctx if unified else n_ctx * options.n_seq_max,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_seq_max + (N_SCRATCH if unified else 0),
        n_outputs_max=options.n_seq_max,  # one sampled row per sequence; more would cost compute buffer
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attn=options.flash_attn,
        type_k=options.type_k,
        type_v=options.type_v,
        kv_unified=unified,
        embeddings=options.embeddings,
        pooling=options.pooling,
    )


def _warn_of_what_will_disappoint(
    path: str, options: ContextOptions, model: ModelOptions, facts: llama.ModelFacts
) -> None:
    """What llama.cpp accepts and the user will not like."""
    if facts.n_ctx_train and (options.n_ctx or 0) > facts.n_ctx_train:
        log.warning(
            "%s was trained for %d tokens; with n_ctx=%d, text beyond them is likely to be nonsense",
            *(path, facts.n_ctx_train, options.n_ctx),
        )
    if model.n_gpu_layers != 0 and not any(device.kind in ("gpu", "igpu") for device in llama.devices()):
        log.warning(
            "n_gpu_layers=%d has no effect: there is no GPU that this build of erllama can use",
            model.n_gpu_layers,
        )


def _status(rc: int, cause: str | None) -> StepStatus:
    """llama.h, llama_decode: 1 no room, 2 aborted, negative fatal (-1: our batch was invalid)."""
    if rc == 1:
        return StepStatus.NO_ROOM
    if rc == 2:
        return StepStatus.TIMEOUT if cause == "deadline" else StepStatus.ABORTED
    return StepStatus.FATAL


def _logprob(logits: np.ndarray, token: int, n_top: int) -> TokenLogprob:
    """Log-softmax of the raw logits at the sampled token, and the `n_top` likeliest."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        best = np.argpartition(logprobs, -n_top)[-n_top:]
        best = best[np.argsort(-logprobs[best], kind="stable")]
        top = tuple((int(i), float(logprobs[i])) for i in best)
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)
