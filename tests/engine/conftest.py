"""Backends of tiny models, opened for one test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .parts_scenes import KINDS, Apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .parts_scenes import OpenApart


@pytest.fixture
def open_apart(tiny_gguf: Callable[[str], Path]) -> Iterator[OpenApart]:
    """`open_apart(kind_or_path, n_ctx=…)`: opened, and closed with the test."""
    opened: list[Apart] = []

    def open_one(kind: str | Path, **options: object) -> Apart:
        opened.append(Apart(tiny_gguf(kind) if isinstance(kind, str) else kind, **options))
        return opened[-1]

    yield open_one
    for apart in opened:
        apart.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tiny model."""
    return str(request.param)
