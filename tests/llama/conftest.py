"""Models loaded once per session, and contexts that are closed with their test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.llama import Context, ContextParams, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    """SmolLM2-135M: dense."""
    with Model.open(smollm2_path) as model:
        yield model


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Iterator[Model]:
    """gemma-3-270m: sliding windows of 512 tokens."""
    with Model.open(gemma_path) as model:
        yield model


@pytest.fixture(scope="session")
def tiny(tiny_gguf: Callable[[str], Path]) -> Iterator[Callable[[str], Model]]:
    """Kind → loaded tiny model."""
    loaded: dict[str, Model] = {}

    def open_tiny(kind: str) -> Model:
        if kind not in loaded:
            loaded[kind] = Model.open(tiny_gguf(kind))
        return loaded[kind]

    yield open_tiny
    for model in loaded.values():
        model.close()


@pytest.fixture
def open_context() -> Iterator[Callable[..., Context]]:
    """`open_context(model, n_ctx=…)`: a context that is closed when the test ends."""
    opened: list[Context] = []

    def open_one(model: Model, **params: object) -> Context:
        values = {"n_ctx": 512, "n_batch": 256, "n_seq_max": 3, "n_threads": 1, **params}
        context = Context.open(model, ContextParams(**values))  # type: ignore[arg-type]
        opened.append(context)
        return context

    yield open_one
    for context in opened:
        context.close()
