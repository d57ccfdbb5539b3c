"""Which CPU library to load on this machine: the best one that really runs.

ggml rates its CPU libraries by the features that the CPU reports. Some virtual machines report AMX
and fault when it is used, so a rating is not enough: each candidate decodes a tiny model in a child
process, best first, and the first that survives is taken. The answer is remembered per CPU and build.

`ERLLAMA_CPU_VARIANT` overrides: a name (`zen4`) or a path. Knows nothing but the standard library,
because the build uses it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from erllama.errors import NativeLibraryError
from erllama.files import cache_dir as cache_dir  # the build asks for it here

if TYPE_CHECKING:
    from collections.abc import Callable

OVERRIDE = "ERLLAMA_CPU_VARIANT"
BUILD_FILE = "build.json"
_PREFIX = "libggml-cpu"
_SELFTEST = Path(__file__).with_name("selftest.py")
_TIMEOUT_S = 120.0
_SILENT: Callable[[str], None] = lambda _text: None  # noqa: E731  # a default that reads as what it is


class Outcome(NamedTuple):
    """How a child process ended: exit code (negative: the signal that killed it) and what it printed."""

    code: int
    text: str

    @property
    def reason(self) -> str:
        """Why it failed, in words."""
        if self.code < 0:
            return f"died of {_signal_name(-self.code)}"
        return self.text.strip().splitlines()[-1] if self.text.strip() else f"exit code {self.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal: most have no name
        return f"signal {number}"


def choose(
    native_dir: Path,
    *,
    fresh: bool = False,
    log: Callable[[str], None] = _SILENT,
    run: Callable[[list[str]], Outcome] | None = None,
) -> Path | None:
    """The CPU library of `native_dir` to load on this machine; None if it holds none.

    The first call on a CPU takes seconds (one child process per candidate), later ones a millisecond.
    `fresh` tries again what is remembered; `log` gets a sentence per candidate tried; `run` replaces
    the child processes in tests.

    Raises: NativeLibraryError if no candidate works, or the override names none.
    Thread: any, but not the event loop's: it waits for child processes.
    """
    libraries = {path.stem.removeprefix(_PREFIX).lstrip("-"): path for path in _libraries(native_dir)}
    if named := os.environ.get(OVERRIDE):
        return _overridden(named, libraries)
    if not libraries:
        return None
    memory = cache_dir() / "variants" / f"{memory_key(native_dir)}.json"
    remembered = None if fresh else _recall(memory)
    if remembered in libraries:
        return libraries[remembered]
    name = _try_all(native_dir, libraries, log, run or _run)
    _remember(memory, name)
    return libraries[name]


def rank(libraries: dict[str, Path], run: Callable[[list[str]], Outcome]) -> list[str]:
    """Names of the variants that apply to this CPU, best first."""
    scores = {}
    for name, path in libraries.items():
        outcome = run([sys.executable, "-I", str(_SELFTEST), "--score", str(path)])
        scores[name] = int(outcome.text) if outcome.code == 0 else 0
    return sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))


def memory_key(native_dir: Path) -> str:
    """What an answer is remembered under: this CPU and this build."""
    try:
        build = json.loads((native_dir / BUILD_FILE).read_text())["stamp"]
    except (OSError, ValueError, KeyError):
        build = str(native_dir.absolute())
    return hashlib.sha256(f"{cpu_identity()}\n{build}".encode()).hexdigest()[:24]


def cpu_identity() -> str:
    """The CPU's model and feature list, as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        done = _run(["sysctl", "-n", "machdep.cpu.brand_string"]) if sys.platform == "darwin" else None
        return done.text.strip() if done else " ".join(os.uname())
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "cpu family", "model")
    return "\n".join(line for line in lines if line.split("\t")[0].strip(" :") in wanted)


def _libraries(native_dir: Path) -> list[Path]:
    return sorted(p for p in native_dir.glob(f"{_PREFIX}*") if p.suffix in {".so", ".dylib"})


def _overridden(named: str, libraries: dict[str, Path]) -> Path:
    if named in libraries:
        return libraries[named]
    if os.sep in named and Path(named).is_file():
        return Path(named)
    known = ", ".join(libraries) or "none"
    raise NativeLibraryError(f"{OVERRIDE}={named} is neither a file nor a variant of this build ({known})")


def _try_all(
    native_dir: Path,
    libraries: dict[str, Path],
    log: Callable[[str], None],
    run: Callable[[list[str]], Outcome],
) -> str:
    failures: dict[str, str] = {}
    for name in rank(libraries, run):
        outcome = run([sys.executable, str(_SELFTEST), str(native_dir), str(libraries[name])])
        if outcome.code == 0:
            log(f"CPU variant {name or 'native'}: works")
            return name
        failures[name] = outcome.reason
        log(f"CPU variant {name or 'native'}: {outcome.reason}; trying the next")
    tried = "; ".join(f"{name or 'native'}: {reason}" for name, reason in failures.items())
    raise NativeLibraryError(
        f"no CPU library of {native_dir} runs on this machine ({tried or 'none applies to this CPU'})",
        detail=failures,
    )


def _run(command: list[str]) -> Outcome:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(1, f"not finished after {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Outcome(1, str(error))
    return Outcome(done.returncode, done.stdout.decode(errors="replace"))


def _recall(memory: Path) -> str | None:
    try:
        name = json.loads(memory.read_text())["variant"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _remember(memory: Path, name: str) -> None:
    """Keep the answer; a cache folder that cannot be written only costs the next start its seconds."""
    partial = memory.with_name(f".{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"variant": name}))
        partial.replace(memory)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
