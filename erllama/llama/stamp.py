"""The stamp that ties a compiled binding to its sources.

A stamp is `<base>+<sources>`: the base names the native build (pin, backend, options; chosen by
`build_libllama.py`), the second part is a hash of our own declarations and C++ here. It is compiled
into the binding and written next to it. `ffi.py` refuses a binding whose stamp is not the expected
one. Standard library only: the build runs this before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STAMP_FILE = "stamp.json"


def source_files(package_dir: Path) -> list[Path]:
    """The project's native sources under `erllama/llama/`, in a fixed order; empty if not shipped."""
    return sorted(
        [*package_dir.glob("cdef/*.h"), *package_dir.glob("shim*.h"), *package_dir.glob("shim*.cpp")]
    )


def sources_hash(package_dir: Path) -> str | None:
    """Sixteen hex digits over names and contents of the native sources; None if there are none."""
    digest = hashlib.sha256()
    files = source_files(package_dir)
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package_dir).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16] if files else None


def full_stamp(base: str, sources: str) -> str:
    """The stamp that is compiled in."""
    return f"{base}+{sources}"


def write_stamp(native_dir: Path, base: str, sources: str) -> None:
    """Record what the binding in `native_dir` was built from; replaces the file in one step."""
    text = json.dumps({"base": base, "sources": sources}, indent=1) + "\n"
    temporary = native_dir / (STAMP_FILE + ".tmp")
    temporary.write_text(text)
    temporary.replace(native_dir / STAMP_FILE)


def read_stamp(native_dir: Path) -> dict[str, str] | None:
    """What `write_stamp` recorded, or None when there is nothing usable."""
    try:
        recorded = json.loads((native_dir / STAMP_FILE).read_text())
        return {"base": str(recorded["base"]), "sources": str(recorded["sources"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def expected_stamp(native_dir: Path, package_dir: Path) -> str | None:
    """The stamp a binding in `native_dir` must carry; None when no finished build is recorded there."""
    recorded = read_stamp(native_dir)
    if recorded is None:
        return None
    return full_stamp(recorded["base"], sources_hash(package_dir) or recorded["sources"])
