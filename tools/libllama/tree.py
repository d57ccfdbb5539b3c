"""A folder of sources as one digest, and the files in which two such folders differ.

The manifest of a tree is one line per file, `<path> <sha256>`, sorted by path; the tree's digest is
the SHA-256 of that text. So a manifest proves itself against a pin that holds only the digest, and
a stored manifest lets a changed tree be compared file by file.

Left out are the files at the top that are ours (`pin.toml`, `README.md`) and everything that belongs
to a version control system: upstream's archive carries a `.git` file, which would turn the folder
into a broken nested repository. So are `__pycache__` folders, which appear by themselves. Links are
followed; one that leads nowhere counts by the place it names.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OURS = frozenset({"pin.toml", "README.md"})
MANIFEST_NAME = ".erllama-manifest"
UNPACKING_NAME = ".erllama-unpacking"
LOCK_NAME = ".erllama-lock"
_NOT_SOURCES = (".git", ".hg", ".svn")


def is_source(relative: str) -> bool:
    """Whether a path (relative to the tree, with forward slashes) belongs to the tree."""
    parts = relative.split("/")
    if relative in OURS or parts[0] in _NOT_SOURCES or parts[0].startswith(".erllama-"):
        return False
    return "__pycache__" not in parts


def iter_files(root: Path) -> Iterator[str]:
    """Relative paths of all files of the tree, in no particular order."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link back into the tree
            folders.clear()
            continue
        seen.add(real)
        prefix = os.path.relpath(folder, root)
        prefix = "" if prefix == "." else prefix.replace(os.sep, "/") + "/"
        folders[:] = [name for name in folders if is_source(f"{prefix}{name}/")]
        yield from (prefix + name for name in names if is_source(prefix + name))


def file_digest(path: Path) -> str:
    """SHA-256 of one file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan(root: Path) -> dict[str, str]:
    """Path → SHA-256 of every file of the tree; empty for a folder that does not exist."""
    return {path: digest for path in iter_files(root) if (digest := _digest(root / path))}


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of where a dangling link leads; empty for what holds no content (a socket)."""
    if path.is_file():
        return file_digest(path)
    return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest() if path.is_symlink() else ""


def manifest_text(digests: dict[str, str]) -> str:
    """The manifest of a scanned tree."""
    return "".join(f"{path} {digests[path]}\n" for path in sorted(digests))


def tree_digest(digests: dict[str, str]) -> str:
    """The digest of a scanned tree."""
    return hashlib.sha256(manifest_text(digests).encode()).hexdigest()


def parse_manifest(text: str) -> dict[str, str]:
    """A manifest's text as path → SHA-256; lines that are none are left out, so that the digest differs."""
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return {path: digest for path, space, digest in pairs if space}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeDiff:
    """How a tree on disk departs from the one expected; each list is sorted."""

    changed: list[str]
    missing: list[str]
    extra: list[str]

    def describe(self, limit: int = 5) -> str:
        """One phrase per kind of difference, naming at most `limit` files of each."""
        parts = []
        for label, names in (("changed", self.changed), ("missing", self.missing), ("extra", self.extra)):
            if names:
                more = f" and {len(names) - limit} more" if len(names) > limit else ""
                parts.append(f"{label}: {', '.join(names[:limit])}{more}")
        return "; ".join(parts)


def compare(expected: dict[str, str], found: dict[str, str]) -> TreeDiff:
    """Compare two scans."""
    return TreeDiff(
        changed=sorted(path for path in expected.keys() & found.keys() if expected[path] != found[path]),
        missing=sorted(expected.keys() - found.keys()),
        extra=sorted(found.keys() - expected.keys()),
    )
