"""The command line as its user meets it: in a process of its own, or called for speed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from erllama.cli import main
from erllama.files import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPO = Path(__file__).resolve().parents[2]
_started: list[subprocess.Popen[bytes]] = []
ENTRY = "import sys; from erllama.cli import main; sys.exit(main())"


class Said(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    """`erllama ARGUMENTS` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONWARNINGS": "error"}
    given = options.pop("env", {})
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    process = subprocess.Popen([sys.executable, "-c", ENTRY, *arguments], env=environment | given, **options)
    _started.append(process)
    return process


def on_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], bytes, bytes]:
    """`erllama ARGUMENTS` with a terminal for stderr, ended: the process, its output, what was shown."""
    ours, theirs = pty.openpty()
    process = start(*arguments, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # Linux reports the closed other end of a pty as EIO
    os.close(ours)
    out, _ = process.communicate()
    return process, out, shown


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Whatever a test started ends with it, also when the test failed."""
    yield
    while _started:
        process = _started.pop()
        process.kill()  # harmless when it has been waited for
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch) -> None:
    """What tests keep is not what the user keeps; models, builds and hashes are."""
    usual, own = cache_dir(), tmp_path / "cache"
    own.mkdir()
    for shared in ("models", "fingerprints", "variants", "bindings", "native"):
        (usual / shared).mkdir(parents=True, exist_ok=True)
        (own / shared).symlink_to(usual / shared)
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(own))


@pytest.fixture
def erllama_command(capfd) -> Callable[..., Said]:
    """Call the command in this process and return its status and what it printed."""

    def call(*arguments: str) -> Said:
        status = main(arguments)
        out, err = capfd.readouterr()
        return Said(status, out, err)

    return call
