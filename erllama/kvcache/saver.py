"""Saving a node: gates, insertion into the index, RAM copy, and the queue to its file tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from .catalog import Catalog, RamPart
from .key import Identity, Tokens, as_tokens
from .kinds import ROOT_NAME, NodeFlag, PartKind, Provenance, Refusal, SaveReason
from .meta import NodeMeta
from .policy import SavePolicy, SecondSighting
from .tiers import RAM_TIER
from .trie import NeedKey

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .arena import Buffer
    from .lookuplog import LookupLog
    from .room import RamRoom
    from .stats import Counters
    from .tierset import TierSet, TierState
    from .writer import Job, Writer


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A node to be saved behind `parent` (its name; the root's for a first block).

    `parts`: pooled buffers, filled; the store owns them from the call of `save` on, whatever it answers.
    `text`: key bytes of the tokens. `private`: never on a file tier. `policy`: gates; None saves anything.
    """

    identity: Identity
    tokens: Sequence[int] | Tokens
    parts: Mapping[PartKind, Buffer]
    parent: bytes = ROOT_NAME
    start: int = 0
    text: bytes = b""
    reason: SaveReason = SaveReason.COLD
    provenance: Provenance = Provenance.PREFILL
    anchor: bool = False
    private: bool = False
    ttl_s: float | None = None
    policy: SavePolicy | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of a save.

    `stored`: the node can be found now. `jobs`: what is on its way to a file tier. `refusal`: why it was
    not stored, or stored in RAM only.
    """

    name: bytes
    stored: bool
    jobs: tuple[Job, ...] = ()
    refusal: Refusal | None = None

    async def wait_durable(self) -> bool:
        """Wait for the file tier; True if all parts of this save are on it. Cancellation: harmless."""
        return all([await job.wait() for job in self.jobs]) and bool(self.jobs)


class Saver:
    """Takes drafts into the catalog and, where asked, on their way to a file tier."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: TierSet,
        writer: Writer,
        room: RamRoom,
        *,
        counters: Counters,
        log: LookupLog | None,
    ) -> None:
        self._catalog, self._tiers, self._writer = catalog, tiers, writer
        self._room, self._counters, self._log = room, counters, log
        self._sightings = SecondSighting()
        self.closed = False

    async def save(self, draft: Draft, tier: str) -> Saved:
        """See `KvStore.save`."""
        buffers = dict(draft.parts)
        try:
            if not buffers or not len(draft.tokens):
                raise ValueError("a node has at least one token and one part")
            wanted = None if tier == RAM_TIER else self._tiers.named(tier)
            await trio.lowlevel.checkpoint()  # a save loop must let the writers have their turn
            meta = self._meta(draft)
            refusal = self._gate(draft, meta)
            if refusal is None:
                row = await self._insert(meta)
                if row is not None:
                    return self._keep(draft, meta, row, buffers, wanted)
                refusal = Refusal.NO_PARENT
            return self._refuse(meta, refusal)
        finally:
            for buffer in buffers.values():
                buffer.release()

    def _meta(self, draft: Draft) -> NodeMeta:
        tokens = as_tokens(draft.tokens).copy()
        ttl_s = draft.ttl_s if draft.ttl_s is not None else draft.policy.ttl_s if draft.policy else None
        return NodeMeta(
            name=draft.identity.node_name(draft.parent, tokens.tobytes()),
            parent=draft.parent,
            identity=draft.identity,
            start=draft.start,
            tokens=tokens,
            text=bytes(draft.text),
            provenance=draft.provenance,
            reason=draft.reason,
            flags=NodeFlag.ANCHOR if draft.anchor else NodeFlag.NONE,
            created_ns=max(0, int(self._catalog.clock() * 1e9)),
            expires_ns=None if ttl_s is None else int((self._catalog.clock() + ttl_s) * 1e9),
            facts=draft.facts,
        )

    def _gate(self, draft: Draft, meta: NodeMeta) -> Refusal | None:
        if self.closed:
            return Refusal.CLOSED
        policy = draft.policy
        if policy is None:
            return None
        refusal = policy.gate(
            draft.reason, meta.start + len(meta.tokens), whole=PartKind.WHOLE in draft.parts
        )
        known = self._catalog.tree.find(meta.name) is not None
        if refusal is None and policy.second_sighting and not known:
            return None if self._sightings.seen_before(meta.name) else Refusal.FIRST_SIGHTING
        return refusal

    async def _insert(self, meta: NodeMeta) -> int | None:
        heads: dict[bytes, NodeMeta] = {}
        while True:
            try:
                return self._catalog.ensure_node(meta, self._tiers.reader(heads))
            except NeedKey as need:
                await self._tiers.fetch_head(need.node, heads)

    def _refuse(self, meta: NodeMeta, refusal: Refusal) -> Saved:
        self._counters.refusals[refusal] += 1
        return Saved(name=meta.name, stored=False, refusal=refusal)

    def _keep(
        self,
        draft: Draft,
        meta: NodeMeta,
        row: int,
        buffers: dict[PartKind, Buffer],
        wanted: TierState | None,
    ) -> Saved:
        """Put parts that are new into RAM and queue them for their file tier. No awaits."""
        catalog = self._catalog
        new = {kind: buffer for kind, buffer in buffers.items() if not catalog.tree.part(row, kind)}
        if not self._hangs_together(row, new):
            self._drop_if_empty(row)
            return self._refuse(meta, Refusal.NO_PARENT)
        self._revive(row, meta, buffers)
        catalog.set_private(row, private=draft.private)
        catalog.prolong(row, meta.expires_ns)
        catalog.join(row, meta)
        state, refusal = self._target(row, wanted)
        n_bytes = sum(buffer.n_bytes for buffer in new.values())
        if state is not None and not new and not catalog.is_ram_only(row):
            state = None  # it is there already
        if state is not None and not self._writer.has_room(n_bytes):
            self._drop_if_empty(row)
            return self._refuse(meta, Refusal.BACK_PRESSURE)
        for kind, buffer in new.items():
            del buffers[kind]
            catalog.add_copy(row, kind, RamPart(buffer, meta))
            if self._log is not None:
                self._log.save(catalog.clock(), meta, kind, buffer.n_bytes)
        if new:
            self._counters.saves[draft.reason] += 1
        if draft.reason is SaveReason.AGENT_PREFIX:
            fraction = draft.policy.pin_fraction if draft.policy else None
            catalog.pins.pin(("agent", meta.name), meta.name, fraction=fraction)
        if state is not None and not state.bucket.try_take(n_bytes):
            state, refusal = None, Refusal.WRITE_RATE
        jobs = self._writer.submit(row, state.slot) if state is not None else []
        if refusal is not None:
            self._counters.refusals[refusal] += 1
        self._room.fit()
        return Saved(name=meta.name, stored=True, jobs=tuple(jobs), refusal=refusal)

    def _hangs_together(self, row: int, new: Collection[PartKind]) -> bool:
        """Whether parts could be restored: no base behind a hole, no window or state without its base."""
        tree = self._catalog.tree
        parent = tree.parent[row]
        if PartKind.BASE in new:
            return not tree.parent[parent] or tree.part(parent, PartKind.BASE) != 0
        beside = PartKind.WINDOW in new or PartKind.STATE in new
        return not beside or tree.part(row, PartKind.BASE) != 0

    def _revive(self, row: int, meta: NodeMeta, buffers: dict[PartKind, Buffer]) -> None:
        """Parts whose tier is off are there but cannot be read: what was just computed serves meanwhile."""
        catalog = self._catalog
        for kind, buffer in list(buffers.items()):
            part = catalog.tree.part(row, kind)
            if (
                part
                and part not in catalog.ram
                and part not in catalog.doomed
                and not catalog.is_usable(part)
            ):
                del buffers[kind]
                catalog.keep_copy(part, RamPart(buffer, meta))

    def _drop_if_empty(self, row: int) -> None:
        if not self._catalog.tree.part_rows(row) and self._catalog.tree.is_leaf(row):
            self._catalog.drop_subtree(row)

    def _target(self, row: int, wanted: TierState | None) -> tuple[TierState | None, Refusal | None]:
        """The file tier a save goes to (None: it stays in RAM), and why it cannot go there.

        `wanted` was found when the save began, and may have been removed since: it accepts nothing then.
        """
        state = wanted
        if state is None or self._catalog.is_private(row):
            return None, None
        slot = self._catalog.durable_slot(row)
        if slot is not None:
            state = self._tiers.get(slot)
        return (state, None) if state.accepts else (None, Refusal.TIER_OFF)
