"""KV that does not come back bit for bit is not kept, and that is found out once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from erllama.backend import PartKind
from erllama.engine import llama_backend
from erllama.engine.llama_backend import LlamaBackend
from erllama.engine.llama_parts import PartMover
from erllama.engine.memory_check import MemoryCheck
from erllama.errors import LoadCancelled, NotSupported
from erllama.options import ContextOptions, ModelOptions

from .parts_scenes import KINDS, Apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from erllama.backend import BackendFacts

pytestmark = pytest.mark.model


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of verdicts, empty and of this test alone."""
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path))
    return tmp_path / "memory-checks"


@pytest.fixture
def open_backend(
    tiny_gguf: Callable[[str], Path],
) -> Iterator[Callable[..., tuple[LlamaBackend, BackendFacts]]]:
    """`open_backend(kind, n_ctx=…)` → a backend and its facts."""
    opened: list[LlamaBackend] = []

    def open_one(kind: str, **options: object) -> tuple[LlamaBackend, BackendFacts]:
        values: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 1, "n_threads": 1, **options}
        opened.append(LlamaBackend(str(tiny_gguf(kind)), ModelOptions(), ContextOptions(**values).resolved()))
        return opened[-1], opened[-1].open()

    yield open_one
    for backend in opened:
        backend.close()


def lying(monkeypatch: pytest.MonkeyPatch, part: PartKind) -> None:
    """From now on each export of that part has a byte in its middle changed."""
    honest = PartMover.export

    def export(self: PartMover, seq_id: int, start: int, end: int, into: memoryview, kind: PartKind) -> int:
        n = honest(self, seq_id, start, end, into, kind)
        if kind is part:
            into[n // 2] ^= 0x10
        return n

    monkeypatch.setattr(PartMover, "export", export)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_pass(open_backend: Callable[..., Any], verdicts: Path, kind: str) -> None:
    """With one slot, a batch of a few rows and the smallest context; memory is empty afterwards."""
    for shape in ({}, {"n_batch": 5, "n_ubatch": 3}):
        backend, facts = open_backend(kind, **shape)
        assert facts.layout is not None
        assert "not_kept" not in facts.details
        assert backend.is_at(0, 0)
    assert {file.read_text() for file in verdicts.iterdir()} == {"passed"}
    assert len(list(verdicts.iterdir())) == 2  # each shape of a context has its own


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dense", PartKind.BASE),
        ("window", PartKind.BASE),
        ("window", PartKind.WINDOW),
        ("hybrid", PartKind.BASE),
        ("hybrid", PartKind.STATE),
        ("hybrid_window", PartKind.STATE),
        ("recurrent", PartKind.STATE),
    ],
)
def test_a_lie_is_noticed(
    open_backend: Callable[..., Any],
    verdicts: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    part: PartKind,
) -> None:
    """One bit of one part: the model loads and is not cached, and the log and the facts say why."""
    lying(monkeypatch, part)
    backend, facts = open_backend(kind)
    assert facts.layout is None
    assert f"the restored {part.name} part of [0, 24) has other bytes" in facts.details["not_kept"]
    assert facts.details["not_kept"] in caplog.text
    with pytest.raises(NotSupported, match="other bytes"):
        backend.export_bytes(0, 0, 1)
    backend.rebuild()
    with pytest.raises(NotSupported, match="other bytes"):
        backend.export_bytes(0, 0, 1)


def test_other_logits_are_noticed(
    open_backend: Callable[..., Any], verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bytes are not enough: what is restored must compute the same."""
    honest, n_decoded = llama_backend.llama.Context.logits, []

    def logits(self: Any, i: int) -> Any:
        n_decoded.append(1)
        return honest(self, i) + len(n_decoded)

    monkeypatch.setattr(llama_backend.llama.Context, "logits", logits)
    _, facts = open_backend("dense")
    assert facts.layout is None
    assert "other logits" in facts.details["not_kept"]


def test_a_verdict_is_remembered(
    open_backend: Callable[..., Any], verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure stays one and a success too, until the model, the build or the context changes."""
    n_tried: list[int] = []
    honest = MemoryCheck._run
    monkeypatch.setattr(MemoryCheck, "_run", lambda self: (n_tried.append(1), honest(self))[1])
    with monkeypatch.context() as patched:
        lying(patched, PartKind.BASE)
        _, first = open_backend("dense")
    _, again = open_backend("dense")
    assert again.layout is None
    assert again.details["not_kept"] == first.details["not_kept"]
    assert len(n_tried) == 1
    for _ in range(2):
        _, other = open_backend("dense", n_ctx=512)
        assert other.layout is not None
    assert len(n_tried) == 2


def test_what_cannot_be_remembered_is_tried_again(
    open_backend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache folder that cannot be written costs a check per load; a verdict of nonsense is none."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path / "file"))
    assert open_backend("dense")[1].layout is not None
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path))
    assert open_backend("dense")[1].layout is not None
    [verdict] = (tmp_path / "memory-checks").iterdir()
    for nonsense in (b"\xff\xfe", b"", b"perhaps"):
        verdict.write_bytes(nonsense)
        assert open_backend("dense")[1].layout is not None
        assert verdict.read_text() == "passed"


def test_a_check_can_be_cancelled(
    tiny_gguf: Callable[[str], Path], verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel_open` while the check decodes ends the load, and no verdict is left behind."""
    options = ContextOptions(n_ctx=256, n_threads=1).resolved()
    backend = LlamaBackend(str(tiny_gguf("dense")), ModelOptions(), options)
    honest = MemoryCheck._run
    monkeypatch.setattr(MemoryCheck, "_run", lambda self: (backend.cancel_open(), honest(self))[1])
    with pytest.raises(LoadCancelled):
        backend.open()
    backend.close()
    assert not verdicts.exists()


def test_a_checked_context_computes_as_an_unchecked_one(
    tiny_gguf: Callable[[str], Path], verdicts: Path
) -> None:
    """The check leaves nothing that a later prompt could notice."""
    for kind in KINDS:
        first, second = Apart(tiny_gguf(kind)), Apart(tiny_gguf(kind))  # the second finds a verdict
        tokens = first.tokens(200)
        assert (first.feed(0, tokens, 0) == second.feed(0, tokens, 0)).all()
        first.close()
        second.close()
