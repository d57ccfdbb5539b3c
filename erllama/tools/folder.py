"""A cache folder as the operator's tools see it: read without locks, nothing created, nothing changed."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from erllama.kvcache.files import Files
from erllama.kvcache.header import Damaged
from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.read import read_head, verify_file
from erllama.kvcache.recover import parse_file_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from erllama.kvcache.header import Header
    from erllama.kvcache.meta import NodeMeta


@dataclass(slots=True, eq=False)
class StoredFile:
    """One file: its head, or what is wrong with it."""

    path: str
    n_bytes: int
    mtime: float
    header: Header | None = None
    meta: NodeMeta | None = None
    damage: str | None = None


@dataclass(slots=True, eq=False)
class StoredNode:
    """One node with its files and children."""

    meta: NodeMeta
    files: dict[PartKind, StoredFile] = field(default_factory=dict)
    children: list[StoredNode] = field(default_factory=list)
    is_orphan: bool = False

    @property
    def n_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.n_bytes for file in self.files.values())


def nodes_folder(path: str) -> str:
    """Where the files of a tier's root are; a plain folder of files is taken as it is."""
    inner = os.path.join(path, "nodes")
    return inner if os.path.isdir(inner) else path


def expand(paths: Iterable[str]) -> list[str]:
    """Files, and all cache files of folders. Raises: FileNotFoundError, also if a folder is no cache."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            folder = nodes_folder(path)
            files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if ".kvc" in name]
            if not files and folder == path:
                raise FileNotFoundError(f"{path}: not a cache folder (no nodes/ and no .kvc files in it)")
            found += files
        elif os.path.exists(path):
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: no such file or folder")
    return found


def read_file(path: str, *, whole: bool = False) -> StoredFile:
    """Read a file's head, or with `whole` check all of it; damage is a fact here, not an error."""
    stat = os.stat(path)
    file = StoredFile(path, stat.st_size, stat.st_mtime)
    if path.endswith(".tmp"):
        file.damage = "temporary"
        return file
    try:
        check = verify_file if whole else read_head
        file.header, file.meta = check(Files(), path)
        expected = parse_file_name(os.path.basename(path))
        if expected is not None and expected != (file.meta.name, file.header.kind):
            file.damage = "name: content belongs to another name"
    except Damaged as damage:
        file.damage = str(damage)
    return file


def build_nodes(files: Iterable[StoredFile]) -> dict[bytes, StoredNode]:
    """Nodes by name, linked to their parents; orphans are marked."""
    nodes: dict[bytes, StoredNode] = {}
    for file in files:
        if file.meta is not None and file.header is not None and file.damage is None:
            node = nodes.setdefault(file.meta.name, StoredNode(file.meta))
            node.files[file.header.kind] = file
    for node in sorted(nodes.values(), key=lambda n: n.meta.start):
        parent = nodes.get(node.meta.parent)
        if parent is not None:
            parent.children.append(node)
            node.is_orphan = parent.is_orphan
        else:
            node.is_orphan = node.meta.parent != ROOT_NAME
    return nodes


def roots(nodes: dict[bytes, StoredNode]) -> list[StoredNode]:
    """Nodes without a parent here, the largest subtree first."""
    tops = [node for node in nodes.values() if node.meta.parent not in nodes]
    return sorted(tops, key=subtree_bytes, reverse=True)


def subtree_bytes(node: StoredNode) -> int:
    """Bytes of a node and everything behind it; conversations are deep, so no recursion."""
    total, todo = 0, [node]
    while todo:
        node = todo.pop()
        total += node.n_bytes
        todo += node.children
    return total


def count_by(files: Iterable[StoredFile], what: str) -> Counter[str]:
    """Bytes by a header field's name."""
    counts: Counter[str] = Counter()
    for file in files:
        if file.header is not None:
            counts[getattr(file.header, what).name.lower()] += file.n_bytes
    return counts
