"""Where upstream's own programs are, and how to get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from erllama.errors import NativeLibraryError
from erllama.llama.ffi import choose_native_dir

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = "python build_libllama.py --with-server-tools"


@dataclass(frozen=True, slots=True)
class Programs:
    """llama-server and llama-bench, built from the same sources with the same flags as our library."""

    server: Path
    bench: Path


def find_programs(native_dir: Path | None = None) -> Programs:
    """The programs beside the library in use. Raises: `NativeLibraryError` with the command to run."""
    folder = (native_dir or choose_native_dir()) / "tools"
    found = Programs(folder / "llama-server", folder / "llama-bench")
    missing = [path.name for path in (found.server, found.bench) if not path.is_file()]
    if missing:
        raise NativeLibraryError(
            f"{' and '.join(missing)} not built: {folder} does not hold them; run `{COMMAND}` in the checkout"
        )
    return found
