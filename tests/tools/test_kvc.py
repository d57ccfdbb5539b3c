"""`python -m erllama.tools.kvc`, on folders made by a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio
from kvcache.stores import PART_BYTES, Clock, bench

from erllama.kvcache.key import control_piece
from erllama.kvcache.kinds import PartKind
from erllama.tools.kvc import main
from erllama.tools.preview import show_text

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three conversations with one head: 3 + 1 + 1 + 1 nodes."""
    root = tmp_path / "root"

    async def fill() -> None:
        async with bench(root, clock=Clock(time.time())) as b:
            for last in (1, 2, 3):
                await b.save_path([*range(12), last], tier="kv", kinds=(PartKind.BASE,))
            await b.read([*range(12), 1])
            await b.settle()

    trio.run(fill)
    return root


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> object:
    capsys.readouterr()
    code = main([*argv, "--json"])
    assert code in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_inspect_a_folder(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file with its fields, for scripts; a table, for a person."""
    rows = run_json(capsys, "inspect", str(folder))
    assert isinstance(rows, list)
    assert len(rows) == 6
    first = next(row for row in rows if row["start"] == 0)
    assert first["tokens"] == [0, 1, 2, 3]
    assert first["text"] == "abcd"
    assert (first["kind"], first["reason"], first["n_tokens"]) == ("base", "cold", 4)
    assert first["payload_bytes"] == PART_BYTES
    assert first["facts"]["host"] == "here"
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "6 files" in shown
    assert "abcd" in shown


def test_inspect_one_file(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All fields of a single file."""
    path = next((folder / "nodes").iterdir())
    assert main(["inspect", str(path)]) == 0
    assert "payload_bytes" in capsys.readouterr().out


def test_inspect_tree(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shared prefixes are one line, each conversation's end another."""
    assert main(["inspect", "--tree", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0-12")
    assert len(lines) == 4


def test_verify(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clean is 0; a flipped payload bit, an orphan and a temporary are found, and the code is 1."""
    assert main(["verify", str(folder)]) == 0
    assert "all clean" in capsys.readouterr().out
    files = sorted((folder / "nodes").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    (folder / "nodes" / "x.base.kvc.0000000000000000.tmp").write_bytes(b"")
    report = run_json(capsys, "verify", str(folder))
    assert isinstance(report, dict)
    assert report["files"] == 7
    assert any("payload" in item["what"] for item in report["wrong"])
    assert any("temporary" in item["what"] for item in report["wrong"])
    assert main(["verify", str(folder)]) == 1


def test_stats(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sharing in bytes, reasons, hits from the journal."""
    totals = run_json(capsys, "stats", str(folder))
    assert isinstance(totals, dict)
    assert (totals["files"], totals["nodes"], totals["tokens"], totals["conversations"]) == (6, 6, 15, 3)
    assert totals["bytes_if_nothing_were_shared"] > 1.9 * totals["bytes"]
    assert totals["hits"] == 4
    assert totals["bytes_by_reason"] == {"cold": totals["bytes"]}
    assert main(["stats", str(folder)]) == 0
    assert "bytes by kind" in capsys.readouterr().out


def test_gc_removes_leftovers(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dead temporaries, orphans and foreign files go; what is whole stays."""
    nodes = folder / "nodes"
    (nodes / f"{'0' * 64}.base.kvc.0000000000000000.tmp").write_bytes(b"x" * 100)
    (nodes / "foreign").write_bytes(b"x")
    result = run_json(capsys, "gc", str(folder))
    assert result == {"removed": 2, "quarantined": 1, "nodes": 6}
    assert main(["gc", str(folder)]) == 0
    assert "0 leftovers" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0


def test_prune_by_size_goes_leaf_first(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stays fits, is the most recently used, and is closed."""
    result = run_json(capsys, "prune", str(folder), "--max-bytes", str(5 * (PART_BYTES + 500)), "--dry-run")
    assert result == {"nodes": 1, "bytes": result["bytes"], "dry_run": True}  # type: ignore[index]
    assert len(list((folder / "nodes").iterdir())) == 6
    assert main(["prune", str(folder), "--max-bytes", str(2 * (PART_BYTES + 500))]) == 0
    assert "4 nodes" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
    rows = run_json(capsys, "inspect", str(folder))
    assert isinstance(rows, list)
    assert sorted(row["start"] for row in rows) == [0, 4]


def test_prune_by_age_and_shape(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Old nodes go only when nothing newer hangs behind them; a shape goes whole."""
    paths = list((folder / "nodes").iterdir())
    for path in paths[:-1]:
        os.utime(path, (0, 0))
    run_json(capsys, "prune", str(folder), "--older-than", "1")
    left = run_json(capsys, "inspect", str(folder))
    assert isinstance(left, list)
    assert any(row["path"] == str(paths[-1]) for row in left)
    assert main(["verify", str(folder)]) == 0
    assert run_json(capsys, "prune", str(folder), "--shape", "ffff")["nodes"] == 0  # type: ignore[call-overload]
    run_json(capsys, "prune", str(folder), "--shape", left[0]["shape"][:8])
    assert list((folder / "nodes").iterdir()) == []


async def test_sim(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """X25: hit rates by budget, as a table and as JSON."""
    log = tmp_path / "log"
    async with bench(tmp_path / "root", lookup_log=str(log)) as b:
        for i in range(10):
            await b.read([*range(8), i % 2])
            await b.save_path([*range(8), i % 2], tier="kv")
            await b.settle()
    assert log.stat().st_mode & 0o777 == 0o600
    results = run_json(capsys, "sim", str(log), "--max-bytes", "4k", "1M")
    assert isinstance(results, list)
    assert [row["max_bytes"] for row in results] == [4096, 1 << 20]
    assert results[0]["hit_rate"] < results[1]["hit_rate"] == pytest.approx((8 + 8 * 9) / 90)
    assert main(["sim", str(log), "--max-bytes", "1G"]) == 0
    assert "hit rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "/nowhere"],
        ["gc", "/nowhere"],
        ["prune", "/"],
        ["stats", "/nowhere"],
        ["sim", "/x", "--max-bytes", "1"],
    ],
)
def test_wrong_paths_create_nothing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error is exit code 2 and a sentence, not an empty cache folder."""
    assert main(argv) == 2
    assert "kvc:" in capsys.readouterr().err
    assert not os.path.exists("/nowhere")


def test_as_a_module(folder: pathlib.Path) -> None:
    """The command as documented."""
    done = subprocess.run(
        [sys.executable, "-m", "erllama.tools.kvc", "verify", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all clean" in done.stdout


def test_previews_show_what_is_there() -> None:
    """Control characters, control tokens and invalid bytes are visible; long text loses its middle."""
    assert show_text(b"a\nb\x00\x7f" + control_piece(7) + b"c") == "a␊b␀␡⟨7⟩c"
    assert show_text("é".encode()[:1] + b"x") == "�x"
    assert show_text("\u202eabc".encode()) == "⟨U+202E⟩abc"
    assert show_text(b"x" * 100, 11) == "xxxxx…xxxxx"
    assert show_text(b"\xff\x00") == "�␀"
