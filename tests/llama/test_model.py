"""Loading, facts, refusals and the two-stage lifetime of models."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from erllama.errors import (
    ErllamaError,
    HandleClosed,
    InvalidConfig,
    InvalidOption,
    LoadCancelled,
    MalformedGguf,
    NotSupported,
)
from erllama.llama import (
    Adapter,
    Batch,
    Context,
    ContextParams,
    LoadProgress,
    Model,
    SamplerChain,
    SamplerParams,
)
from erllama.llama.ffi import library
from erllama.llama.model import native_params
from erllama.options import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    TinyGguf = Callable[[str], Path]

pytestmark = pytest.mark.model


def test_facts_of_a_real_model(smollm2: Model, smollm2_path: Path) -> None:
    """B18: size close to the file's, layers and heads as the GGUF says, template and metadata there."""
    facts = smollm2.facts
    assert 0.9 < facts.size_bytes / smollm2_path.stat().st_size <= 1
    assert facts.n_layer == int(facts.metadata["llama.block_count"]) == 30
    assert (facts.n_embd, facts.n_head, facts.n_head_kv, facts.n_vocab) == (576, 9, 3, 49152)
    assert facts.architecture == "llama"
    assert facts.ftype == "Q4_1"
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template
    assert facts.n_swa == 0
    assert not facts.is_recurrent
    assert facts.unsupported is None


def test_facts_of_the_tiny_kinds(tiny: Callable[[str], Model]) -> None:
    """Windows, recurrent and hybrid models say what they are."""
    assert tiny("window").facts.n_swa == 64
    assert tiny("recurrent").facts.is_recurrent
    assert tiny("hybrid").facts.is_hybrid
    assert not tiny("dense").facts.is_recurrent


def test_sampling_defaults_come_from_the_file() -> None:
    """`general.sampling.*` is read as numbers; nonsense counts as absent."""
    from erllama.llama.facts import SamplingFacts, read_sampling

    found = read_sampling(
        {
            "general.sampling.temp": "0.6",
            "general.sampling.top_k": "20",
            "general.sampling.top_p": "nan",
            "general.sampling.min_p": "much",
        }
    )
    assert found == SamplingFacts(temperature=0.6, top_k=20)


@pytest.mark.parametrize("n_bytes", [10, 24, 100, 5_000, 300_000])
def test_truncated_files(tiny_gguf: TinyGguf, tmp_path: Path, n_bytes: int) -> None:
    """A file that ends too early is malformed_gguf, wherever it ends."""
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_gguf("dense").read_bytes()[:n_bytes])
    with pytest.raises(MalformedGguf) as caught:
        Model.open(path)
    assert str(path) in str(caught.value)


def test_random_bytes(tmp_path: Path) -> None:
    """Noise behind a valid header is malformed_gguf."""
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes([5] + [0] * 7) * 2 + os.urandom(4096))
    with pytest.raises(MalformedGguf):
        Model.open(path)


def test_a_token_that_is_there_twice(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """One changed byte of the vocabulary can make two tokens equal: llama.cpp would abort on that."""
    raw = tiny_gguf("dense").read_bytes()

    def entry(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    first, second = entry(b"!") + entry(b'"'), entry(b"!") + entry(b"!")
    assert raw.count(first) == 1
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw.replace(first, second))
    with pytest.raises(MalformedGguf, match="twice"):
        Model.open(path)


@pytest.mark.parametrize("path", ["/nowhere/model.gguf", b"/nowhere", "a\0b.gguf", "", "a\ud800.gguf"])
def test_impossible_paths(path: Any) -> None:
    """Absent files and what cannot be a path are invalid_config."""
    with pytest.raises(InvalidConfig):
        Model.open(path)


def test_unknown_architecture_is_named(tiny_gguf: TinyGguf) -> None:
    """X29: an architecture that llama.cpp lacks is not_supported, by its name."""
    with pytest.raises(NotSupported, match="architecture '") as caught:
        Model.open(tiny_gguf("unknown_arch"))
    assert isinstance(caught.value.detail, dict)
    assert caught.value.detail["architecture"] in str(caught.value)


@pytest.mark.parametrize("kind", ["encdec", "diffusion"])
def test_models_that_cannot_run_say_so(tiny: Callable[[str], Model], kind: str) -> None:
    """X29: encoder-decoder and diffusion models load, and no context is made of them."""
    model = tiny(kind)
    assert model.facts.unsupported
    with pytest.raises(NotSupported, match=kind[:3]):
        Context.open(model, ContextParams())


@pytest.mark.parametrize("architecture", ["eagle3", "dflash"])
def test_draft_only_models_say_so(smollm2: Model, architecture: str) -> None:
    """X29: what only drafts for another model is not run alone."""
    facts = dataclasses.replace(smollm2.facts, architecture=architecture)
    with pytest.raises(NotSupported, match="drafts for another model"):
        ContextParams().check(facts)


def test_vocabulary_only(tiny_gguf: TinyGguf) -> None:
    """X29: with `vocab_only` a model tokenizes and makes no context; a file without weights needs it."""
    with Model.open(tiny_gguf("dense"), ModelOptions(vocab_only=True)) as model:
        assert model.vocab.tokenize("a b")
        with pytest.raises(NotSupported, match="vocabulary"):
            Context.open(model, ContextParams())
    with pytest.raises(NotSupported, match="no weights"):
        Model.open(tiny_gguf("vocab"))
    with Model.open(tiny_gguf("vocab"), ModelOptions(vocab_only=True)) as model:
        assert model.vocab.n_tokens > 0


def test_split_files_load_whole(tiny_gguf: TinyGguf, tiny: Callable[[str], Model]) -> None:
    """X29: the first part of a split GGUF loads all of it."""
    with Model.open(tiny_gguf("split")) as model:
        assert model.facts.n_params == tiny("dense").facts.n_params


def test_missing_part_of_a_split(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """A split whose second part is gone is a typed error."""
    first = tiny_gguf("split")
    shutil.copy(first, tmp_path / first.name)
    with pytest.raises(ErllamaError) as caught:
        Model.open(tmp_path / first.name)
    assert caught.value.reason in {"malformed_gguf", "load_failed"}


def test_words_in_the_path_mean_nothing(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """A missing part below a folder called like an error is classified as anywhere else."""
    first = tiny_gguf("split")
    reasons = []
    for name in ("plain", "out of memory", "duplicate"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(first, folder / first.name)
        with pytest.raises(ErllamaError) as caught:
            Model.open(folder / first.name)
        reasons.append(caught.value.reason)
    assert len(set(reasons)) == 1
    assert reasons[0] != "oom"


def test_parallel_failures_keep_their_reasons(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """M5: two bad files, loaded side by side 200 times each: each failure names its own file and fault."""
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_gguf("dense").read_bytes()[:300_000])
    expected = {tiny_gguf("unknown_arch"): "not_supported", short: "malformed_gguf"}
    seen: Counter[tuple[Path, str]] = Counter()

    def load(path: Path) -> None:
        for _ in range(100):
            with pytest.raises(ErllamaError, match=re.escape(str(path))) as caught:
                Model.open(path)
            seen[path, caught.value.reason] += 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(load, path) for path in [*expected, *expected]]:
            done.result()
    assert seen == dict.fromkeys(expected.items(), 200)


def test_progress_and_cancel(smollm2_path: Path) -> None:
    """A load reports how far it is, and a cancelled one is a typed error that leaves nothing."""
    progress = LoadProgress()
    assert progress.fraction == 0.0
    with Model.open(smollm2_path, progress=progress):
        assert progress.fraction == 1.0
    cancelled = LoadProgress()
    cancelled.cancel()
    with pytest.raises(LoadCancelled) as caught:
        Model.open(smollm2_path, progress=cancelled)
    assert caught.value.reason == "load_cancelled"
    assert cancelled.fraction < 1.0


def test_deferred_close(tiny_gguf: TinyGguf) -> None:
    """B8: with a context open closing answers "deferred", refuses tokenizing, and frees with the context."""
    model = Model.open(tiny_gguf("dense"))
    context = Context.open(model, ContextParams(n_ctx=256, n_batch=64))
    assert model.close() == "deferred"
    for use in (lambda: model.vocab.tokenize("x"), lambda: model.vocab.detokenize([1])):
        with pytest.raises(HandleClosed, match="model is closed"):
            use()
    with pytest.raises(HandleClosed):
        Context.open(model, ContextParams())
    batch = Batch(4)
    batch.add(0, [1, 2], 0)
    assert context.decode(batch) == 0  # the context goes on
    assert not model.handle.freed
    context.close()
    assert model.handle.freed
    assert model.close() == "freed"


def test_nobody_closed_anything(tiny_gguf: TinyGguf) -> None:
    """Handles that were only dropped are freed, in a cycle with everything else too, in any order."""
    for _ in range(5):
        model = Model.open(tiny_gguf("dense"))
        context = Context.open(model, ContextParams(n_ctx=256, n_batch=64))
        adapter = Adapter.open(model, tiny_gguf("lora"))
        context.set_adapters([(adapter, 1.0)])
        sampler = SamplerChain(model.vocab, SamplerParams())
        owned = [each.handle.owned for each in (model, context, adapter, sampler)]
        everything: list[object] = [adapter, context, model, sampler]
        everything.append(everything)
        for each in everything[:4]:
            each.cycle = everything  # type: ignore[attr-defined]
        del model, context, adapter, sampler, everything, each
        gc.collect()
        assert all(each.freed for each in owned)


def test_tokenizing_while_another_thread_closes(tiny_gguf: TinyGguf) -> None:
    """B7: threads tokenize while one closes: right answers or `freed`, never a crash."""
    for _ in range(20):
        model = Model.open(tiny_gguf("dense"))
        expected = model.vocab.tokenize("some words to split")
        refused: list[str] = []

        def hammer(
            model: Model = model, expected: list[int] = expected, refused: list[str] = refused
        ) -> None:
            try:
                while True:
                    assert model.vocab.tokenize("some words to split") == expected
            except HandleClosed as error:
                refused.append(error.reason)

        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        model.close()
        for thread in threads:
            thread.join()
        assert refused == ["freed"] * 3
        assert model.handle.freed


@pytest.mark.parametrize(
    ("options", "native"),
    [
        ({}, -1),
        ({"use_mmap": True}, 1),
        ({"use_mmap": False}, 0),
        ({"use_mlock": True}, 3),
        ({"use_mlock": False}, 1),
        ({"use_mmap": True, "use_mlock": True}, 3),
        ({"use_mmap": True, "use_mlock": False}, 1),
        ({"use_mmap": False, "use_mlock": True}, 2),
        ({"use_mmap": False, "use_mlock": False}, 0),
        ({"load_mode": "direct_io"}, 4),
        ({"load_mode": "mlock"}, 2),
    ],
)
def test_load_mode_lands(options: dict[str, object], native: int) -> None:
    """B12: every boolean pair and every explicit mode gives the expected upstream load mode."""
    params, _ = native_params(library(), ModelOptions(**options))
    assert params.load_mode == native


def test_gpu_settings_land() -> None:
    """B10: split mode, main GPU and layers reach the native params; a short split is zero-filled to 16."""
    params, keep = native_params(
        library(), ModelOptions(split_mode="row", main_gpu=2, n_gpu_layers=-1, tensor_split=[0.5])
    )
    assert (params.split_mode, params.main_gpu, params.n_gpu_layers) == (2, 2, -1)
    (split,) = keep
    assert len(split) == library().max_devices() == 16
    gc.collect()
    assert list(params.tensor_split[0:16]) == [0.5] + [0.0] * 15


def test_bad_settings_are_refused_before_loading() -> None:
    """B10, B11: 17 shares or an unknown split mode raise before anything is loaded."""
    for options in ({"tensor_split": [1.0] * 17}, {"split_mode": "diagonal"}):
        with pytest.raises(InvalidOption):
            ModelOptions(**options)
