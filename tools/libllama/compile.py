"""Run CMake and ninja in the build folder, with progress, a log and an exit that leaves no orphans."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from tools.libllama import runtime
from tools.libllama.errors import BuildError
from tools.libllama.folders import require_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.libllama.profile import Profile
    from tools.libllama.progress import Progress
    from tools.libllama.toolchain import Toolchain

_BUILD_ROOM_BYTES = 400 * 2**20
_CONFIGURED = "erllama-configured.json"
_INTERRUPTED = "interrupted by user"
_ADVICE = (
    ("No space left on device", "The disk is full: free some space and run the same command again."),
    ("Killed signal terminated program", "The compiler was killed, most likely for memory: try --jobs 1."),
    ("Cannot allocate memory", "Memory ran out: try --jobs 1."),
    (
        "CUDA_CUDART",
        "CMake found no CUDA toolkit: install it, or name it: --cmake-arg=-DCUDAToolkit_ROOT=DIR.",
    ),
    ("CMAKE_CUDA_COMPILER", "CMake found no nvcc: install the CUDA toolkit, or leave --backend cuda away."),
    (
        "Could NOT find Vulkan",
        "Install Vulkan's headers and glslc (Debian: libvulkan-dev glslc spirv-headers).",
    ),
    ("hipconfig", "CMake found no ROCm: install it, or leave --backend hip away."),
    ("compiler identification is unknown", "The compiler does not work: try it on a small file."),
)


def configure(
    source: Path, build: Path, profile: Profile, tools: Toolchain, log: Path, progress: Progress, lock_fd: int
) -> None:
    """Run CMake, unless the folder is already configured just so.

    A configuration that was interrupted, or made for other options, tools or another place, is begun
    anew. Which objects may stay is decided before, by `reuse.make_reusable`.

    Raises: BuildError with the last lines of the log and advice.
    """
    wanted = {
        "source": str(source),
        "args": profile.cmake_args,
        "cmake": tools.cmake,
        "ninja": tools.ninja,
        "compilers": [list(tools.compilers.cc), list(tools.compilers.cxx), tools.compilers.id],
    }
    mark = build / _CONFIGURED
    if _read_json(mark) == wanted and (build / "build.ninja").is_file():
        return
    mark.unlink(missing_ok=True)
    (build / "CMakeCache.txt").unlink(missing_ok=True)
    # Libraries that only the earlier options asked for would be collected with the new ones.
    shutil.rmtree(build / "bin", ignore_errors=True)
    progress.step(f"Configuring llama.cpp for {profile.backend}")
    command = [tools.cmake, "-G", "Ninja", "-S", str(source), "-B", str(build)]
    # CMake spells a compiler with a launcher or options as a list.
    cc, cxx = (";".join(words) for words in (tools.compilers.cc, tools.compilers.cxx))
    command += [f"-DCMAKE_MAKE_PROGRAM={tools.ninja}", f"-DCMAKE_C_COMPILER={cc}"]
    command += [f"-DCMAKE_CXX_COMPILER={cxx}", *profile.cmake_args]
    run_logged(command, log=log, on_line=progress.update, lock_fd=lock_fd, what="Configuring")
    mark.write_text(json.dumps(wanted))


def compile_targets(
    build: Path, profile: Profile, tools: Toolchain, jobs: int, log: Path, progress: Progress, lock_fd: int
) -> None:
    """Compile what the profile asks for; what is already compiled is not compiled again.

    Raises: BuildError with the last lines of the log and advice.
    """
    require_space(build, _BUILD_ROOM_BYTES, "compiling")
    progress.step(f"Compiling {', '.join(profile.targets)} with {jobs} jobs (log: {log})")
    command = [tools.ninja, "-C", str(build), "-j", str(jobs), *profile.targets]
    run_logged(command, log=log, on_line=progress.feed, lock_fd=lock_fd, what="Compiling")


def run_logged(
    command: list[str], *, log: Path, on_line: Callable[[str], None], lock_fd: int | None, what: str
) -> None:
    """Run a command whose output goes to a log file (appended) and, line by line, to `on_line`.

    It ends with us, and so does all that it starts, however we end; until then it holds the lock.

    Raises: BuildError on a non-zero exit.
    """
    tail: list[str] = []
    with log.open("a") as file:
        print(f"$ {' '.join(command)}", file=file, flush=True)
        keep = () if lock_fd is None else (lock_fd,)
        environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
        with runtime.child.leashed(
            command, stdout=subprocess.PIPE, text=True, environment=environment, keep=keep
        ) as process:
            for line in process.stdout:
                file.write(line)
                tail = [*tail[-39:], line.rstrip()]
                on_line(line.rstrip())
            code = process.wait()
    if code != 0 and tail and _INTERRUPTED in tail[-1]:
        # Ninja was told to end by somebody else than us.
        raise KeyboardInterrupt
    if code != 0:
        raise BuildError(
            f"{what} failed with exit code {code}.",
            advice=f"{advise(tail)} The whole log: {log}".strip(),
            log_tail=_relevant(tail),
        )


def advise(tail: list[str]) -> str:
    """What to do about a failed command, if its output says something we know."""
    text = "\n".join(tail)
    return next((advice for sign, advice in _ADVICE if sign in text), "")


def _relevant(tail: list[str], limit: int = 15) -> list[str]:
    """The part of the output that explains a failure: from the first error on, else the end."""
    for at, line in enumerate(tail):
        if "error" in line.lower() or line.startswith("FAILED"):
            return tail[at : at + limit]
    return tail[-limit:]


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
