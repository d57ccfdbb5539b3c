"""The sizes in docs/guides/caching.md follow from the page's formula, and from what the store writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import erllama
from erllama.types import MissReason

PAGE = (Path(__file__).resolve().parent.parent / "docs/guides/caching.md").read_text()
ELEMENT_BYTES = {"f16": 2.0, "q8_0": 34 / 32}
N_LONG = 8000


class Size(NamedTuple):
    """A row of the table."""

    model: str
    n_full: int
    n_window: int
    n_kv_heads: int
    head_size: int
    shown: tuple[str, ...]

    def token_bytes(self, n_layers: int, kind: str = "f16") -> float:
        """The formula of the page."""
        return n_layers * self.n_kv_heads * self.head_size * 2 * ELEMENT_BYTES[kind]


def _sizes() -> dict[str, Size]:
    rows = re.findall(r"^\| ([\w.-]+)(?: \(measured too\))? ((?:\| \d+ ){4})\| (.*) \|$", PAGE, re.MULTILINE)
    return {
        model: Size(model, *map(int, counts.replace("|", " ").split()), tuple(shown.split(" | ")))
        for model, counts, shown in rows
    }


def test_the_table_follows_from_the_formula():
    """Each size of each of the seven models, as computed."""
    sizes = _sizes()
    assert len(sizes) == 7
    for size in sizes.values():
        both = size.n_full + size.n_window
        assert size.shown == (
            f"{size.token_bytes(both) / 1024:.1f} KiB",
            f"{size.token_bytes(size.n_full) / 1024:.1f} KiB",
            f"{size.token_bytes(both, 'q8_0') / 1024:.1f} KiB",
            f"{size.token_bytes(both) * N_LONG / 2**20:.0f} MiB",
        )


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fixture"), [("SmolLM2-135M", "smollm2_path"), ("gemma-3-270m", "gemma_path")]
)
async def test_the_store_writes_what_the_formula_says(model, fixture, request):
    """Bytes of one saved block, base and window apart, within half a percent."""
    size = _sizes()[model]
    async with erllama.open_engine() as engine:
        loaded = await engine.load_model(request.getfixturevalue(fixture))
        await loaded.complete("One word after the other. " * 120, max_tokens=2)
        await engine.cache.flush()
        blocks = [node["parts"] for node in engine.cache.dump() if node["n_tokens"] == 256]
    base = blocks[0]["base"]["bytes"] / 256
    assert base == pytest.approx(size.token_bytes(size.n_full), rel=0.005)
    windows = [parts["window"]["bytes"] / 256 for parts in blocks if "window" in parts]
    assert bool(windows) == bool(size.n_window)
    for found in windows:
        assert found == pytest.approx(size.token_bytes(size.n_window), rel=0.005)


def test_every_miss_reason_has_its_line():
    """What `Completion.miss` may say stands in the table of what to do."""
    table = PAGE[PAGE.index("## Why was this cold?") :]
    missing = [reason for reason in get_args(MissReason) if f"| `{reason}` |" not in table]
    assert missing == []
