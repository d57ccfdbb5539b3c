"""Whose KV it is: content of all files, remembered by what cannot be faked by accident."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from erllama.engine.fingerprint import file_sha256, model_files, shape_hash

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch) -> None:
    """The second time its hash comes from the folder."""
    file, memory = tmp_path / "m.gguf", tmp_path / "memory"
    file.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert file_sha256(str(file), memory) == expected
    monkeypatch.setattr("erllama.engine.fingerprint._hash", lambda _: "hashed again")
    assert file_sha256(str(file), memory) == expected


def test_other_content_of_the_same_size_and_time_is_another_file(tmp_path: Path) -> None:
    """Copied over with its modification time kept: the hash is that of the new content."""
    file, memory = tmp_path / "m.gguf", tmp_path / "memory"
    file.write_bytes(b"weights")
    before = os.stat(file)
    old = file_sha256(str(file), memory)
    with open(file, "r+b") as f:
        f.write(b"Weights")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_sha256(str(file), memory) == hashlib.sha256(b"Weights").hexdigest() != old


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    """The hash is right all the same."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    assert file_sha256(str(file), file / "no folder") == hashlib.sha256(b"weights").hexdigest()


def test_a_remembered_hash_that_is_no_text_is_made_again(tmp_path: Path) -> None:
    """Damage in the folder is not believed."""
    file, memory = tmp_path / "m.gguf", tmp_path / "memory"
    file.write_bytes(b"weights")
    good = file_sha256(str(file), memory)
    [remembered] = memory.iterdir()
    remembered.write_bytes(b"\xff\xfe")
    assert file_sha256(str(file), memory) == good


def test_every_part_of_a_split_model_counts() -> None:
    """Not only the one that is named."""
    assert model_files("/m/a.gguf") == ["/m/a.gguf"]
    assert model_files("/m/a-00001-of-00003.gguf") == [f"/m/a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_the_shape_does_not_depend_on_the_order_of_its_facts() -> None:
    """And does on each of them."""
    assert shape_hash({"a": 1, "b": 2}) == shape_hash({"b": 2, "a": 1}) != shape_hash({"a": 1, "b": 3})
