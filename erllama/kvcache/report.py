"""The store's state in numbers and plain dictionaries, for people, metrics and tests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .kinds import NodeFlag, Refusal
from .parts import RAM
from .stats import Counters, StoreStatistics, TierStatistics
from .tiers import RAM_TIER, TierKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .catalog import Catalog
    from .loader import Loader
    from .tierset import TierSet
    from .writer import Writer


def tier_statistics(catalog: Catalog, tiers: TierSet) -> tuple[TierStatistics, ...]:
    """All tiers, RAM first."""
    columns = catalog.tree.parts.columns()
    home, node = columns["home"], columns["node"]
    pinned = catalog.pins.bytes_by_slot()

    def n_parts(slot: int) -> int:
        return int(((home == slot) & (node != 0)).sum())

    ram = TierStatistics(
        name=RAM_TIER,
        kind=TierKind.RAM,
        max_bytes=catalog.arena.max_bytes,
        used_bytes=catalog.arena.used_bytes,
        n_parts=n_parts(RAM),
        pinned_bytes=pinned.get(RAM, 0),
        evictions=catalog.evicted[RAM],
    )
    return ram, *(
        TierStatistics(
            name=state.tier.name,
            kind=state.tier.kind,
            max_bytes=state.tier.options.max_bytes,
            used_bytes=state.used_bytes,
            n_parts=n_parts(state.slot),
            pinned_bytes=pinned.get(state.slot, 0),
            evictions=catalog.evicted[state.slot],
            on=state.on,
            read_only=state.tier.root.read_only,
            error=state.error,
        )
        for state in tiers
    )


def dump_nodes(catalog: Catalog, tiers: TierSet) -> Iterator[dict[str, Any]]:
    """One plain dictionary per node, parents before children."""
    tree = catalog.tree
    for row in tree.rows():
        yield {
            "name": tree.names.name(row).hex(),
            "parent": tree.names.name(tree.parent[row]).hex(),
            "start": tree.start[row],
            "n_tokens": tree.n_tokens[row],
            "provenance": tree.provenance(row).name.lower(),
            "reason": tree.reason(row).name.lower(),
            "anchor": bool(tree.flags(row) & NodeFlag.ANCHOR),
            "parts": {
                tree.parts.kind(part).name.lower(): {
                    "bytes": int(tree.parts.size[part]),
                    "tier": _tier_name(tiers, tree.parts.home[part]),
                    "in_ram": bool(tree.parts.hot[part]),
                    "hits": round(tree.parts.hits[part], 3),
                }
                for part in tree.part_rows(row)
            },
        }


def _tier_name(tiers: TierSet, slot: int) -> str:
    return RAM_TIER if slot == RAM else tiers.get(slot).tier.name


def store_statistics(
    catalog: Catalog, tiers: TierSet, counters: Counters, *, loader: Loader, writer: Writer
) -> StoreStatistics:
    """All counters and sizes, at one instant."""
    tree = catalog.tree
    copied = {
        f.name: getattr(counters, f.name)
        for f in dataclasses.fields(counters)
        if not isinstance(getattr(counters, f.name), dict)
    }
    return StoreStatistics(
        **copied,
        n_nodes=tree.n_nodes,
        n_parts=tree.parts.n_parts,
        index_bytes=tree.nbytes,
        memory_bytes=catalog.arena.used_bytes,
        saves={reason.name.lower(): n for reason, n in counters.saves.items()},
        saves_dropped=counters.refusals[Refusal.BACK_PRESSURE],
        refusals={str(refusal): n for refusal, n in counters.refusals.items()},
        evictions=catalog.evicted.total(),
        evicted_unused_bytes=catalog.evicted_unused_bytes,
        damage=dict(counters.damage),
        rejected=dict(counters.rejected),
        bytes_read=dict(counters.bytes_read),
        bytes_written=dict(counters.bytes_written),
        published=dict(counters.outcomes),
        loads_in_flight=loader.n_in_flight,
        writes_queued=writer.n_queued,
        write_queue_bytes=writer.queued_bytes,
        leases=len(catalog.leases),
        pins=len(catalog.pins),
        pins_forced=catalog.pins.n_forced,
        arena=catalog.arena.statistics(),
        tiers=tier_statistics(catalog, tiers),
    )
