"""The trial behind `exact="cold"`: how far it reaches, what it sees, what of it is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from erllama.engine.cold_probe import ColdProbe
from erllama.engine.window_places import WindowPlaces, ring_size
from erllama.llama import saved_state
from erllama.machine import usable_cpus

if TYPE_CHECKING:
    from pathlib import Path

    from .parts_scenes import Apart, OpenApart

pytestmark = pytest.mark.model

PIECE = 256
two_cores = pytest.mark.skipif(usable_cpus() < 2, reason="more threads than cores are cut")
SHAPE = {"n_ctx": 2048, "n_batch": 512, "n_seq_max": 1}  # 768 window cells


def probe_of(apart: Apart) -> ColdProbe:
    """Of a context that keeps places whatever it costs."""
    backend, context = apart.backend, apart.backend._live_context()
    backend.clear_abort()
    assert backend._parts is not None
    assert backend._batch is not None
    backend._parts.exact = True
    return ColdProbe(context, backend._batch, PIECE, context.n_ctx_seq, backend._parts, apart.layout)


@pytest.mark.parametrize("n_threads", [1, pytest.param(2, marks=two_cores)])
def test_it_passes(open_apart: OpenApart, tmp_path: Path, kind: str, n_threads: int) -> None:
    """Every kind of memory; memory is empty again."""
    apart = open_apart(kind, **SHAPE, n_threads=n_threads)
    assert probe_of(apart).failure(tmp_path / "verdict") is None
    assert (tmp_path / "verdict").exists()
    assert apart.backend.is_at(0, 0)


@two_cores
@pytest.mark.parametrize("kind", ["window", "hybrid_window"])
def test_it_reaches_where_a_window_ring_has_started_over(
    open_apart: OpenApart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A restore that leaves the rest of the ring empty has other bits on two threads: that is seen."""
    apart = open_apart(kind, **SHAPE, n_threads=2)
    all_around = WindowPlaces.n_missing

    def only_before(self: WindowPlaces, seq_id: int, state: memoryview) -> int:
        positions = saved_state.cell_positions(state[saved_state.HEADER_BYTES :], 0)
        assert positions is not None
        return all_around(self, seq_id, state) and int(positions[0]) % ring_size(self._context)

    monkeypatch.setattr(WindowPlaces, "n_missing", only_before)
    reason = probe_of(apart).failure(tmp_path / "verdict")
    assert reason == "a restored prompt gives other logits than a computed one"
    monkeypatch.undo()
    assert probe_of(apart).failure(tmp_path / "verdict") == reason  # remembered
    assert probe_of(apart).failure(tmp_path / "another") is None


@pytest.mark.parametrize("n_ctx", [256, 257, 300, 768, 1024])
def test_it_fits_into_every_context(open_apart: OpenApart, tmp_path: Path, n_ctx: int) -> None:
    """Where the ring never starts over, or no prompt is longer than a piece."""
    apart = open_apart("window", **{**SHAPE, "n_ctx": n_ctx})
    assert probe_of(apart).failure(tmp_path / "verdict") is None
