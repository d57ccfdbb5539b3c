"""Publishing whole folders, locks, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

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


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("at", ["before", "between", "after"])
def test_killed_while_changing_places_a_whole_folder_is_there(tmp_path, monkeypatch, at, can_exchange):
    """kill -9 (here: an exception that skips the clean-up) at any step of a replacement loses no folder."""
    target = tmp_path / "done"
    with folders.published(target) as partial:
        (partial / "old").touch()

    class Killed(BaseException):
        pass

    def dying(name, wrapped):
        def call(*arguments):
            steps.append(name)
            if at == "before" or (at == "between" and len(steps) == 2):
                raise Killed
            result = wrapped(*arguments)
            if at == "after" and arguments[-1] == target and result is not False:
                raise Killed
            return result

        return call

    steps = []
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    with monkeypatch.context() as patch:
        patch.setattr(folders.Path, "rename", dying("rename", Path.rename))
        patch.setattr(folders, "_exchange", dying("exchange", folders._exchange))
        patch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
        with contextlib.suppress(Killed), folders.published(target) as partial:
            (partial / "new").touch()
    folders.remove_leftovers(target)
    assert names(target) in (["old"], ["new"])
    assert names(target) == ["new"] or at != "after"


def test_two_folders_change_places_in_one_step(tmp_path):
    """Where the system can, there is no moment without a folder at the place."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if folders._exchange(tmp_path / "a", tmp_path / "b"):
        assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["b"], ["a"])
    else:
        assert sys.platform != "linux" or os.uname().release < "3.15"


def test_readers_share_a_lock_and_keep_writers_out(tmp_path):
    """Two builds may read the sources at once; who changes them waits for both."""
    lock = tmp_path / "lock"
    with (
        folders.locked(lock, waiting=pytest.fail, shared=True) as one,
        folders.locked(lock, waiting=pytest.fail, shared=True),
    ):
        assert one > 2
        code = f"import fcntl; fcntl.flock(open({str(lock)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in done.stderr


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


def test_too_little_room_is_told_before_the_work(tmp_path, cache):
    """The check names the folder and both sizes, also where the folder does not exist yet."""
    with pytest.raises(BuildError, match="Not enough disk space for the archive") as caught:
        folders.require_space(cache / "not" / "yet", 2**60, "the archive")
    assert "ERLLAMA_CACHE_DIR" in caught.value.advice
    with pytest.raises(BuildError, match="compiling") as caught:
        folders.require_space(tmp_path / "not" / "yet", 2**60, "compiling")
    assert "ERLLAMA_CACHE_DIR" not in caught.value.advice


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOTDIR, "a file is where a folder has to be"),
        (errno.EEXIST, "a file is where a folder has to be"),
        (errno.ENOENT, "no such file or directory"),
        (errno.EIO, "input/output error"),
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission is denied"),
    ],
)
def test_a_disk_that_fails_is_one_sentence(number, words):
    """A full or locked disk in the middle of a step becomes a sentence with the file's name."""
    with (
        pytest.raises(BuildError, match=rf"Unpacking failed: .*{words} \(/x/y\)") as caught,
        folders.disk_errors("Unpacking", Path("/x")),
    ):
        raise OSError(number, os.strerror(number), "/x/y")
    assert "ERLLAMA_CACHE_DIR" not in caught.value.advice


def test_of_a_copy_the_target_is_named(cache):
    """A full disk is the disk that is written to, and only the cache's can be moved by a variable."""
    with pytest.raises(BuildError, match=r"\(/target/b\)"), folders.disk_errors("Installing", Path("/x")):
        raise OSError(errno.ENOSPC, "full", str(cache / "a"), None, "/target/b")
    with pytest.raises(BuildError, match=r"cache") as caught, folders.disk_errors("Keeping", cache / "x"):
        raise OSError(errno.ENOSPC, "full")
    assert "ERLLAMA_CACHE_DIR" in caught.value.advice


def test_other_errors_pass():
    """What does not come from the operating system is not dressed up as if it did."""
    with pytest.raises(ValueError, match="x"), folders.disk_errors("Unpacking", Path("/x")):
        raise ValueError("x")


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
