"""Finding every inconsistency: in the index, between index and RAM, between index and files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .header import Damaged
from .parts import RAM
from .read import verify_file
from .recover import parse_file_name
from .root import TierBusy

if TYPE_CHECKING:
    from .catalog import Catalog
    from .evictor import Evictor
    from .filetier import FileTier
    from .recover import PartId
    from .runner import Runner
    from .tierset import TierSet, TierState


@dataclass(frozen=True, slots=True)
class Finding:
    """One inconsistency. `kind` is a stable word, `where` a name or path."""

    kind: str
    where: str
    detail: str = ""


def check_index(catalog: Catalog) -> list[Finding]:
    """Closure, positions, parts, RAM copies and their bytes."""
    tree, found = catalog.tree, list[Finding]()
    rows = list(tree.rows())
    if len(rows) != tree.n_nodes:
        found.append(Finding("count", "index", f"{len(rows)} nodes reachable, {tree.n_nodes} counted"))
    copies = 0
    for row in rows:
        name, parent = tree.names.name(row).hex(), tree.parent[row]
        if tree.find(tree.names.name(row)) != row:
            found.append(Finding("name", name, "not found by its name"))
        if tree.parent[parent] and tree.end(parent) != tree.start[row]:
            found.append(Finding("position", name, f"starts at {tree.start[row]}"))
        if not tree.part_rows(row):
            found.append(Finding("empty", name, "a node without parts"))
        for part in tree.part_rows(row):
            copies += part in catalog.ram
            found += _check_part(catalog, part, name)
        if catalog.slot_of(row) is not None and tree.parent[parent] and catalog.slot_of(parent) is None:
            found.append(Finding("closure", name, "on a file tier, its parent is not"))
    if copies != len(catalog.ram):
        found.append(Finding("copies", "ram", f"{len(catalog.ram) - copies} copies of nothing"))
    if catalog.arena.used_bytes > catalog.arena.max_bytes:
        found.append(Finding("budget", "ram", f"{catalog.arena.used_bytes} bytes used"))
    return found


def _check_part(catalog: Catalog, part: int, name: str) -> list[Finding]:
    parts = catalog.tree.parts
    if (part in catalog.ram) != (parts.hot[part] == 1):
        return [Finding("copies", name, "a copy that is not there, or not known")]
    if parts.home[part] == RAM and part not in catalog.ram:
        return [Finding("lost", name, "a part that is nowhere")]
    return []


def check_files(tier: FileTier, known: set[PartId]) -> list[Finding]:
    """Compare a tier's folder with what the index holds of it; reads every payload. Thread: a worker."""
    root, found = tier.root, []
    seen: set[PartId] = set()
    total = 0
    for entry in root.files.entries(root.nodes):
        path = os.path.join(root.nodes, entry.name)
        total += entry.n_bytes
        if entry.name.endswith(".tmp"):
            if root.is_dead(entry.name.rsplit(".", 2)[-2]):
                found.append(Finding("temporary", path, "of a dead process"))
            continue
        part = parse_file_name(entry.name)
        if part is None:
            found.append(Finding("foreign", path))
            continue
        seen.add(part)
        try:
            verify_file(root.files, path)
        except Damaged as damage:
            found.append(Finding("damaged", path, str(damage)))
        if part not in known:
            found.append(Finding("unknown", path, "not in the index"))
    found += [Finding("missing", root.target(*part), "in the index only") for part in known - seen]
    used = root.used_bytes()
    if used != total:
        found.append(Finding("usage", root.path, f"counter says {used}, files take {total}"))
    if total > root.max_bytes:
        found.append(Finding("budget", root.path, f"{total} of {root.max_bytes} bytes"))
    return found


async def check_store(
    catalog: Catalog, tiers: TierSet, evictor: Evictor, *, run: Runner, fix: bool
) -> list[Finding]:
    """All findings; with `fix`, files are brought in order and the index with them. Best when idle."""
    await tiers.empty_trash()
    found = check_index(catalog)
    for state in tiers:
        if not state.on:
            found.append(Finding("off", state.tier.root.path, state.error or ""))
            continue
        files = await run(_check_locked, state.tier, catalog.known_parts(state.slot).ids())
        files = [finding for finding in files if not _is_served_elsewhere(catalog, state, finding)]
        found += files
        if fix and files:
            await _fix(tiers, evictor, state, files)
    return found


def _is_served_elsewhere(catalog: Catalog, state: TierState, finding: Finding) -> bool:
    """A file that is not in the index because another tier holds the same part."""
    ref = parse_file_name(os.path.basename(finding.where))
    part = catalog.part_of(ref) if finding.kind == "unknown" and ref is not None else 0
    return part != 0 and catalog.tree.parts.home[part] not in (RAM, state.slot)


def _check_locked(tier: FileTier, known: set[PartId]) -> list[Finding]:
    if tier.root.read_only:
        return []
    try:
        with tier.root.removing():
            return check_files(tier, known)
    except TierBusy:
        return [Finding("busy", tier.root.path, "another process is removing files")]


async def _fix(tiers: TierSet, evictor: Evictor, state: TierState, files: list[Finding]) -> None:
    for finding in files:
        part = parse_file_name(os.path.basename(finding.where))
        if part is not None and finding.kind in ("damaged", "missing"):
            what = "missing" if finding.kind == "missing" else "payload"
            tiers.damaged(part, Damaged(what, finding.detail), slot=state.slot)
    await tiers.empty_trash()
    await evictor.resync(state)
