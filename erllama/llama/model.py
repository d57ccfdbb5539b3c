"""Loaded weights: opening them, what they say, and when they are really freed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from erllama.errors import (
    InvalidOption,
    LoadCancelled,
    LoadFailed,
    MalformedGguf,
    NotSupported,
)
from erllama.files import checked_path
from erllama.options import ModelOptions

from . import logs
from .backend import ensure_backend
from .facts import ModelFacts, read_facts
from .gguf_check import check_gguf
from .handle import Closed, Shared
from .vocab import Vocab

if TYPE_CHECKING:
    from .ffi import Library
    from .memory import MemoryKind

# What llama.cpp logs when the file itself is at fault.
FILE_FAULTS = (
    "invalid magic", "gguf_init", "corrupted or incomplete", "not within the file bounds", "missing tensor",
    "wrong number of tensors", "check_tensor_dims", "duplicate", "key not found", "model hyperparameters",
    "model vocabulary", "invalid split", "illegal split", "failed to read", "reached end of file",
    "no tensors", "cannot find tokenizer", "invalid tensor",
    "tensor data", "unknown type", "read error", "is out of bounds", "failed to load gguf",
)  # fmt: skip
SPLIT_SUFFIX = r"-\d{5}-of-\d{5}\.gguf"  # llama.cpp: llama_split_path
MEMORY_FAULTS = ("bad_alloc", "unable to allocate", "failed to allocate", "out of memory", "alloc failed")


class LoadProgress:
    """Shared with a load in progress: `fraction` is read, `cancel()` may be called, from any thread."""

    def __init__(self) -> None:
        self._fields: Any = None
        self._cancelled = False

    def attach(self, lib: Library) -> Any:
        """The native struct the load writes to."""
        self._fields = lib.ffi.new("struct el_load_progress *")
        self._fields.cancel = int(self._cancelled)
        return self._fields

    @property
    def fraction(self) -> float:
        """0.0 to 1.0, of the bytes to load."""
        return 0.0 if self._fields is None else float(self._fields.fraction)

    def cancel(self) -> None:
        """Make the load fail with `LoadCancelled` at its next step."""
        self._cancelled = True
        if self._fields is not None:
            self._fields.cancel = 1


class Model:
    """Weights and vocabulary. Use as a context manager, or `close()` it.

    Contexts and adapters keep the weights: closing a model while some are open answers "deferred",
    and the memory is freed with the last of them. A closed model does not tokenize.
    """

    def __init__(
        self, lib: Library, ptr: Any, path: str, options: ModelOptions, keep: tuple[Any, ...]
    ) -> None:
        self.lib = lib
        # keep: the tensor split, which llama.cpp aliases for the model's whole life
        self.handle = Shared(lib, ptr, "model_free", "model", keep=keep)
        self.path = path
        self.options = options
        vocab_ptr = lib.model_get_vocab(ptr)
        self.facts: ModelFacts = read_facts(lib, ptr, vocab_ptr, vocab_only=options.vocab_only)
        self.vocab = Vocab(lib, self.handle, vocab_ptr)
        self.memory_kinds: dict[tuple[bool, bool], MemoryKind] = {}  # what probe.py found, by layout

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        options: ModelOptions | None = None,
        *,
        progress: LoadProgress | None = None,
    ) -> Model:
        """Load a GGUF (all its parts). Blocks for as long as reading takes; the GIL is released.

        Raises: `InvalidConfig` (no such file), `MalformedGguf`, `NotSupported` (unknown architecture,
        no weights), `LoadCancelled`, `LoadFailed` with llama.cpp's last log lines, `NativeLibraryError`.
        Thread: any but the event loop's.
        """
        options = options or ModelOptions()
        text = checked_path(path)
        check_gguf(text, vocab_only=options.vocab_only)
        lib = ensure_backend()
        progress = progress or LoadProgress()
        fields = progress.attach(lib)
        params, keep = native_params(lib, options)
        with logs.captured(lib) as log:
            _refuse_what_aborts(lib, text, options)
            ptr = lib.model_load(os.fsencode(text), params, fields)
        if ptr == lib.ffi.NULL:
            raise _classified(text, log, cancelled=bool(fields.cancelled))
        return cls(lib, ptr, text, options, keep)

    def __repr__(self) -> str:
        return f"<Model {os.path.basename(self.path)}: {'closed' if self.closed else self.facts.desc}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> Closed:
        """Refuse further use; "freed", or "deferred" while contexts or adapters are open. Idempotent."""
        return self.handle.close()

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self.handle.closed


def _refuse_what_aborts(lib: Library, path: str, options: ModelOptions) -> None:
    fault = lib.ffi.new("struct el_gguf_fault *")
    if not lib.gguf_check(os.fsencode(path), options.vocab_only, fault):
        said = lib.ffi.string(fault.message).decode("utf-8", "replace")
        raise MalformedGguf(f"{path}: {said}", detail={"path": path})


def native_params(lib: Library, options: ModelOptions) -> tuple[Any, tuple[Any, ...]]:
    """`struct llama_model_params` for the options, and what has to live as long as the model."""
    params = lib.model_default_params()
    params.n_gpu_layers = options.n_gpu_layers
    params.split_mode = lib.constant("LLAMA_SPLIT_MODE", options.split_mode)
    params.main_gpu = options.main_gpu
    params.load_mode = lib.constant("LLAMA_LOAD_MODE", options.resolved_load_mode)
    params.vocab_only = options.vocab_only
    if not options.tensor_split:
        return params, ()
    n_max = max(lib.max_devices(), len(options.tensor_split))
    if len(options.tensor_split) > lib.max_devices():
        raise InvalidOption(f"ModelOptions.tensor_split: at most {lib.max_devices()} devices in this build")
    split = lib.ffi.new("float[]", n_max)  # zero-filled
    split[0 : len(options.tensor_split)] = list(options.tensor_split)
    params.tensor_split = split
    return params, (split,)


def _classified(path: str, log: logs.CapturedLog, *, cancelled: bool) -> Exception:
    detail = {"path": path, "log": log.errors[-8:]}
    if cancelled:
        return LoadCancelled(f"{path}: the load was cancelled", detail=detail)
    text = _without_path(" ".join(log.errors), path)
    said = log.tail()
    if "unknown model architecture" in text:
        name = text.split("unknown model architecture:", 1)[-1].split("'")
        architecture = name[1] if len(name) > 2 else "?"
        detail["architecture"] = architecture
        return NotSupported(
            f"{path}: llama.cpp does not know the architecture {architecture!r}", detail=detail
        )
    if "CLIP cannot be used as main model" in text:
        return NotSupported(f"{path} is a projector for images, not a language model", detail=detail)
    if any(sign in text for sign in MEMORY_FAULTS):
        return LoadFailed(f"{path}: not enough memory: {said}", reason="oom", detail=detail)
    if any(sign in text for sign in FILE_FAULTS):
        return MalformedGguf(f"{path}: {said}", detail=detail)
    return LoadFailed(f"{path}: {said}", detail=detail)


def _without_path(text: str, path: str) -> str:
    """What llama.cpp said without the names of the file and its other parts: folders have words too."""
    stem = re.escape(re.sub(SPLIT_SUFFIX + "$", "", path))
    return re.sub(rf"(?<![\w./-]){stem}({SPLIT_SUFFIX})?(?![\w./-])", "", text)
