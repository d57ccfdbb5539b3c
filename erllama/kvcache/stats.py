"""The store's counters, and the frozen picture of them that everybody else reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .arena import ArenaStatistics
    from .kinds import Refusal, SaveReason
    from .tiers import TierKind


@dataclass(slots=True)
class Counters:
    """Live counters; only the store's own modules write them."""

    hits_exact: int = 0
    hits_resume: int = 0
    hits_longest_prefix: int = 0
    misses: int = 0
    saves: Counter[SaveReason] = field(default_factory=Counter)
    refusals: Counter[Refusal] = field(default_factory=Counter)
    damage: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)
    bytes_written: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens_matched: int = 0
    tokens_asked: int = 0
    orphans: int = 0
    leftovers_removed: int = 0
    loads_shared: int = 0
    loads_no_room: int = 0
    tier_failures: int = 0
    pack_total_ns: int = 0
    load_total_ns: int = 0
    longest_prefix_ns: int = 0
    longest_prefix_probes: int = 0
    age_at_hit_s: float = 0.0
    prefill_saved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """One tier: bytes of its own (by the shared counter for file tiers), state, evictions from it."""

    name: str
    kind: TierKind
    max_bytes: int
    used_bytes: int
    n_parts: int
    pinned_bytes: int
    evictions: int
    on: bool = True
    read_only: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """What `KvStore.statistics()` returns.

    Hits by kind: `exact` covers the whole prompt, `resume` was found by the caller's key, `longest_prefix`
    covers a beginning. `bytes_read` and `bytes_written` by tier name; `damage` and `rejected` by what was
    wrong. `age_at_hit_s` sums the seconds since the last use of each node hit, `prefill_saved_s` the
    estimated prefill time of all tokens matched. `memory_bytes`: the RAM tier's use, the index included.
    """

    n_nodes: int
    n_parts: int
    index_bytes: int
    memory_bytes: int
    hits_exact: int
    hits_resume: int
    hits_longest_prefix: int
    misses: int
    tokens_matched: int
    tokens_asked: int
    saves: Mapping[str, int]
    saves_dropped: int
    refusals: Mapping[str, int]
    evictions: int
    evicted_unused_bytes: int
    damage: Mapping[str, int]
    rejected: Mapping[str, int]
    orphans: int
    leftovers_removed: int
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]
    published: Mapping[str, int]
    loads_shared: int
    loads_no_room: int
    loads_in_flight: int
    writes_queued: int
    write_queue_bytes: int
    leases: int
    pins: int
    pins_forced: int
    tier_failures: int
    pack_total_ns: int
    load_total_ns: int
    longest_prefix_ns: int
    longest_prefix_probes: int
    age_at_hit_s: float
    prefill_saved_s: float
    arena: ArenaStatistics
    tiers: tuple[TierStatistics, ...]
