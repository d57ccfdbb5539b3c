"""Publishing whole folders, locks, and a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from tools.libllama import folders
from tools.libllama.errors import BuildError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole(tmp_path):
    """What is assembled is not at its place before it is complete."""
    target = tmp_path / "x" / "done"
    with folders.published(target) as partial:
        (partial / "a").write_text("1")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(target.parent) == ["done"]


def test_a_failed_assembly_leaves_the_old_folder(tmp_path):
    """An exception in the middle changes nothing, Ctrl-C included."""
    target = tmp_path / "done"
    with folders.published(target) as partial:
        (partial / "old").touch()

    def interrupted():
        with folders.published(target) as partial:
            (partial / "new").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(target) == ["old"]
    assert names(tmp_path) == ["done"]


def test_a_new_folder_replaces_the_old_one(tmp_path):
    """Nothing of the old folder remains in or beside the new one."""
    target = tmp_path / "done"
    for name in ("old", "new"):
        with folders.published(target) as partial:
            (partial / name).touch()
    assert names(target) == ["new"]
    assert names(tmp_path) == ["done"]


def test_a_killed_assembly_is_cleaned_up_by_the_next(tmp_path):
    """kill -9 in the middle: no folder at the place, and the next run starts clean."""
    code = f"""
        import os, signal
        from pathlib import Path
        from tools.libllama import folders
        with folders.published(Path({str(tmp_path)!r}) / "done") as partial:
            (partial / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -9
    assert [name for name in names(tmp_path) if not name.startswith(".")] == []
    with folders.published(tmp_path / "done") as partial:
        (partial / "whole").touch()
    assert names(tmp_path) == ["done"]
    assert names(tmp_path / "done") == ["whole"]


def test_two_builds_take_turns(tmp_path):
    """The second build waits for the first, and says whom it waits for."""
    lock = tmp_path / "lock"
    code = f"""
        import sys
        from pathlib import Path
        from tools.libllama import folders
        with folders.locked(Path({str(lock)!r}), waiting=lambda text: print(text, flush=True)):
            print("mine", flush=True)
    """
    with folders.locked(lock, waiting=pytest.fail):
        other = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        )
        assert "another build holds" in other.stdout.readline()
    with other:
        assert other.stdout.read() == "mine\n"


def test_a_child_that_outlives_the_build_keeps_its_lock(tmp_path):
    """A compiler run orphaned by kill -9 still holds the folder, so nobody compiles beside it."""
    lock = tmp_path / "lock"
    said = []
    with folders.locked(lock, waiting=said.append) as descriptor:
        child = subprocess.Popen(["sleep", "0.3"], pass_fds=(descriptor,))
    with child, folders.locked(lock, waiting=said.append):
        assert child.wait(timeout=5) == 0
    assert len(said) == 1


def test_too_little_room_is_told_before_the_work(tmp_path):
    """The check names the folder and both sizes, also where the folder does not exist yet."""
    with pytest.raises(BuildError, match="Not enough disk space for the archive") as caught:
        folders.require_space(tmp_path / "not" / "yet", 2**60, "the archive")
    assert "ERLLAMA_CACHE_DIR" in caught.value.advice


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission is denied")],
)
def test_a_disk_that_fails_is_one_sentence(number, words):
    """A full or locked disk in the middle of a step becomes a sentence with the file's name."""
    with (
        pytest.raises(BuildError, match=rf"Unpacking failed: .*{words} \(/x/y\)"),
        folders.disk_errors("Unpacking"),
    ):
        raise OSError(number, os.strerror(number), "/x/y")


def test_other_errors_pass():
    """What is no disk trouble is not dressed up as such."""
    with pytest.raises(FileNotFoundError), folders.disk_errors("Unpacking"):
        raise FileNotFoundError(errno.ENOENT, "no such file", "/x")


def test_a_tree_is_hard_linked_where_possible(tmp_path):
    """Installing from the cache costs no second copy on the same file system."""
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "file").write_text("x")
    folders.copy_tree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "sub" / "file").samefile(tmp_path / "a" / "sub" / "file")


def test_without_hard_links_a_tree_is_copied(tmp_path, monkeypatch):
    """Across file systems the files are copied, executable bits included."""

    def refuse(*_):
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(folders.os, "link", refuse)
    source = tmp_path / "a"
    source.write_text("x")
    source.chmod(0o755)
    folders.link_or_copy(source, tmp_path / "b")
    assert not (tmp_path / "b").samefile(source)
    assert os.access(tmp_path / "b", os.X_OK)
