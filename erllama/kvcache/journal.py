"""Hit counts that survive a restart: one small file per process, replaced by rename, merged at start.

A CBOR map {"v": 1, "hits": {name ‖ kind byte: [hits, seconds since the epoch]}}. Hits are worth an order of
eviction and nothing else, so a journal that cannot be read is dropped with a log line.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

import cbor2

from .kinds import NAME_BYTES
from .score import add_hit

if TYPE_CHECKING:
    from .root import Root

log = logging.getLogger(__name__)
Hits = dict[bytes, tuple[float, int]]
JOURNAL_VERSION: Final = 1
MAX_ENTRIES: Final = 200_000
_SUFFIX: Final = ".hits"


def write_journal(root: Root, hits: Hits) -> None:
    """Replace this process's journal; of too many entries the most hit ones are kept."""
    if len(hits) > MAX_ENTRIES:
        hits = dict(sorted(hits.items(), key=lambda item: -item[1][0])[:MAX_ENTRIES])
    data = cbor2.dumps({"v": JOURNAL_VERSION, "hits": {key: list(value) for key, value in hits.items()}})
    root.files.write_small(os.path.join(root.hits, root.owner + _SUFFIX), data)


def read_journals(root: Root, *, everybody: bool = False) -> Hits:
    """Hits of processes that are gone; counts of one part are added as of the later time.

    Those of the living are theirs: they go on counting. `everybody`: all, for a person to look at.
    """
    merged: Hits = {}
    if not root.files.exists(root.hits):
        return merged
    for entry in root.files.entries(root.hits):
        owner = entry.name.removesuffix(_SUFFIX)
        if owner == entry.name or not (everybody or owner == root.owner or root.is_dead(owner)):
            continue
        for key, (hits, at) in _read_one(root, entry.name).items():
            old_hits, old_at = merged.get(key, (0.0, at))
            early, late = sorted(((old_hits, old_at), (hits, at)), key=lambda pair: pair[1])
            # add_hit decays to the later time and adds one; one less and the other's hits more.
            merged[key] = (add_hit(early[0], late[1] - early[1]) - 1.0 + late[0], late[1])
    return merged


def drop_dead_journals(root: Root) -> None:
    """Remove journals of processes that are gone, once their hits are in a living one's."""
    for entry in root.files.entries(root.hits):
        owner = entry.name.removesuffix(_SUFFIX).removesuffix(_SUFFIX + ".new")
        if owner != root.owner and root.is_dead(owner):
            root.files.unlink(os.path.join(root.hits, entry.name))


def _read_one(root: Root, name: str) -> Hits:
    try:
        fields = cbor2.loads(root.files.read_small(os.path.join(root.hits, name)))
        if fields["v"] != JOURNAL_VERSION:
            raise ValueError(f"version {fields['v']}")
        return {
            bytes(key): (float(hits), int(at))
            for key, (hits, at) in fields["hits"].items()
            if len(key) == NAME_BYTES + 1 and 0 <= hits < 1e9
        }
    except Exception as broken:  # any damage: order of eviction is all that is lost
        log.warning("hit journal %s dropped: %s", name, str(broken))
        return {}
