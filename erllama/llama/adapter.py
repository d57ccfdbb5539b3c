"""LoRA adapters: loaded for one model, applied per context with a scale."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from erllama.errors import LoadFailed
from erllama.files import checked_path

from . import logs
from .gguf_check import check_gguf
from .handle import Closed, Shared

if TYPE_CHECKING:
    from .model import Model


class Adapter:
    """One adapter. Use as a context manager, or `close()` it; keeps its model alive.

    Contexts that apply it keep it: closing answers "deferred" until they let go.
    """

    def __init__(self, model: Model, ptr: Any, path: str) -> None:
        self.model = model
        self.path = path
        self.handle = Shared(model.lib, ptr, "adapter_lora_free", "adapter", model.handle.owned)

    @classmethod
    def open(cls, model: Model, path: str | os.PathLike[str]) -> Adapter:
        """Load a LoRA GGUF made for this model. Blocks.

        Raises: `InvalidConfig` (no such file), `MalformedGguf`, `LoadFailed` with llama.cpp's words
        (an adapter of another model, say), `HandleClosed`.
        """
        text = checked_path(path)
        check_gguf(text)
        lib = model.lib
        with model.handle as model_ptr:
            with logs.captured(lib) as log:
                ptr = lib.adapter_lora_init(model_ptr, os.fsencode(text))
            if ptr == lib.ffi.NULL:
                raise LoadFailed(f"{text}: {log.tail()}", detail={"path": text, "log": log.errors[-8:]})
            return cls(model, ptr, text)

    def __repr__(self) -> str:
        return f"<Adapter {os.path.basename(self.path)}{' closed' if self.handle.closed else ''}>"

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> Closed:
        """Free it, or have the last context that applies it do so. Idempotent."""
        return self.handle.close()
