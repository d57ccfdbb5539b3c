"""The backend that runs GGUF models: one llama.cpp model and context behind `erllama.backend.Backend`.

It turns a step into one `llama_decode` under the compute permit, samples the rows that ask for it on
the same thread, and knows what each kind of memory can be cut to. Native values that follow from the
user's options (output rows, the scratch sequence, cells of separate streams) are computed here.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from erllama import llama
from erllama.backend import BackendFacts, MemoryKind, PartKind, StepResult, StepStatus
from erllama.errors import HandleClosed, InvalidOption, LoadCancelled, NotSupported
from erllama.kvcache.key import control_piece
from erllama.llama.template_trial import check_ends
from erllama.llama.variant import cache_dir
from erllama.options import INT32_MAX

from .cold import cold_piece
from .cold_probe import TRIAL, ColdProbe
from .context_threads import ContextThreads
from .fingerprint import file_sha256, model_files, shape_hash
from .llama_embedder import LlamaEmbedder
from .llama_parts import FORMAT, PartMover, layout_of, why_no_layout
from .llama_sampler import LlamaSampler, decode_rows
from .memory_check import MemoryCheck
from .native_params import N_SCRATCH, native_params, sampling_defaults, warn_of_what_will_disappoint
from .permit import PROCESS_PERMIT
from .return_code import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.backend import EmbedResult, EmbedRow, Layout, Row, SamplingParams, Step
    from erllama.options import ContextOptions, ModelOptions
    from erllama.types import EmbeddingFacts

log = logging.getLogger("erllama.engine")


# Options that neither a trial nor KV of exact="cold" depends on: these decide when something is computed, and
# what embeds has a context of its own.
NO_BITS = {"embeddings", "pooling", "prefill_chunk_size", "step_target_s", "decode_budget_s"}


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
        self._embedder: LlamaEmbedder | None = None
        self._parts: PartMover | None = None
        self._layout: Layout | None = None
        self._not_kept: str | None = None
        self._longest_piece: int | None = None
        self._permit = PROCESS_PERMIT.ticket()
        self._adapt_threads = adapt_threads

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
        if (context := self._context) is not None:
            context.abort.raise_flag()
        self.abort_embed()

    def open(self) -> BackendFacts:
        """Load the weights and make the contexts: to generate, and to embed if that is wanted.

        Raises: `MalformedGguf`, `NotSupported` (it cannot generate, or not text), `InvalidOption`,
        `LoadFailed`, `ModelWouldOom`, `NativeLibraryError`.
        """
        options = self._options
        if options.pooling is not None and not options.embeddings:
            raise InvalidOption(
                f"pooling={options.pooling!r} has no effect without embeddings=True",
                detail={"key": "pooling", "value": options.pooling},
            )
        self._model = model = llama.Model.open(self._path, self._model_options, progress=self._progress)
        self._params = native_params(self._options, model.facts)
        embeddings = None
        if options.embeddings:
            self._embedder = LlamaEmbedder(self._path, model, options, adapt_threads=self._adapt_threads)
            embeddings = self._embedder.open()
            if self._embedder.only_embeds:
                return self._facts_of_embedder(embeddings)
        self._context = context = self._open_context(model)
        warn_of_what_will_disappoint(self._path, self._options, self._model_options, model.facts)
        self._batch = llama.Batch(context.n_batch, self._params.n_seq_max)
        self._kind = context.memory_kind
        if self._kind is MemoryKind.NONE or not context.is_causal:
            raise NotSupported(
                f"{self._path}: this model only embeds, it cannot generate; "
                "load it with ContextOptions(embeddings=True)"
            )
        if model.vocab.is_absent:
            raise NotSupported(f"{self._path}: this model has no vocabulary; its tokens are no text")
        shape = self._shape_hash()
        self._compute_hash = self._context_hash(shape)
        self._open_parts(context)
        n_slots, use = self._options.n_seq_max, context.memory_bytes
        per_request = min(self._options.n_ctx or model.facts.n_ctx_train, self._n_ctx_seq)
        return BackendFacts(
            n_ctx=per_request,
            n_cells=context.n_ctx,
            n_batch=context.n_batch,
            n_slots=n_slots,
            n_vocab=model.facts.n_vocab,
            memory_kind=self._kind,
            streams_separate=not self._options.kv_unified,
            shape_hash=shape,
            compute_hash=self._compute_hash,
            layout=self._layout,
            quant_tag=model.facts.ftype,
            memory_bytes=model.facts.size_bytes + use.total_bytes + self._embedder_bytes,
            sampling_defaults=sampling_defaults(model.facts.sampling),
            embeddings=embeddings,
            details=self._details(context.memory_bytes),
        )

    def _facts_of_embedder(self, embeddings: EmbeddingFacts) -> BackendFacts:
        """Of a model that does not generate: there is nothing to keep."""
        model, embedder = self._live_model(), self._embedder
        assert embedder is not None
        self._not_kept = "it only embeds"
        return BackendFacts(
            n_ctx=embeddings.n_ctx,
            n_cells=embeddings.n_ctx,
            n_batch=self._options.n_batch,
            n_slots=self._options.n_seq_max,
            n_vocab=model.facts.n_vocab,
            memory_kind=embedder.memory_kind,
            quant_tag=model.facts.ftype,
            memory_bytes=model.facts.size_bytes + self._embedder_bytes,
            embeddings=embeddings,
            generates=False,
            details=self._details(embedder.memory_use),
        )

    @property
    def _embedder_bytes(self) -> int:
        return 0 if self._embedder is None else self._embedder.memory_use.total_bytes

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
                "parts": FORMAT,
                # LongRoPE chooses its factors by the context length (llama.cpp: get_rope_factors).
                "n_ctx": self._live_context().n_ctx_seq
                if facts.metadata.get(f"{facts.architecture}.rope.scaling.type") == "longrope"
                else None,
                "build": build.stamp,
            }
        )

    def _details(self, memory: llama.MemoryUse) -> dict[str, Any]:
        model = self._live_model()
        facts = dataclasses.asdict(model.facts)
        for bulky in ("metadata", "chat_template", "sampling"):
            facts.pop(bulky)
        return {
            **facts,
            **({} if self._not_kept is None else {"not_kept": self._not_kept}),
            "memory": memory,
            "n_threads": self._params.n_threads,
            "build": llama.build_info(),
        }

    def close(self) -> None:
        """Free everything; harmless when nothing was opened."""
        self._batch = self._parts = None
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None
        if self._context is not None:
            self._context.close()
            self._context = None
        if self._model is not None:
            self._model.close()
            self._model = None

    def clear(self) -> None:
        """Forget every sequence; what cells held stays where nobody looks.

        It is asked for on behalf of who wants exact bits, so until other steps come these are looked after.
        """
        self._live_context().memory.clear(data=False)
        if self._parts is not None:
            self._parts.exact = True

    def probe_cold(self) -> str | None:
        """Try it, unless that was done before. Blocks for a few prefills."""
        context, batch = self._live_context(), self._batch
        piece = cold_piece(context.n_batch)
        assert piece is not None
        assert batch is not None
        self._threads.use_all(context)
        context.abort.arm(None)
        with self._permit.held(self._params.n_threads) as granted:
            if not granted:
                raise LoadCancelled(f"{self._path}: given up while another model was computing")
            if self._parts is not None:
                self._parts.exact = True
            probe = ColdProbe(context, batch, piece, self._n_ctx_seq, self._parts, self._layout)
            return probe.failure(cache_dir() / "cold-probes" / f"{self._compute_hash.hex()}-{TRIAL}")

    def rebuild(self) -> None:
        """A fresh context on the same weights."""
        self._live_context().close()
        self._context = self._open_context(self._live_model())
        if self._layout is not None:
            self._parts = PartMover(self._context, self._layout)

    def _open_context(self, model: llama.Model) -> llama.Context:
        params = self._params
        self._threads = ContextThreads(
            self._path, params.n_threads, params.n_threads_batch, adapt=self._adapt_threads
        )
        with self._permit.held(self._params.n_threads) as granted:  # opening decodes two tokens
            if not granted:
                raise LoadCancelled(f"{self._path}: given up while another model was computing")
            return llama.Context.open(model, self._params)

    def _open_parts(self, context: llama.Context) -> None:
        """Find out what of a sequence can be kept, and try it unless that was done before."""
        layout = layout_of(context)
        if layout is None:
            self._not_kept = why_no_layout(context)
            return
        parts = PartMover(context, layout)
        assert self._batch is not None
        with self._permit.held(self._params.n_threads) as granted:
            if not granted:
                raise LoadCancelled(f"{self._path}: given up while another model was computing")
            check = MemoryCheck(context, self._batch, parts, layout)
            self._not_kept = check.failure(cache_dir() / "memory-checks" / self._compute_hash.hex())
        if self._not_kept is None:
            self._layout, self._parts = layout, parts
        else:
            log.warning("%s is not cached, its KV does not survive a save: %s", self._path, self._not_kept)

    def _context_hash(self, shape: bytes) -> bytes:
        """Everything that may decide whether KV comes back as it was saved."""
        return shape_hash(
            {
                "shape": shape.hex(),
                "model": dataclasses.asdict(self._model_options),
                "context": {
                    name: value
                    for name, value in dataclasses.asdict(self._options).items()
                    if name not in NO_BITS
                },
                "cpu_variant": llama.build_info().cpu_variant,
                "system": llama.build_info().system_info,
                "devices": [(device.name, device.description) for device in llama.devices()],
            }
        )

    def _live_model(self) -> llama.Model:
        if self._model is None:
            raise HandleClosed(f"{self._path} is closed")
        return self._model

    def _live_context(self) -> llama.Context:
        if self._context is None:
            raise HandleClosed(f"the context of {self._path} is closed")
        return self._context

    @property
    def _n_ctx_seq(self) -> int:
        """The longest sequence that memory and the model's positions allow."""
        n_ctx_seq, n_positions = self._live_context().n_ctx_seq, self._live_model().facts.n_positions
        return n_ctx_seq if n_positions is None else min(n_ctx_seq, n_positions)

    def _live_parts(self) -> PartMover:
        if self._parts is None:
            raise NotSupported(f"{self._path}: its KV cannot be kept: {self._not_kept}")
        return self._parts

    def _seq_id(self, slot: int) -> int:
        """llama.cpp's name of a slot: the scratch sequence comes first."""
        return slot + N_SCRATCH if self._options.kv_unified else slot

    # --- steps ---

    def step(self, step: Step) -> StepResult:
        """One `llama_decode`, then one sample per row that carries a sampler."""
        context, batch = self._live_context(), self._batch
        assert batch is not None
        outputs = self._fill(batch, step.rows)
        if step.exact:
            self._threads.use_all(context)
        elif self._parts is not None:
            self._parts.exact = False
        with self._permit.held(self._threads.n_for(step.n_tokens), at_most_s=step.budget_s) as granted:
            if not granted:
                return StepResult(status=StepStatus.ABORTED)
            context.abort.arm_next(step.budget_s)
            decoded, sampled = decode_rows(context, batch, step.rows, outputs)
            if not step.exact:
                self._threads.observe(context, decoded.compute_s, decoded.cpu_s)
        rc = decoded.rc
        return StepResult(
            status=StepStatus.OK if rc == 0 else status_of(rc, context.abort.cause),
            sampled=sampled,
            rc=rc,
            compute_s=decoded.compute_s,
            sample_s=decoded.sample_s,
        )

    def _fill(self, batch: llama.Batch, rows: Sequence[Row]) -> Sequence[int]:
        """Put the rows of a step into the batch; returns the index of each one's output."""
        first = self._seq_id(0)
        single = [
            (first + row.slot, row.tokens[0], row.pos)
            for row in rows
            if len(row.tokens) == 1 and row.sampler is not None
        ]
        if len(single) == len(rows):
            batch.fill(*zip(*single, strict=True))
            return range(len(rows))
        batch.clear()
        return [
            batch.add(
                self._seq_id(row.slot), row.tokens, row.pos, output="none" if row.sampler is None else "last"
            )
            for row in rows
        ]

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
        if context is not None and context.abort.is_raised:
            context.abort.clear()

    # --- embeddings ---

    def embed(self, rows: Sequence[EmbedRow], budget_s: float | None = None) -> EmbedResult:
        """One `llama_decode` in the context that embeds. Raises: `NotSupported` without one."""
        if self._embedder is None:
            raise NotSupported(f"{self._path} was not opened with embeddings=True")
        return self._embedder.embed(rows, budget_s)

    def abort_embed(self) -> None:
        """Raise the flag of the context that embeds. Any thread."""
        if (embedder := self._embedder) is not None:
            embedder.abort()

    def clear_abort_embed(self) -> None:
        """Lower it. Any thread."""
        if (embedder := self._embedder) is not None:
            embedder.clear_abort()

    # --- memory ---

    def n_kv(self, slot: int) -> int:
        """Tokens that can be trusted to be in memory.

        After an abort, recurrent states are ahead of what `pos_max` says (tried on the pinned build),
        so they count as lost.
        """
        if self._kind not in (MemoryKind.DENSE, MemoryKind.WINDOW):
            return 0
        return self._live_context().memory.pos_max(self._seq_id(slot)) + 1

    def cut(self, slot: int, n_keep: int) -> bool:
        """Keep [0, n_keep); False where llama.cpp would answer true and be wrong, or cannot."""
        memory, seq_id, parts = self._live_context().memory, self._seq_id(slot), self._parts
        if n_keep == 0:
            return memory.rm(seq_id, -1, -1)
        if not (memory if parts is None else parts).can_cut(seq_id, n_keep):
            return False
        return memory.rm(seq_id, n_keep, -1) and memory.pos_max(seq_id) == n_keep - 1

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """`seq_cp`: metadata only."""
        self._live_parts().share(self._seq_id(src), self._seq_id(dst), start, end)

    def export_bytes(self, slot: int, start: int, end: int, part: PartKind = PartKind.BASE) -> int:
        """Size of the part's state; 0 if memory has not all of it."""
        return self._live_parts().export_bytes(self._seq_id(slot), start, end, part)

    def export(
        self, slot: int, start: int, end: int, into: memoryview, part: PartKind = PartKind.BASE
    ) -> int:
        """Serialise the part; equal KV in equal order gives equal bytes. Raises: `EngineError` (no room)."""
        return self._live_parts().export(self._seq_id(slot), start, end, into, part)

    def import_(
        self,
        slot: int,
        block: tuple[int, int],
        wanted: tuple[int, int],
        data: memoryview,
        part: PartKind = PartKind.BASE,
    ) -> bool:
        """Check and restore into the scratch sequence, then let the slot hold what it wants."""
        return self._live_parts().import_(self._seq_id(slot), block, wanted, data, part)

    def is_at(self, slot: int, n: int) -> bool:
        """Counts cells: a pass or two over the whole cache."""
        return self._live_parts().is_at(self._seq_id(slot), n)

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
        return (self._model or self._live_model()).vocab.piece(token)

    def key_pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Text of ordinary tokens, id of control tokens."""
        vocab = self._live_model().vocab
        return [control_piece(t) if vocab.is_control(t) else vocab.piece(t) for t in tokens]

    def chat_templates(self, text: str | None) -> llama.ChatTemplates:
        """The model's chat templates, or `text` as one of them. Raises: `InvalidContent`.

        A template that is new to this machine is tried in a child process first, which takes half a second.
        """
        model = self._live_model()
        for source in model.facts.chat_templates if text is None else (text,):
            check_ends(source, llama.build_info().stamp)
        return llama.ChatTemplates.of_model(model, text)

    def special_texts(self) -> list[tuple[int, str, bool]]:
        """Control and user-defined tokens."""
        return self._live_model().vocab.special_texts()

    def longest_piece(self) -> int:
        """Found once, by looking at every token: tens of milliseconds."""
        if self._longest_piece is None:
            vocab = self._live_model().vocab
            if vocab.drops_text:
                return INT32_MAX
            self._longest_piece = max(
                len(vocab.piece(t, special=True)) for t in range(self._live_model().facts.n_vocab)
            )
        return self._longest_piece

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return (self._model or self._live_model()).vocab.is_eog(token)
