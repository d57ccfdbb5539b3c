"""Memory is estimated before it is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from erllama.errors import ModelWouldOom
from erllama.llama import Context, ContextParams, estimate, sizing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from erllama.llama import Model

    from .support import OpenContext

pytestmark = pytest.mark.model

MIB = 2**20


@pytest.mark.parametrize("n_ctx", [2**31 - 257, 1_000_000_000])
def test_enormous_contexts_are_refused(smollm2: Model, n_ctx: int) -> None:
    """X29: a context that no machine here holds is model_would_oom, with the figures, at once."""
    with pytest.raises(ModelWouldOom, match="GiB may be used; choose a smaller n_ctx") as caught:
        Context.open(smollm2, ContextParams(n_ctx=n_ctx))
    detail = caught.value.detail
    assert isinstance(detail, dict)
    assert detail["kv_bytes"] > detail["available_bytes"]
    assert smollm2.vocab.tokenize("still here")


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_the_cheap_estimate_is_an_upper_bound(
    tiny: Callable[[str], Model], open_context: OpenContext, kind: str
) -> None:
    """Without loading anything the KV cache is never estimated below what it is."""
    model = tiny(kind)
    for n_ctx in (256, 2048):
        context = open_context(model, n_ctx=n_ctx)
        assert estimate(model, context.params).kv_bytes >= context.memory_bytes.kv_bytes


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_measured_estimate_is_close(
    request: pytest.FixtureRequest, open_context: OpenContext, name: str
) -> None:
    """Extrapolating two small contexts meets the real one within a hundredth, windows included."""
    model: Model = request.getfixturevalue(name)
    params = ContextParams(n_ctx=8192, n_seq_max=2)
    with model.handle as ptr:
        measured = sizing._measured(model, params, ptr, 2**60)
    assert measured is not None
    real = open_context(model, n_ctx=8192, n_batch=512, n_seq_max=2).memory_bytes
    cells = 8192 * sizing.CELL_BYTES
    assert measured.kv_bytes - cells == pytest.approx(real.kv_bytes, rel=0.01)
    assert measured.compute_bytes == pytest.approx(real.compute_bytes, rel=0.01)


def test_measuring_decides_close_calls(gemma: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window model whose upper bound does not fit but whose real size does is let through."""
    params = ContextParams(n_ctx=16384)
    bound = estimate(gemma, params).total_bytes
    monkeypatch.setattr(sizing, "available_bytes", lambda: int(bound * 0.6))
    with Context.open(gemma, params) as context:
        assert context.memory_bytes.total_bytes < bound * 0.5
    monkeypatch.setattr(sizing, "available_bytes", lambda: int(bound * 0.1))
    with pytest.raises(ModelWouldOom):
        Context.open(gemma, params)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", 1000), ("700", "300", 400), ("junk", "1", 1000), (None, None, 1000)],
)
def test_a_cgroup_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, used: str, expected: int
) -> None:
    """What may still be used is the machine's free memory, or what the cgroup leaves of it."""
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
    monkeypatch.setattr(sizing, "CGROUP", tmp_path)
    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert sizing.available_bytes() == expected
