"""Which compiled objects of an earlier build may stay.

Ninja compiles a file again when its command differs or its time is newer than the object's. It knows
nothing of compiler flags from the environment, of a compiler that was replaced in its place, or of
sources that came with an old time (`tar -x`, `rsync -a`). So the build folder carries a mark that says
what its objects were made from, written before the first of them; where ninja would be wrong, the
folder is emptied.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tools.libllama.source import Source

_MARK = "erllama-objects.json"
_NINJA_LOG = ".ninja_log"  # written whenever an object is finished


def make_reusable(build: Path, source: Source, recipe: str) -> None:
    """Leave in the build folder only what ninja can judge; afterwards it is marked as this build's.

    `recipe` names everything but the sources that decides about an object.
    """
    found = _read(build / _MARK)
    wanted = {"recipe": recipe, "source": source.digest, "files": source.files}
    if found == wanted:
        return
    if found.get("recipe") != recipe or not _ninja_sees(build, source, found.get("files") or {}):
        _empty(build)
    build.mkdir(parents=True, exist_ok=True)
    partial = build / f"{_MARK}.{os.getpid()}"
    partial.write_text(json.dumps(wanted))
    partial.replace(build / _MARK)


def _ninja_sees(build: Path, source: Source, before: dict[str, str]) -> bool:
    """Whether every file that changed since is newer than every object, and none came or went."""
    if not before or before.keys() != source.files.keys():
        return False
    try:
        last_ns = (build / _NINJA_LOG).stat().st_mtime_ns
    except OSError:
        return False
    changed = [path for path, digest in source.files.items() if before[path] != digest]
    return all((source.root / path).stat().st_mtime_ns > last_ns for path in changed)


def _empty(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
