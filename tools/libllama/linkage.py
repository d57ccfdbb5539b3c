"""What a built library is linked to, as the system's own tool lists it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tools.libllama.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Nothing here talks HTTPS (libssl, libcrypto), and libgomp halves the speed of every thread but one.
UNWANTED = re.compile(r"lib(ssl|crypto|gomp|omp)[.-]")


def linked(library: Path) -> list[str]:
    """The lines of `ldd` (macOS: `otool -L`) for one library; empty where there is no such tool."""
    tool = ["otool", "-L"] if sys.platform == "darwin" else ["ldd"]
    if shutil.which(tool[0]) is None:
        return []
    done = subprocess.run([*tool, str(library)], capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def check_linkage(libraries: Iterable[Path]) -> None:
    """Refuse libraries that are linked to what they must not be, or to what is not there.

    Raises: BuildError naming library and line.
    """
    for library in libraries:
        for line in linked(library):
            if UNWANTED.search(line):
                raise BuildError(
                    f"{library.name} is linked to {line.split()[0]}.",
                    advice="An option given with --cmake-arg must have turned that on; leave it away.",
                )
            if "not found" in line:
                raise BuildError(f"{library.name} does not find {line.split()[0]}.", advice="Try --clean.")
