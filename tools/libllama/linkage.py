"""What a built library is linked to, as the compiler's own tools list it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tools.libllama.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Nothing here talks HTTPS (libssl, libcrypto), and libgomp halves the speed of every thread but one.
_UNWANTED = re.compile(r"lib(ssl|crypto|gomp|omp)[.-]")
_OURS = re.compile(r"lib(llama|ggml)[.-]")
_NEEDED = re.compile(r"NEEDED\)?\s.*\[(.+)\]")
_READERS = ("readelf", "llvm-readelf")


def needed(library: Path) -> list[str]:
    """The names that a library itself asks for; not what those ask for in turn, which is not our doing.

    Raises: BuildError if this machine has no tool that can tell.
    """
    if sys.platform == "darwin":
        lines = _output("otool", "-L", str(library)).splitlines()[1:]
        return [line.split()[0].rpartition("/")[2] for line in lines if line.strip()]
    reader = next((found for name in _READERS if (found := shutil.which(name))), None)
    if reader is None:
        raise BuildError(
            f"{_READERS[0]} was not found, without which the build cannot be checked.",
            advice="It belongs to binutils: apt install binutils.",
        )
    return _NEEDED.findall(_output(reader, "-d", str(library)))


def check_linkage(libraries: Sequence[Path]) -> None:
    """Refuse libraries that are linked to what they must not be, or to one of ours that is not there.

    Raises: BuildError naming library and line.
    """
    there = {library.name for library in libraries}
    for library in libraries:
        for name in needed(library):
            if _UNWANTED.search(name):
                raise BuildError(
                    f"{library.name} is linked to {name}.",
                    advice="An option given with --cmake-arg must have turned that on; leave it away.",
                )
            if _OURS.match(name) and name not in there:
                raise BuildError(f"{library.name} does not find {name}.", advice="Try --clean.")


def _output(*command: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}  # the words are matched
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} cannot read {command[-1]}.", log_tail=done.stderr.splitlines()[-3:])
    return done.stdout
