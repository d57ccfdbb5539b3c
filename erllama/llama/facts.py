"""What a loaded model says about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ffi import Library

# Architectures that only draft for another model (llama.cpp: they need a second context).
DRAFT_ARCHITECTURES = frozenset({"eagle3", "dflash", "gemma4-assistant"})

# Their positions are rows of a tensor (llama.cpp: pos_embd); it asserts on one that is not there.
LEARNED_POSITIONS = frozenset({"bert", "gpt2", "mpt", "starcoder"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFacts:
    """Sampling defaults from the GGUF's `general.sampling.*`; None where it has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Read once at load. `size_bytes` is the size of all tensors; counts are llama.cpp's own.
    `sampling` holds what the GGUF recommends."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_embd_out: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_swa: int
    n_params: int
    size_bytes: int
    desc: str
    ftype: str
    architecture: str
    has_encoder: bool
    has_decoder: bool
    is_recurrent: bool
    is_hybrid: bool
    is_diffusion: bool
    is_causal: bool
    vocab_only: bool
    chat_template: str | None
    metadata: dict[str, str] = field(repr=False)
    sampling: SamplingFacts

    @property
    def n_positions(self) -> int | None:
        """How many positions there are; None: as many as one likes, whatever comes of it."""
        return self.n_ctx_train if self.architecture in LEARNED_POSITIONS else None

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """The texts of its templates: the usual one, and the one for tools."""
        own = (self.chat_template, self.metadata.get("tokenizer.chat_template.tool_use"))
        return tuple(text for text in own if text)

    @property
    def unsupported(self) -> str | None:
        """Why erllama cannot run this model, or None."""
        if self.vocab_only:
            return "only its vocabulary is loaded; leave ModelOptions(vocab_only=True) out"
        if self.has_encoder and self.has_decoder:
            return "it is an encoder-decoder model"
        if self.has_encoder:
            return "it is an encoder of an encoder-decoder architecture"
        if self.is_diffusion:
            return "it is a diffusion model"
        if self.architecture in DRAFT_ARCHITECTURES:
            return "it only drafts for another model"
        return None


def read_facts(lib: Library, model: Any, vocab: Any, *, vocab_only: bool) -> ModelFacts:
    """Ask llama.cpp for everything in `ModelFacts`."""
    metadata = read_metadata(lib, model)
    template = lib.model_chat_template(model, lib.ffi.NULL)
    desc = lib.ffi.new("char[]", 256)
    lib.model_desc(model, desc, 256)
    architecture = metadata.get("general.architecture", "")
    n_layer = lib.model_n_layer(model)
    return ModelFacts(
        n_vocab=lib.vocab_n_tokens(vocab),
        n_ctx_train=lib.model_n_ctx_train(model),
        n_embd=lib.model_n_embd(model),
        n_embd_out=lib.model_n_embd_out(model),
        n_layer=n_layer,
        # llama.cpp answers for layer 0 and aborts where there is none, as with vocab_only.
        n_head=lib.model_n_head(model) if n_layer else 0,
        n_head_kv=lib.model_n_head_kv(model) if n_layer else 0,
        n_swa=lib.model_n_swa(model),
        n_params=lib.model_n_params(model),
        size_bytes=lib.model_size(model),
        desc=_text(lib, desc),
        ftype=_text(lib, lib.ftype_name(lib.model_ftype(model))),
        architecture=architecture,
        has_encoder=lib.model_has_encoder(model),
        has_decoder=lib.model_has_decoder(model),
        is_recurrent=lib.model_is_recurrent(model),
        is_hybrid=lib.model_is_hybrid(model),
        is_diffusion=lib.model_is_diffusion(model),
        is_causal=metadata.get(f"{architecture}.attention.causal", "true") != "false",
        vocab_only=vocab_only,
        chat_template=None if template == lib.ffi.NULL else _text(lib, template),
        metadata=metadata,
        sampling=read_sampling(metadata),
    )


def read_metadata(lib: Library, model: Any) -> dict[str, str]:
    """The GGUF's scalar and string entries as text; arrays are left out by llama.cpp."""
    reader = _Reader(lib)
    return {
        reader.read(lib.model_meta_key_by_index, model, i): reader.read(
            lib.model_meta_val_str_by_index, model, i
        )
        for i in range(lib.model_meta_count(model))
    }


def read_sampling(metadata: dict[str, str]) -> SamplingFacts:
    """`general.sampling.*` as numbers; what is absent, no number or not finite is None."""

    def number(key: str) -> float | None:
        try:
            value = float(metadata["general.sampling." + key])
        except (KeyError, ValueError):
            return None
        return value if math.isfinite(value) else None

    top_k = number("top_k")
    return SamplingFacts(
        temperature=number("temp"),
        top_k=None if top_k is None else int(top_k),
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
    )


class _Reader:
    """Strings through a buffer that grows to what llama.cpp says it needs."""

    def __init__(self, lib: Library) -> None:
        self._ffi = lib.ffi
        self._grow(4096)

    def _grow(self, size: int) -> None:
        self._size = size
        self._buffer = self._ffi.new("char[]", size)

    def read(self, call: Any, model: Any, i: int) -> str:
        n = call(model, i, self._buffer, self._size)
        if n >= self._size:
            self._grow(n + 1)
            n = call(model, i, self._buffer, self._size)
        text: bytes = self._ffi.buffer(self._buffer, max(n, 0))[:]
        return text.decode("utf-8", "replace")


def _text(lib: Library, chars: Any) -> str:
    raw: bytes = lib.ffi.string(chars)
    return raw.decode("utf-8", "replace")
