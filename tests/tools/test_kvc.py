"""`python -m erllama.tools.kvc`, on folders made by a store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import trio
from kvcache.nodes import IDENTITY
from kvcache.stores import PART_BYTES, Clock, bench
from rich.cells import cell_len

from erllama.kvcache.key import Identity, control_piece
from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.store import Draft
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
    shown = capsys.readouterr().out
    assert "payload_bytes" in shown
    used = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    assert f"({used})" in shown


def test_inspect_a_damaged_file(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with it, and the exit code says so."""
    path = next((folder / "nodes").iterdir())
    path.write_bytes(path.read_bytes()[:20])
    assert main(["inspect", str(path)]) == 1
    assert "damage" in capsys.readouterr().out


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


def paths_by_start(capsys: pytest.CaptureFixture[str], folder: pathlib.Path) -> dict[int, str]:
    rows = run_json(capsys, "inspect", str(folder))
    assert isinstance(rows, list)
    return {row["start"]: row["path"] for row in rows}


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        last = file.read(4)
        file.seek(-4, os.SEEK_END)
        file.write(bytes(byte ^ 0xFF for byte in last))


def test_what_hangs_behind_a_damaged_node(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged file, and children that are whole but of no use; a missing parent is another thing."""
    flip(paths_by_start(capsys, folder)[4])
    report = run_json(capsys, "verify", str(folder))
    assert isinstance(report, dict)
    assert sorted(item["what"] for item in report["wrong"]) == [
        "payload: checksum",
        *3 * ["unusable: a block before it is damaged"],
        "unusable: its parent is damaged",
    ]
    os.unlink(paths_by_start(capsys, folder)[4])
    report = run_json(capsys, "verify", str(folder))
    assert isinstance(report, dict)
    assert sorted(item["what"] for item in report["wrong"]) == [
        *3 * ["orphan: a block before it is missing"],
        "orphan: its parent is missing",
    ]


def test_an_orphan_that_is_left_alone(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only file of a folder has a parent as well; a file that is named alone is not asked for one."""
    paths = paths_by_start(capsys, folder)
    for path in (folder / "nodes").iterdir():
        if str(path) != paths[4]:
            path.unlink()
    assert main(["verify", paths[4]]) == 0
    assert main(["verify", str(folder)]) == 1
    assert "orphan: its parent is missing" in capsys.readouterr().out
    assert main(["verify", "--fix", str(folder)]) == 0
    assert list((folder / "nodes").iterdir()) == []


def test_verify_fix(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage goes to quarantine, what hangs behind it and leftovers go; the rest is clean."""
    flip(paths_by_start(capsys, folder)[4])
    assert main(["gc", str(folder)]) == 0  # reads heads only
    (folder / "nodes" / f"{'0' * 64}.base.kvc.0000000000000000.tmp").write_bytes(b"x" * 100)
    report = run_json(capsys, "verify", "--fix", str(folder))
    assert isinstance(report, dict)
    assert (report["files"], len(report["wrong"]), report["removed"]) == (7, 6, 6)
    assert len(list((folder / "quarantine").iterdir())) == 1
    assert list(paths_by_start(capsys, folder)) == [0]
    assert main(["verify", str(folder)]) == 0
    assert main(["verify", "--fix", str(folder)]) == 0

    async def fill() -> None:
        async with bench(folder, clock=Clock(time.time())) as b:
            assert await b.read([*range(12)]) == 4
            await b.save_path([*range(12)], tier="kv", kinds=(PartKind.BASE,))
            await b.settle()

    trio.run(fill)


async def test_verify_fix_wants_the_folder_alone(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a store has the folder open nothing is removed, and the answer says why."""
    flip(paths_by_start(capsys, folder)[4])
    before = sorted((folder / "nodes").iterdir())
    async with bench(folder, clock=Clock(time.time())):
        assert main(["verify", "--fix", str(folder)]) == 2
    assert "a running process uses this folder" in capsys.readouterr().err
    assert sorted((folder / "nodes").iterdir()) == before
    assert main(["verify", "--fix", str(folder)]) == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "stats", "explain"])
def test_a_folder_that_is_no_cache(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error, not an empty cache."""
    (tmp_path / "notes.txt").write_text("x")
    assert main([command, str(tmp_path), *(["a prompt"] if command == "explain" else [])]) == 2
    assert "not a cache folder" in capsys.readouterr().err


def test_cold_is_the_same_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`exact="cold"` has trees of its own: a line of its own, and no model more."""
    facts = {"model": "some.gguf", "host": "here"}
    plain = Identity(shape_hash=b"a" * 32, n_ctx=2048, facts=facts)
    cold = Identity(shape_hash=b"b" * 32, n_ctx=2048, facts={**facts, "exact": "cold"})
    fill_models(tmp_path, plain, cold)
    totals = run_json(capsys, "stats", str(tmp_path))
    assert isinstance(totals, dict)
    assert totals["models"] == 1
    assert sorted(totals["bytes_by_model"]) == ["some.gguf", 'some.gguf, exact="cold"']
    assert sum(totals["bytes_by_model"].values()) == totals["bytes"]
    assert main(["explain", str(tmp_path), "abcd"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
    assert sorted(heads) == [
        "model some.gguf  616161616161  (n_ctx 2048, 1 node)",
        "model some.gguf  626262626262  (n_ctx 2048, exact cold, 1 node)",
    ]


def test_models_of_one_name_have_their_shapes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes of one file are two models, told apart by their hashes."""
    facts = {"model": "some.gguf"}
    fill_models(tmp_path, *(Identity(shape_hash=x * 32, n_ctx=2048, facts=facts) for x in (b"a", b"b")))
    totals = run_json(capsys, "stats", str(tmp_path))
    assert isinstance(totals, dict)
    assert totals["models"] == 2
    assert set(totals["bytes_by_model"]) == {"some.gguf 616161616161", "some.gguf 626262626262"}


def fill_models(root: pathlib.Path, *identities: Identity) -> None:
    """One block "abcd" of each."""

    async def fill() -> None:
        async with bench(root, clock=Clock(time.time())) as b:
            for identity in identities:
                buffer = await b.store.buffer(100)
                assert buffer is not None
                parts = {PartKind.BASE: buffer}
                await b.store.save(
                    Draft(
                        identity=identity,
                        tokens=[0, 1, 2, 3],
                        parts=parts,
                        parent=ROOT_NAME,
                        start=0,
                        text=b"abcd",
                    ),
                    tier="kv",
                )
            await b.store.flush()

    trio.run(fill)


def test_long_text_leaves_room_for_the_rest(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns names, ranges, sizes and ages are whole, and text gets what is left."""
    texts = [b"The keeper writes down who comes and goes. " * 9, "灯台守".encode() * 60]

    async def fill() -> None:
        async with bench(tmp_path, clock=Clock(time.time())) as b:
            for i, text in enumerate(texts):
                buffer = await b.store.buffer(100)
                assert buffer is not None
                parts = {PartKind.BASE: buffer}
                await b.store.save(
                    Draft(
                        identity=IDENTITY, tokens=[i] * 4, parts=parts, parent=ROOT_NAME, start=0, text=text
                    ),
                    tier="kv",
                )
            await b.store.flush()

    trio.run(fill)
    names = [path.name[:12] for path in (tmp_path / "nodes").iterdir()]
    assert main(["inspect", str(tmp_path)]) == 0
    piped = capsys.readouterr().out
    assert max(cell_len(line.rstrip()) for line in piped.splitlines()) > 120
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for command in (["inspect", str(tmp_path)], ["explain", str(tmp_path), "The keeper"]):
        capsys.readouterr()
        assert main(command) == 0
        shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert max(map(cell_len, shown.splitlines())) <= 80
        assert "s ago" in shown
        assert "The keeper" in shown
        if command[0] == "inspect":
            assert all(name in shown for name in names)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_paths_are_never_wrapped(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path stays one word on any terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    path = tmp_path / ("a rather long name " * 6) / f"{'0' * 64}.base.kvc"
    path.parent.mkdir()
    path.write_bytes(b"no")
    assert main(["verify", str(path)]) == 1
    assert f"{path}: size" in capsys.readouterr().out
    assert main(["inspect", str(path)]) == 1
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["stats", "/nowhere"], "/nowhere: no such file or folder"),
        (["prune", "FOLDER"], "give a limit: --max-bytes, --older-than or --shape"),
        (["prune", "FOLDER", "--max-bytes", "5X"], "'5X' is no size; write it as 500M or 20G"),
        (["prune", "FOLDER", "--olderthan", "1"], "unknown argument --olderthan; did you mean --older-than?"),
        (["stats", "FOLDER", "--jsn"], "unknown argument --jsn; did you mean --json?"),
        (["stats", "FOLDER", "--xyz"], "unknown argument --xyz; see --help"),
        (["stats", "FOLDER", "more"], "unknown argument more; see --help"),
    ],
)
def test_mistakes_are_named(
    argv: list[str], said: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong and what to write instead; nothing is removed."""
    with contextlib.suppress(SystemExit):  # argparse's own way out
        assert main([str(folder) if word == "FOLDER" else word for word in argv]) == 2
    assert said in capsys.readouterr().err
    assert len(list((folder / "nodes").iterdir())) == 6


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
