"""The shape of a context, and its native parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from erllama.errors import InvalidOption, NotSupported

if TYPE_CHECKING:
    from erllama.options import KvType, Pooling

    from .facts import ModelFacts
    from .ffi import Library

FLASH_ATTN = {True: "enabled", False: "disabled", "auto": "auto"}
MAX_THREADS = 512  # ggml.h: GGML_MAX_N_THREADS
MAX_SEQ = 256  # llama-cparams.h: LLAMA_MAX_SEQ
N_CTX_PAD = 256  # llama-context.cpp pads n_ctx, and n_ctx_seq, to this


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """Everything one `llama_context` is opened with; the caller has resolved all defaults.

    `n_ctx` counts cells for all sequences together. `n_outputs_max` bounds the rows of one decode
    whose logits are kept, and with them the compute buffer; at least `n_seq_max` are reserved, and
    contexts for embeddings keep every row. `n_ubatch=None` means `n_batch`; for embeddings it is
    rounded down to a multiple of `n_seq_max`.
    """

    n_ctx: int = 2048
    n_batch: int = 512
    n_ubatch: int | None = None
    n_seq_max: int = 1
    n_outputs_max: int = 8
    n_threads: int = 1
    n_threads_batch: int | None = None
    flash_attn: bool | Literal["auto"] = "auto"
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    kv_unified: bool = True
    embeddings: bool = False
    pooling: Pooling | None = None
    swa_full: bool = False

    def check(self, facts: ModelFacts) -> None:
        """Refuse what llama.cpp would assert on or cannot do. Raises: `InvalidOption`, `NotSupported`."""
        reason = facts.unsupported
        if reason is not None:
            raise NotSupported(
                f"this model cannot run: {reason}", detail={"architecture": facts.architecture}
            )
        for name, low, high in (
            ("n_ctx", 1, 2**31 - N_CTX_PAD), ("n_batch", 1, 2**31 - 1), ("n_ubatch", 1, 2**31 - 1),
            ("n_seq_max", 1, MAX_SEQ), ("n_outputs_max", 1, 2**31 - 1), ("n_threads", 1, MAX_THREADS),
            ("n_threads_batch", 1, MAX_THREADS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low, high)
        if self.n_rows < 1:
            raise InvalidOption(
                f"ContextParams.n_seq_max={self.n_seq_max}: an embedding context needs n_batch, n_ubatch and "
                f"n_ctx of at least as many rows",
                detail={"key": "n_seq_max", "value": self.n_seq_max},
            )
        quantised_v = self.type_v not in ("f16", "f32", "bf16")
        if quantised_v and self.flash_attn is False:
            raise NotSupported(f"type_v={self.type_v!r} needs flash attention", detail={"key": "type_v"})

    @property
    def n_rows(self) -> int:
        """The native n_ubatch.

        For embeddings a multiple of `n_seq_max`: llama.cpp reserves its graph with the rows rounded up
        to one, but with as many outputs as n_ubatch, and mean pooling asserts that these are equal.
        """
        n = min(self.n_ubatch or self.n_batch, self.n_batch)
        return min(n, self.n_ctx) // self.n_seq_max * self.n_seq_max if self.embeddings else n

    @property
    def n_outputs(self) -> int:
        """The rows with outputs that one decode may really have."""
        return self.n_batch if self.embeddings else min(max(self.n_outputs_max, self.n_seq_max), self.n_batch)

    def native(self, lib: Library) -> Any:
        """`struct llama_context_params`, by value."""
        params = lib.context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = self.n_batch
        params.n_ubatch = self.n_rows
        params.n_seq_max = self.n_seq_max
        params.n_outputs_max = max(self.n_outputs, self.n_seq_max)
        params.n_threads = self.n_threads
        params.n_threads_batch = self.n_threads_batch or self.n_threads
        params.flash_attn_type = lib.constant("LLAMA_FLASH_ATTN_TYPE", FLASH_ATTN[self.flash_attn])
        params.type_k = lib.constant("GGML_TYPE", self.type_k)
        params.type_v = lib.constant("GGML_TYPE", self.type_v)
        params.kv_unified = self.kv_unified
        params.embeddings = self.embeddings
        params.pooling_type = lib.constant("LLAMA_POOLING_TYPE", self.pooling or "unspecified")
        params.swa_full = self.swa_full
        params.no_perf = True
        return params


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raises: `InvalidOption` for a value outside [low, high]."""
    if not low <= value <= high:
        raise InvalidOption(
            f"ContextParams.{name}={value}: expected {low} to {high}", detail={"key": name, "value": value}
        )
