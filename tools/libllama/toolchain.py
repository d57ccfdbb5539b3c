"""Find CMake, ninja and the C++ compiler, and say what to install when one is missing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.libllama.errors import BuildError

CMAKE_MIN = (3, 20)
# Backend → what its compiler is called, which variables name it, and where it lies if it is not on the path.
_TOOLKITS = {
    "cuda": ("nvcc", "CUDACXX", "/usr/local/cuda/bin/nvcc"),
    "hip": ("hipcc", "HIPCXX", "/opt/rocm/bin/hipcc"),
    "vulkan": ("glslc", "", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """The compilers, as command lines that begin with a path, and `id`: their own words for what they are."""

    cc: tuple[str, ...]
    cxx: tuple[str, ...]
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """All programs of a compile, as paths."""

    compilers: Compilers
    cmake: str
    ninja: str


def find_compilers() -> Compilers:
    """The C and C++ compiler of this machine.

    Raises: BuildError if one is missing or does not run.
    """
    cc, cxx = find_compiler(("CC", "cc", "gcc", "clang")), find_compiler(("CXX", "c++", "g++", "clang++"))
    return Compilers(cc=cc, cxx=cxx, id=f"{_compiler_id(cc)} | {_compiler_id(cxx)}")


def _compiler_id(command: tuple[str, ...]) -> str:
    """What a compiler says it is, and the options that it is always given."""
    line = _first_line(*command)
    if not line:
        raise BuildError(
            f"The compiler {shlex.join(command)} does not run.",
            advice=f"Try: {shlex.join(command)} --version",
        )
    return " ".join([line, *(word for word in command[1:] if word.startswith("-"))])


def toolkit_id(backend: str) -> str:
    """What else decides what comes out: a GPU toolkit's words for what it is, macOS's SDK; often nothing."""
    said = []
    if backend in _TOOLKITS:
        name, variable, usual = _TOOLKITS[backend]
        program = os.environ.get(variable, "") or shutil.which(name) or usual
        said.append(_output(program, "--version") if program else "")
    if sys.platform == "darwin":
        said.append(_output("xcrun", "--show-sdk-version"))
    return "\n".join(said)


def find_toolchain(compilers: Compilers) -> Toolchain:
    """The compilers with CMake and ninja.

    Raises: BuildError naming the missing tool and how to get it.
    """
    return Toolchain(compilers=compilers, cmake=find_cmake(), ninja=find_ninja())


def find_compiler(names: tuple[str, ...]) -> tuple[str, ...]:
    """A compiler: the command in the environment variable `names[0]`, else the first name on the path.

    Raises: BuildError if there is none.
    """
    variable, *candidates = names
    if named := os.environ.get(variable):
        candidates = [named]
    for candidate in candidates:
        name, *options = _split(candidate) or [""]
        if found := shutil.which(name):
            return (found, *options)
    language = "C++" if variable == "CXX" else "C"
    looked = f"{variable}={named}" if named else ", ".join(candidates)
    raise BuildError(
        f"No {language} compiler found (looked for {looked}).",
        advice="Debian, Ubuntu: apt install g++. Fedora: dnf install gcc-c++. macOS: xcode-select --install.",
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an unpaired quote
        return [command]


def find_cmake() -> str:
    """A CMake that is new enough.

    Raises: BuildError if there is none.
    """
    seen = []
    for path in _candidates("cmake"):
        if (version := cmake_version(path)) >= CMAKE_MIN:
            return path
        seen.append(f"{path} is {'.'.join(map(str, version)) or 'unusable'}")
    raise BuildError(
        f"CMake {'.'.join(map(str, CMAKE_MIN))} or newer is needed; {'; '.join(seen) or 'none was found'}.",
        advice=f"{sys.executable} -m pip install cmake   (or your system's package)",
    )


def find_ninja() -> str:
    """A ninja that runs.

    Raises: BuildError if there is none.
    """
    for path in _candidates("ninja"):
        if _first_line(path):
            return path
    raise BuildError(
        "ninja was not found.",
        advice=f"{sys.executable} -m pip install ninja   (or your system's package: ninja-build)",
    )


def missing_requirements() -> list[str]:
    """What of `cmake` and `ninja` an isolated build has to ask the package index for."""
    missing = []
    for name, find in (("cmake>=3.20", find_cmake), ("ninja", find_ninja)):
        try:
            find()
        except BuildError:
            missing.append(name)
    return missing


def cmake_version(path: str) -> tuple[int, ...]:
    """A CMake's version as numbers; empty if it does not run."""
    found = re.search(r"version (\d+)\.(\d+)", _first_line(path))
    return (int(found[1]), int(found[2])) if found else ()


def _candidates(name: str) -> list[str]:
    """On the path, and beside this interpreter, where a package index's wheel puts its programs."""
    beside = Path(sys.executable).parent / name
    found = [shutil.which(name), str(beside) if os.access(beside, os.X_OK) else None]
    return [path for path in dict.fromkeys(found) if path]


def _first_line(*command: str) -> str:
    """The first line of `command --version`, empty if it cannot be run."""
    lines = _output(*command, "--version").strip().splitlines()
    return lines[0].strip() if lines else ""


def _output(*command: str) -> str:
    """What a command prints, empty if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
