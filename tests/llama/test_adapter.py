"""LoRA adapters: applied per context, kept as long as somebody applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.errors import HandleClosed, InvalidConfig, LoadFailed, MalformedGguf, NotSupported
from erllama.llama import Adapter, Context, ContextParams, Model

from .support import feed, off_by, prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .support import OpenContext

    TinyGguf = Callable[[str], Path]

pytestmark = pytest.mark.model


def test_scales_change_what_the_model_says(
    tiny: Callable[[str], Model], tiny_gguf: TinyGguf, open_context: OpenContext
) -> None:
    """An adapter moves logits with its scale; without it the model is itself again, bit for bit."""
    model = tiny("dense")
    context = open_context(model)
    tokens = prompt(model, 30)

    def logits() -> object:
        context.memory.rm(0)
        return feed(context, tokens)

    plain = logits()
    with Adapter.open(model, tiny_gguf("lora")) as adapter:
        context.set_adapters([(adapter, 1.0)])
        full = logits()
        context.set_adapters([(adapter, 0.5)])
        half = logits()
        context.set_adapters([(adapter, 0.0)])
        none = logits()
        context.set_adapters([])
        assert off_by(plain, full) > 0.01  # type: ignore[arg-type]
        assert off_by(full, half) > 0.01  # type: ignore[arg-type]
        assert off_by(plain, none) == 0  # type: ignore[arg-type]
        assert off_by(plain, logits()) == 0  # type: ignore[arg-type]


def test_lifetimes(tiny_gguf: TinyGguf) -> None:
    """B8: model and adapter close "deferred" while used; everything is free when the context goes."""
    model = Model.open(tiny_gguf("dense"))
    adapter = Adapter.open(model, tiny_gguf("lora"))
    context = Context.open(model, ContextParams(n_ctx=256, n_batch=32))
    context.set_adapters([(adapter, 1.0)])
    assert adapter.close() == "deferred"
    assert model.close() == "deferred"
    with pytest.raises(HandleClosed):
        model.vocab.tokenize("x")
    with pytest.raises(HandleClosed, match="adapter"):
        context.set_adapters([(adapter, 0.5)])
    feed(context, [1, 2, 3])  # still applied
    context.close()
    assert adapter.handle.freed
    assert model.handle.freed


def test_an_adapter_keeps_its_model(tiny_gguf: TinyGguf) -> None:
    """B8: with only an adapter open the model is freed with it."""
    model = Model.open(tiny_gguf("dense"))
    adapter = Adapter.open(model, tiny_gguf("lora"))
    assert model.close() == "deferred"
    assert adapter.close() == "freed"
    assert model.handle.freed
    with pytest.raises(HandleClosed):
        Adapter.open(model, tiny_gguf("lora"))


def test_adapters_of_other_models(
    tiny: Callable[[str], Model], tiny_gguf: TinyGguf, open_context: OpenContext
) -> None:
    """An adapter is refused for another architecture, and by a context of another model."""
    with pytest.raises(LoadFailed):
        Adapter.open(tiny("recurrent"), tiny_gguf("lora"))
    context = open_context(tiny("window"))
    with Adapter.open(tiny("dense"), tiny_gguf("lora")) as adapter, pytest.raises(NotSupported):
        context.set_adapters([(adapter, 1.0)])


def test_files_that_are_no_adapter(tiny: Callable[[str], Model], tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """Absent, damaged and wrong files are typed errors, and the model lives on."""
    model = tiny("dense")
    with pytest.raises(InvalidConfig):
        Adapter.open(model, tmp_path / "absent.gguf")
    (tmp_path / "junk.gguf").write_bytes(b"junk")
    with pytest.raises(MalformedGguf):
        Adapter.open(model, tmp_path / "junk.gguf")
    whole = tiny_gguf("lora").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    for path in (tmp_path / "short.gguf", tiny_gguf("dense")):
        with pytest.raises(LoadFailed):
            Adapter.open(model, path)
    assert model.vocab.tokenize("x")
