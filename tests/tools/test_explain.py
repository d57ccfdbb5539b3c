"""`kvc explain`: what of a prompt a folder holds, without a model; on folders of a store and of an engine."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from kvcache.nodes import IDENTITY
from kvcache.stores import Clock, bench

import erllama
from erllama.kvcache.key import Identity, control_piece
from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.store import Draft
from erllama.testing import FakeBackend
from erllama.tools.kvc import main

if TYPE_CHECKING:
    import pathlib

BASE, WINDOW, STATE = PartKind.BASE, PartKind.WINDOW, PartKind.STATE
OTHER = Identity(shape_hash=b"another model" * 3, n_ctx=2048)


def ask(capsys: pytest.CaptureFixture[str], folder: pathlib.Path, *argv: str) -> list[dict[str, Any]]:
    """The models of `explain --json`; its exit code must fit them."""
    capsys.readouterr()
    code = main(["explain", str(folder), *argv, "--json"])
    models: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["models"]
    usable = any(model["usable_tokens"] or model["usable_inside_next"] for model in models)
    assert code == (0 if usable else 1)
    return models


def stop_of(model: dict[str, Any]) -> tuple[str, int]:
    return model["stop"]["why"], model["stop"]["at"]


Path = list[tuple[list[int], tuple[PartKind, ...]]]


def write(root: pathlib.Path, *paths: Path, ago_s: float = 0.0, **options: Any) -> None:
    """Histories, each as blocks with the parts that each has, saved some time ago."""

    async def fill() -> None:
        async with bench(root, clock=Clock(time.time() - ago_s)) as b:
            for path in paths:
                above = None
                for ids, kinds in path:
                    above = await b.save(ids, above, tier="kv", kinds=kinds, **options)
            await b.settle()

    trio.run(fill)


def write_text(root: pathlib.Path, *blocks: tuple[list[int], bytes], identity: Identity = IDENTITY) -> None:
    """One history with texts of its own."""

    async def fill() -> None:
        async with bench(root, clock=Clock(time.time())) as b:
            above, start = ROOT_NAME, 0
            for ids, text in blocks:
                buffer = await b.store.buffer(100)
                assert buffer is not None
                draft = Draft(
                    identity=identity, tokens=ids, parts={BASE: buffer}, parent=above, start=start, text=text
                )
                saved = await b.store.save(draft, tier="kv")
                above, start = saved.name, start + len(ids)
            await b.store.flush()

    trio.run(fill)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """ "abcd efgh ijkl" (without the spaces), of which "mn" and "mo" are two ends."""
    root = tmp_path / "root"
    head = [([*range(i, i + 4)], (BASE,)) for i in (0, 4, 8)]
    write(root, [*head, ([12, 13], (BASE,))], [*head, ([12, 14], (BASE,))])
    return root


@pytest.mark.parametrize(
    ("text", "why", "at", "usable", "whole"),
    [
        ("abcdefghijklmn", "complete", 14, 14, 4),
        ("abcdefghijklmnop", "ends_at", 14, 14, 4),
        ("abcdefghij", "complete", 10, 8, 2),
        ("abcdefgXijklmn", "differs_at", 7, 4, 1),
        ("abcdefghijklmXX", "differs_at", 13, 12, 3),
        ("abcdefghijklX", "differs_at", 12, 12, 3),
        ("Xbcd", "nothing_stored", 0, 0, 0),
    ],
)
def test_by_text(
    folder: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    why: str,
    at: int,
    usable: int,
    whole: int,
) -> None:
    """Where it stops in bytes; of a block that is shared in part the tokens are not known."""
    (model,) = ask(capsys, folder, text)
    assert stop_of(model) == (why, at)
    assert model["usable_tokens"] == usable
    assert model["matched"] == at
    assert len([node for node in model["path"] if node["shared_tokens"] is not None]) == whole


def test_both_sides_of_a_difference(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The texts around it, a bar in front of what differs."""
    (model,) = ask(capsys, folder, "abcdefgXijkl")
    assert (model["stop"]["stored"], model["stop"]["asked"]) == ("efg|h", "abcdefg|Xijkl")
    assert main(["explain", str(folder), "abcdefgXijkl"]) == 0
    shown = capsys.readouterr().out
    assert "differs_at: at byte 7" in shown
    assert "stored efg|h" in shown
    assert "asked  abcdefg|Xijkl" in shown
    assert "could be restored" in shown


@pytest.mark.parametrize(
    ("tokens", "why", "at", "usable"),
    [
        ("0,1,2,3,4,5", "complete", 6, 6),
        ("0 1 2 3 4 5 99 7", "differs_at", 6, 6),
        ("0,1,2,3,4,5,6,7,8,9,10,11,12,13,20", "ends_at", 14, 14),
        ("7", "nothing_stored", 0, 0),
    ],
)
def test_by_tokens(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], tokens: str, why: str, at: int, usable: int
) -> None:
    """As the engine compares: inside a block too, to the token."""
    (model,) = ask(capsys, folder, "--tokens", tokens)
    assert stop_of(model) == (why, at)
    assert model["usable_tokens"] == usable


def test_a_prompt_from_a_file(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--file`, less one trailing newline."""
    file = tmp_path / "prompt.txt"
    file.write_text("abcdefghijklmn\n")
    (model,) = ask(capsys, folder, "--file", str(file))
    assert stop_of(model) == ("complete", 14)


@pytest.mark.parametrize(
    "wrong",
    [[], ["a", "--tokens", "1"], ["--tokens", "1,x"], ["--tokens", "99999999999"], ["--file", "/nowhere/x"]],
)
def test_what_cannot_be_told(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    """Exit code 2 and a line, no traceback; a folder that is none too."""
    assert main(["explain", str(folder), *wrong]) == 2
    assert capsys.readouterr().err.startswith("kvc: ")
    assert main(["explain", str(folder / "none"), "a"]) == 2


def test_an_empty_folder_holds_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model, exit code 1."""
    (tmp_path / "nodes").mkdir()
    assert ask(capsys, tmp_path, "a") == []
    assert main(["explain", str(tmp_path), "a"]) == 1
    assert "nothing is stored here" in capsys.readouterr().out


def test_each_model_for_itself(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two models and a salt in one folder: each has its own answer, the best first."""
    write(folder, [([0, 1, 2, 3], (BASE,))], identity=OTHER)
    write(folder, [([25], (BASE,))], identity=dataclasses.replace(IDENTITY, salt=b"user 7"))
    models = ask(capsys, folder, "abcdefgh")
    assert [model["usable_tokens"] for model in models] == [8, 4, 0]
    assert [model["salted"] for model in models] == [False, False, True]
    assert models[1]["shape"] == OTHER.shape_hash.hex()
    assert models[0]["facts"]["host"] == "here"
    assert "75736572" not in json.dumps(models)  # the salt itself is nobody's business


def test_a_window_that_is_gone(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sliding-window model goes on only where its window is: bases alone are not enough."""
    both = (BASE, WINDOW)
    write(tmp_path, [([0, 1, 2, 3], both), ([4, 5, 6, 7], both), ([8, 9], both)])
    for path in (tmp_path / "nodes").glob("*.window.kvc"):
        if len(json.loads(_inspected(capsys, path))[0]["tokens"]) == 2:
            path.unlink()
    (model,) = ask(capsys, tmp_path, "--tokens", "0,1,2,3,4,5,6,7,8,9,10")
    assert (model["matched_tokens"], model["usable_tokens"]) == (10, 8)
    assert stop_of(model) == ("part_missing", 10)
    assert "behind token 8 window is gone" in model["stop"]["message"]
    assert [sorted(node["parts"]) for node in model["path"]] == [["base", "window"]] * 2 + [["base"]]


def test_the_width_of_a_window(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--window` all blocks that it reaches must have theirs."""
    both = (BASE, WINDOW)
    write(tmp_path, [([0, 1, 2, 3], both), ([4, 5, 6, 7], (BASE,)), ([8, 9], both)])
    tokens = ("--tokens", "0,1,2,3,4,5,6,7,8,9,10")
    assert ask(capsys, tmp_path, *tokens)[0]["usable_tokens"] == 10
    assert ask(capsys, tmp_path, *tokens, "--window", "2")[0]["usable_tokens"] == 10
    assert ask(capsys, tmp_path, *tokens, "--window", "3")[0]["usable_tokens"] == 4


def _inspected(capsys: pytest.CaptureFixture[str], path: pathlib.Path) -> str:
    capsys.readouterr()
    assert main(["inspect", str(path), "--json"]) == 0
    return capsys.readouterr().out


def test_states_are_places(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hybrid goes on only at a state, never inside a block."""
    write(tmp_path, [([0, 1, 2, 3], (BASE, STATE)), ([4, 5, 6, 7], (BASE,)), ([8, 9], (BASE, STATE))])
    (model,) = ask(capsys, tmp_path, "--tokens", "0,1,2,3,4,5,6,7,8")
    assert (model["matched_tokens"], model["usable_tokens"]) == (8, 4)
    assert "state is gone or was never kept" in model["stop"]["message"]
    assert ask(capsys, tmp_path, "--tokens", "0,1,2,3,4,5,6,7,8,9,9")[0]["usable_tokens"] == 10


def test_part_of_a_block_counts_where_memory_can_be_cut(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By text the shared tokens of a block are not known: a dense model would restore some, a hybrid none."""
    for name, kinds, code in (
        ("dense", (BASE,), 0),
        ("window", (BASE, WINDOW), 0),
        ("hybrid", (BASE, STATE), 1),
    ):
        root = tmp_path / name
        write(root, [([0, 1, 2, 3], kinds)])
        assert main(["explain", str(root), "abX"]) == code
        shown = capsys.readouterr().out
        assert ("part of the first block could be restored" in shown) is (code == 0)


def test_a_block_between_is_gone(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the second block what hangs behind it cannot be reached, and that is said."""
    for path in (folder / "nodes").iterdir():
        if json.loads(_inspected(capsys, path))[0]["start"] == 4:
            path.unlink()
    (model,) = ask(capsys, folder, "--tokens", "0,1,2,3,4,5,6,7,8,9,10,11,12")
    assert stop_of(model) == ("block_missing", 4)
    assert "from token 8 on" in model["stop"]["message"]
    assert model["usable_tokens"] == 4


def test_what_has_expired(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node whose time is over is there for nobody."""
    write(tmp_path, [([0, 1, 2, 3], (BASE,))], ago_s=100.0, ttl_s=50.0)
    (model,) = ask(capsys, tmp_path, "abcdef")
    assert stop_of(model) == ("expired", 0)
    assert model["usable_tokens"] == 0


BOS, TURN, END = 1, 7, 8
CHAT = (
    ([BOS, TURN, 100], control_piece(BOS) + control_piece(TURN) + b"user\nHello"),
    ([101, END, TURN, 102], b" you" + control_piece(END) + control_piece(TURN) + b"bot\nHi"),
)


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("<|turn|>user\nHello you<|end|><|turn|>bot\nHi", "complete", 43),
        ("<bos><|turn|>user\nHello you<|end|><|turn|>bot\nHi", "complete", 48),
        ("<|turn|>user\nHello you<|end|><|other|>bot\nHi", "differs_at", 29),
        ("<|turn|>user\nHello you and", "differs_at", 22),
        ("user\nHello you", "complete", 14),
    ],
)
def test_control_tokens_are_told_by_their_look(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str, why: str, at: int
) -> None:
    """BOS need not be typed; `<|turn|>` counts for one id, and for no other look of it."""
    write_text(tmp_path, *CHAT)
    (model,) = ask(capsys, tmp_path, text)
    assert stop_of(model) == (why, at)
    if why == "complete" and "<|end|>" in text:
        assert model["marks"][str(END)] == "<|end|>"
        assert model["marks"][str(TURN)] == "<|turn|>"


def test_control_tokens_stay_whole_in_what_is_shown(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Around a difference, a control token is shown by its id."""
    write_text(tmp_path, *CHAT)
    (model,) = ask(capsys, tmp_path, "<|turn|>user\nHello you and")
    assert model["stop"]["stored"] == " you|⟨8⟩⟨7⟩bot␊Hi"


def test_a_space_in_front_is_the_vocabularys(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some vocabularies put a space before the first word: it need not be typed."""
    write_text(tmp_path, ([BOS, 100], control_piece(BOS) + b" Once"), ([101], b" more"))
    assert stop_of(ask(capsys, tmp_path, "Once more")[0]) == ("complete", 9)
    assert stop_of(ask(capsys, tmp_path, " Once more")[0]) == ("complete", 10)


def test_characters_may_part_between_blocks(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A character whose bytes are in two blocks matches; bytes are what counts."""
    word = "naïve".encode()
    write_text(tmp_path, ([1, 2], word[:3]), ([3], word[3:]))
    assert stop_of(ask(capsys, tmp_path, "naïve!")[0]) == ("ends_at", 6)


async def test_what_an_engine_left(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder written by an engine: the prompt as it was, continued, and parted, as the engine finds it."""
    prompt = "The rooms are numbered from left to right. " * 12
    policy = erllama.SavePolicy(min_tokens=64, cold_min_tokens=64)

    async def run(text: str) -> erllama.Completion:
        tiers = [erllama.DiskTier("kv", str(tmp_path))]
        with trio.fail_after(240):
            async with erllama.open_engine(tiers=tiers) as engine:
                model = await engine.load_model(backend=FakeBackend(n_ctx=2048), policy=policy, tier="kv")
                return await model.complete(text, max_tokens=4)

    first = await run(prompt)
    assert stop_of(ask(capsys, tmp_path, prompt)[0]) == ("complete", len(prompt))
    tokens = ",".join(map(str, first.context_tokens[:-1]))
    (model,) = ask(capsys, tmp_path, "--tokens", tokens)
    assert model["usable_tokens"] == len(first.context_tokens) - 1
    parted = prompt[:300] + "But not these." + prompt[300:]
    (model,) = ask(capsys, tmp_path, "--tokens", ",".join(map(str, parted.encode())))
    second = await run(parted)
    assert model["usable_tokens"] == second.stats.n_cached == 300
