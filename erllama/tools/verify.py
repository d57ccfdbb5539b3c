"""What is wrong in a folder's files, and taking it away.

A file is wrong if it is not what its head says, or if what it hangs behind is not there: a base needs its
parent's base, other parts need any part of their parent. This is the rule of the store's own scan
(`kvcache.recover`), with payloads read as well, so what is removed here would be of no use to anybody.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.recover import parse_file_name, quarantine_file, scan, sweep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from erllama.kvcache.root import Root

    from .folder import StoredFile

_MISSING: Final = "orphan: its parent is missing"
_DAMAGED: Final = "unusable: its parent is damaged"
_BEHIND: Final = {
    _MISSING: "orphan: a block before it is missing",
    _DAMAGED: "unusable: a block before it is damaged",
}


@dataclass(frozen=True, slots=True)
class Wrong:
    """A file and what is wrong with it; `is_damaged`: with its own bytes."""

    path: str
    what: str
    is_damaged: bool


def find_wrong(files: Sequence[StoredFile], *, parents: bool = True) -> list[Wrong]:
    """Damaged files first, then what hangs behind them or behind nothing, unless without `parents`."""
    wrong = [Wrong(file.path, file.damage, is_damaged=True) for file in files if file.damage]
    return [*wrong, *_unreachable(files)] if parents else wrong


def _unreachable(files: Sequence[StoredFile]) -> Iterable[Wrong]:
    damaged = {
        part for file in files if file.damage and (part := parse_file_name(os.path.basename(file.path)))
    }
    damaged_names = {name for name, _ in damaged}
    names, bases = {ROOT_NAME}, {ROOT_NAME}
    why: dict[bytes, str] = {}
    whole = [
        (f, f.header, f.meta) for f in files if f.header is not None and f.meta is not None and not f.damage
    ]
    for file, header, meta in sorted(whole, key=lambda one: (one[2].start, one[1].kind)):
        is_base = header.kind is PartKind.BASE
        if meta.parent in (bases if is_base else names):
            names.add(meta.name)
            if is_base:
                bases.add(meta.name)
            continue
        is_damaged = (meta.parent, PartKind.BASE) in damaged if is_base else meta.parent in damaged_names
        direct = _DAMAGED if is_damaged else _MISSING
        what = _BEHIND[why[meta.parent]] if meta.parent in why and not is_damaged else direct
        why.setdefault(meta.name, direct if what == direct else why[meta.parent])
        yield Wrong(file.path, what, is_damaged=False)


def is_in_use(root: Root) -> bool:
    """Whether a living process has the folder open. Call under the removing lock."""
    owners = (entry.name.removesuffix(".lock") for entry in root.files.entries(root.owners))
    return any(owner != root.owner and not root.is_dead(owner) for owner in owners)


def remove_wrong(root: Root, wrong: Iterable[Wrong]) -> int:
    """Damaged files go to quarantine, what hangs behind them is removed; returns how many names went.

    Call under the removing lock, with nobody else in the folder. Killed in between, it leaves orphans.
    """
    damaged = [item.path for item in wrong if item.is_damaged and not item.path.endswith(".tmp")]
    n = sum(1 for path in damaged if quarantine_file(root, path))
    return n + sweep(root, scan(root, frozenset(), now=time.time()))
