"""The pinned sources: unpacked whole, verified file by file, never silently repaired."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tools.libllama import fetch, source, tree
from tools.libllama.errors import BuildError
from tools.libllama.pin import PIN_FILE, Pin, read_pin

NAMES = ["CMakeLists.txt", "common/chat.h", "include/llama.h", "src/llama.cpp"]


def unpacked(vendor):
    return {path: (vendor / path).read_bytes() for path in tree.iter_files(vendor)}


def test_unpacks_the_subtree_and_keeps_our_files(files, pin, vendor, progress):
    """Of the archive exactly the llama.cpp tree arrives; our README and pin stay, its .git stays out."""
    found = source.pinned_source(pin, progress, vendor=vendor)
    assert unpacked(vendor) == files
    assert (vendor / "README.md").read_text() == "ours\n"
    assert not (vendor / ".git").exists()
    assert found.digest == pin.tree
    assert found.pinned


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_byte_stops_the_build_and_names_the_file(name, pin, vendor, progress):
    """B1: a tree that differs from the pin in one bit is refused, with the file's name."""
    source.pinned_source(pin, progress, vendor=vendor)
    data = bytearray((vendor / name).read_bytes())
    data[0] ^= 1
    (vendor / name).write_bytes(data)
    with pytest.raises(BuildError, match=f"changed: {name}"):
        source.pinned_source(pin, progress, vendor=vendor)
    assert (vendor / name).read_bytes() == bytes(data)


def test_names_missing_and_extra_files(pin, vendor, progress):
    """A file that went away and one that came are both told."""
    source.pinned_source(pin, progress, vendor=vendor)
    (vendor / "src" / "llama.cpp").rename(vendor / "src" / "other.cpp")
    with pytest.raises(BuildError, match=r"missing: src/llama\.cpp; extra: src/other\.cpp"):
        source.pinned_source(pin, progress, vendor=vendor)


def test_a_changed_manifest_does_not_hide_a_changed_file(pin, vendor, progress):
    """The stored manifest counts only as far as it proves itself against the pin."""
    source.pinned_source(pin, progress, vendor=vendor)
    (vendor / "CMakeLists.txt").write_text("project(evil)\n")
    (vendor / tree.MANIFEST_NAME).write_text(tree.manifest_text(tree.scan(vendor)))
    with pytest.raises(BuildError, match=r"changed: CMakeLists\.txt"):
        source.pinned_source(pin, progress, vendor=vendor)


def test_a_changed_tree_without_archive_or_manifest_still_stops(pin, vendor, progress, archive):
    """Without anything to compare with, the build says so instead of guessing."""
    source.pinned_source(pin, progress, vendor=vendor)
    archive.unlink()
    (vendor / tree.MANIFEST_NAME).unlink()
    (vendor / "CMakeLists.txt").write_text("x")
    with pytest.raises(BuildError, match="only the archive could tell"):
        source.pinned_source(pin, progress, vendor=vendor)


def test_sources_put_there_by_hand_need_no_network(pin, vendor, progress, archive, monkeypatch):
    """B3: with the right tree in place nothing is fetched."""
    source.unpack(archive, pin, progress, vendor=vendor)
    archive.unlink()
    (vendor / tree.MANIFEST_NAME).unlink()
    monkeypatch.setattr(fetch, "download", lambda *_: pytest.fail("the index was asked"))
    assert source.pinned_source(pin, progress, vendor=vendor).digest == pin.tree


@pytest.mark.parametrize("n_files", range(5))
def test_an_unpack_that_was_interrupted_is_begun_again(n_files, files, pin, vendor, progress, monkeypatch):
    """Killed after any number of files, the next run ends with the whole tree."""
    members = source.archive_members

    def dying(*args):
        for n_done, member in enumerate(members(*args)):
            if n_done == n_files:
                raise KeyboardInterrupt
            yield member

    monkeypatch.setattr(source, "archive_members", dying)
    with pytest.raises(KeyboardInterrupt):
        source.pinned_source(pin, progress, vendor=vendor)
    assert not source.is_unpacked(vendor)
    monkeypatch.setattr(source, "archive_members", members)
    source.pinned_source(pin, progress, vendor=vendor)
    assert unpacked(vendor) == files


def test_an_archive_with_another_tree_is_refused(pin, vendor, progress):
    """An archive whose own digest is right but whose tree is not the pin's leaves the folder empty."""
    wrong = Pin(**{**pin.as_dict(), "tree": "0" * 64})
    with pytest.raises(BuildError, match="not the one that the pin names"):
        source.pinned_source(wrong, progress, vendor=vendor)
    assert unpacked(vendor) == {}


def test_a_damaged_archive_is_fetched_again(pin, vendor, progress, archive, monkeypatch):
    """A cached archive with other bytes is dropped; the next download takes its place."""
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])

    def download(_pin, folder, _progress, _lock):
        fetched = folder / archive.name
        fetched.write_bytes(whole)
        return fetched

    monkeypatch.setattr(fetch, "download", download)
    source.pinned_source(pin, progress, vendor=vendor)
    assert archive.read_bytes() == whole


def test_a_download_with_another_digest_never_enters_the_cache(pin, progress, archive, monkeypatch):
    """What the index serves under the pinned name has to be the pinned bytes."""
    archive.unlink()

    def download(_pin, folder, _progress, _lock):
        fetched = folder / archive.name
        fetched.write_bytes(b"something else")
        return fetched

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(BuildError, match="but the pin says"):
        fetch.fetch(pin, progress)
    assert not archive.exists()


def test_an_unreachable_index_is_one_sentence_with_three_ways_out(pin, progress, archive, monkeypatch):
    """No network: the message names the archive, the folder for it, and --source."""
    archive.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BuildError, match="could not be fetched") as caught:
        fetch.fetch(pin, progress)
    assert archive.name in caught.value.advice
    assert str(archive.parent) in caught.value.advice
    assert "--source" in caught.value.advice
    assert caught.value.log_tail
    assert list(archive.parent.glob(".download-*")) == []


HANG = """
import sys
from tools.libllama import fetch, pin, progress
fetch._pip = lambda: [sys.argv[1]]
fetch.fetch(pin.read_pin(), progress.Progress())
"""


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_kill_9_of_a_fetch_ends_pip_too(tmp_path):
    """No pip goes on in the background that would write into the next fetch's folder."""
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    pip.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", HANG, str(pip)], stderr=subprocess.DEVNULL) as us:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert us.poll() is None
            time.sleep(0.01)
        us.kill()
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 60
    while is_there(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_user_tree_is_taken_as_it_is(vendor, progress, archive, pin):
    """--source: any content, named by its own digest."""
    source.unpack(archive, pin, progress, vendor=vendor)
    (vendor / "src" / "llama.cpp").write_text("changed on purpose\n")
    found = source.user_source(vendor)
    assert found.digest != pin.tree
    assert not found.pinned


def test_a_user_tree_with_odd_entries(vendor, progress, archive, pin):
    """--source: dangling links, links back into the tree, sockets and linked folders are no traceback."""
    source.unpack(archive, pin, progress, vendor=vendor)
    before = source.user_source(vendor).digest
    (vendor / "dangling").symlink_to("nowhere")
    (vendor / "src" / "loop").symlink_to(vendor)
    os.mkfifo(vendor / "pipe")
    odd = source.user_source(vendor).digest
    assert odd != before
    outside = vendor.parent / "outside"
    outside.mkdir()
    (outside / "x.c").write_text("1")
    (vendor / "linked").symlink_to(outside)
    linked = source.user_source(vendor).digest
    (outside / "x.c").write_text("2")
    assert len({odd, linked, source.user_source(vendor).digest}) == 3


def test_one_foreign_file_is_work_that_we_keep(pin, vendor, progress):
    """Rule 2: a vendor folder without the usual files is not emptied if anybody's file lies in it."""
    (vendor / "notes.txt").write_text("mine\n")
    with pytest.raises(BuildError, match=r"extra: notes\.txt"):
        source.pinned_source(pin, progress, vendor=vendor)
    assert (vendor / "notes.txt").read_text() == "mine\n"


def test_sources_in_use_are_not_removed(pin, vendor, progress, said, tmp_path):
    """--clean of one build waits for the compile of another."""
    found = source.pinned_source(pin, progress, vendor=vendor)
    removed = threading.Thread(target=lambda: source.remove_sources(progress, vendor=vendor))
    with source.in_use(found, progress):
        removed.start()
        while "waiting for it" not in said.getvalue():
            time.sleep(0.01)
        assert source.is_unpacked(vendor)
    removed.join()
    assert not source.is_unpacked(vendor)
    with pytest.raises(BuildError, match="removed the sources"), source.in_use(found, progress):
        pytest.fail("went on without sources")


def test_a_folder_without_llama_cpp_is_no_source(tmp_path):
    """--source with the wrong folder says what it takes."""
    with pytest.raises(BuildError, match=r"holds no llama\.cpp sources"):
        source.user_source(tmp_path)


def test_the_committed_pin_reads_back():
    """The pin file in the repository is what its own writer would write."""
    assert read_pin().to_toml() == PIN_FILE.read_text()


@pytest.mark.parametrize("text", ["", "package = 1", "not toml", 'package = "x"\nother = "y"\n'])
def test_a_broken_pin_file_is_named(text, tmp_path):
    """A pin file that lacks keys, has others, or is no TOML is refused with its path."""
    path = tmp_path / "pin.toml"
    path.write_text(text)
    with pytest.raises(BuildError, match=r"pin\.toml cannot be read"):
        read_pin(path)
