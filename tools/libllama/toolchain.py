"""Find CMake, ninja and the C++ compiler, and say what to install when one is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.libllama.errors import BuildError

CMAKE_MIN = (3, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """The compilers, as paths, and `id`: their own words for what they are."""

    cc: str
    cxx: str
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
    lines = [_first_line(cc), _first_line(cxx)]
    for program, line in zip((cc, cxx), lines, strict=True):
        if not line:
            raise BuildError(f"The compiler {program} does not run.", advice=f"Try: {program} --version")
    return Compilers(cc=cc, cxx=cxx, id=" | ".join(lines))


def find_toolchain(compilers: Compilers) -> Toolchain:
    """The compilers with CMake and ninja.

    Raises: BuildError naming the missing tool and how to get it.
    """
    return Toolchain(compilers=compilers, cmake=find_cmake(), ninja=find_ninja())


def find_compiler(names: tuple[str, ...]) -> str:
    """A compiler: the one that the environment variable `names[0]` names, else the first on the path.

    Raises: BuildError if there is none.
    """
    variable, *candidates = names
    if named := os.environ.get(variable):
        candidates = [named]
    for name in candidates:
        if found := shutil.which(name):
            return found
    language = "C++" if variable == "CXX" else "C"
    looked = f"{variable}={named}" if named else ", ".join(candidates)
    raise BuildError(
        f"No {language} compiler found (looked for {looked}).",
        advice="Debian, Ubuntu: apt install g++. Fedora: dnf install gcc-c++. macOS: xcode-select --install.",
    )


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


def _first_line(program: str) -> str:
    """The first line of `program --version`, empty if it cannot be run."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""
