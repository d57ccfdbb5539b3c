"""Decode a tiny model with one CPU variant, and say through the exit code whether that works.

Run as a file in a child process, `python selftest.py NATIVE_DIR VARIANT`, because a variant that the
machine cannot run kills its process. Imports nothing of erllama: the build runs it before there is an
installed package. Also `python selftest.py --score VARIANT`: ggml's own rating of a variant on this
CPU, 0 if it does not apply.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

MODEL_NAME = "selftest.gguf"
N_PROMPT = 96  # one batch of at least 64 rows: the widest class of CPU kernels starts there
N_SINGLE = 4
# The same tokens through wide and through single-row kernels; their sums round differently, no more.
MIN_COSINE = 0.99


class SelfTestFailed(Exception):
    """The variant ran, and what it computed is wrong."""


def load_binding(native_dir: Path) -> Any:
    """The compiled binding module of a native folder, by its file."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    found = [p for p in native_dir.iterdir() if p.name.endswith(suffixes) and not p.name.startswith("lib")]
    if len(found) != 1:
        raise SelfTestFailed(f"{native_dir} holds {len(found)} binding modules instead of one")
    name = found[0].name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, found[0])
    if spec is None or spec.loader is None:
        raise SelfTestFailed(f"{found[0]} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SelfTest:
    """One model and context on one variant; call `run()`."""

    def __init__(self, native_dir: Path, variant: Path) -> None:
        binding = load_binding(native_dir)
        self._ffi, self._lib = binding.ffi, binding.lib
        self._error = self._ffi.new("struct el_error *")
        self._model_path = str(native_dir / MODEL_NAME).encode()
        self._variant = str(variant).encode()

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._lib, name)(*args, self._error)
        if self._error.kind:
            raise SelfTestFailed(f"{name}: {self._ffi.string(self._error.message).decode(errors='replace')}")
        return result

    def run(self) -> None:
        """Decode a prompt in one batch, then its end again row by row, and compare.

        Raises: SelfTestFailed if a call fails, a logit is not finite, or the two ways disagree.
        """
        linked_in = self._call("el_ggml_backend_dev_count") > 0  # a native build
        if not linked_in and self._call("el_ggml_backend_load", self._variant) == self._ffi.NULL:
            raise SelfTestFailed("the variant could not be loaded")
        self._call("el_backend_init")
        progress = self._ffi.new("struct el_load_progress *")
        params = self._call("el_model_default_params")
        model = self._call("el_model_load", self._model_path, params, progress)
        if model == self._ffi.NULL:
            raise SelfTestFailed("the self-test model could not be loaded")
        self._n_vocab = 256
        tokens = [(37 * i + 11) % self._n_vocab for i in range(N_PROMPT)]
        together = self._last_logits(model, [tokens])
        head, tail = tokens[:-N_SINGLE], tokens[-N_SINGLE:]
        apart = self._last_logits(model, [head, *([token] for token in tail)])
        self._call("el_model_free", model)
        check(together, apart)

    def _last_logits(self, model: Any, batches: list[list[int]]) -> list[float]:
        """Logits after the last token of the last batch, each batch being one decode."""
        params = self._call("el_context_default_params")
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 256, 256, 256, 1
        params.n_threads = params.n_threads_batch = 2
        context = self._call("el_init_from_model", model, params)
        if context == self._ffi.NULL:
            raise SelfTestFailed("no context could be made")
        n_past = 0
        for tokens in batches:
            self._decode(context, tokens, n_past)
            n_past += len(tokens)
        row = self._call("el_get_logits_ith", context, -1)
        if row == self._ffi.NULL:
            raise SelfTestFailed("the decode left no logits")
        logits = list(self._ffi.unpack(row, self._n_vocab))
        self._call("el_free", context)
        return logits

    def _decode(self, context: Any, tokens: list[int], n_past: int) -> None:
        ffi, n = self._ffi, len(tokens)
        batch = ffi.new("struct llama_batch *")
        seq_id = ffi.new("llama_seq_id[1]", [0])
        kept = (
            ffi.new("llama_token[]", tokens),
            ffi.new("llama_pos[]", list(range(n_past, n_past + n))),
            ffi.new("int32_t[]", [1] * n),
            ffi.new("llama_seq_id *[]", [seq_id] * n),
            ffi.new("int8_t[]", [0] * (n - 1) + [1]),
        )
        batch.n_tokens = n
        batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits = kept
        if code := self._call("el_decode", context, batch[0]):
            raise SelfTestFailed(f"llama_decode answered {code}")


def check(together: list[float], apart: list[float]) -> None:
    """Compare the logits of the two ways.

    Raises: SelfTestFailed if one is not finite or they differ by more than rounding.
    """
    if not all(map(math.isfinite, (*together, *apart))):
        raise SelfTestFailed("a logit is not finite")
    dot = sum(a * b for a, b in zip(together, apart, strict=True))
    norm = math.sqrt(sum(a * a for a in together) * sum(b * b for b in apart))
    if norm == 0.0 or dot / norm < MIN_COSINE:
        raise SelfTestFailed(f"batched and single rows disagree (cosine {dot / norm if norm else 0.0:.3f})")


def score(variant: Path) -> int:
    """ggml's rating of a variant on this CPU; 0: not usable. A lone CPU library without rating counts 1."""
    library = ctypes.CDLL(str(variant))
    try:
        return int(library.ggml_backend_score())
    except AttributeError:
        return 1


def main(arguments: list[str]) -> int:
    """The command line; prints the reason of a failure, or the score."""
    first, second = arguments
    if first == "--score":
        print(score(Path(second)))
        return 0
    try:
        SelfTest(Path(first), Path(second)).run()
    except SelfTestFailed as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
