"""From an index walk to a match: heads read where ids or bytes have to be compared, hits counted."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from .key import common_prefix
from .match import Match, MatchedNode, PartialNode
from .tiers import RAM_TIER

if TYPE_CHECKING:
    from .catalog import Catalog
    from .key import Identity, Prompt, Tokens
    from .kinds import PartKind
    from .meta import NodeMeta
    from .stats import Counters
    from .tierset import TierSet
    from .walk import Maybe, Place

_HEADS_BYTES = 4 << 20


class HeadCache:
    """Heads read from files, the latest few MiB, counted into the RAM budget."""

    def __init__(self, catalog: Catalog, tiers: TierSet) -> None:
        self._catalog, self._tiers = catalog, tiers
        self._heads: OrderedDict[bytes, NodeMeta] = OrderedDict()
        self._bytes = 0
        self._limit = min(_HEADS_BYTES, catalog.arena.max_bytes // 64)

    async def get(self, name: bytes) -> NodeMeta | None:
        """The head of a node; None if it is gone or cannot be read."""
        meta = self._heads.get(name)
        if meta is not None:
            self._heads.move_to_end(name)
            return meta
        row = self._catalog.tree.find(name)
        found: dict[bytes, NodeMeta] = {}
        if row is None or not await self._tiers.fetch_head(row, found):
            return None
        meta = self._heads[name] = found[name]
        self._charge(meta.head_bytes)
        while self._bytes > self._limit and self._heads:
            self._charge(-self._heads.popitem(last=False)[1].head_bytes)
        return meta

    def _charge(self, n_bytes: int) -> None:
        self._bytes += n_bytes
        self._catalog.arena.charge(n_bytes)


class Finder:
    """Finds the longest stored beginning of prompts."""

    def __init__(self, catalog: Catalog, tiers: TierSet, counters: Counters) -> None:
        self._catalog, self._tiers, self._counters = catalog, tiers, counters
        self.heads = HeadCache(catalog, tiers)

    async def find(self, identity: Identity, prompt: Prompt, *, resume_key: bytes | None = None) -> Match:
        """The longest match; counts hits and misses. Reads at most a few heads, no payload."""
        began = time.perf_counter_ns()
        walk = self._catalog.walk(identity, prompt)
        self._counters.longest_prefix_probes += walk.probes
        self._counters.longest_prefix_ns += time.perf_counter_ns() - began
        nodes, whole = self._nodes(walk.best, prompt)
        # Names, not rows: rows may serve other nodes after the first await.
        maybes = [
            (maybe, *self._nodes(maybe.place, prompt), self._node(maybe.row, maybe.by_bytes, None))
            for maybe in walk.maybe
            if self._catalog.is_live(maybe.row)
        ]
        nodes = await self._fill_ids(nodes, prompt)
        place, partial = walk.best, None
        if not whole:
            path = walk.best.path()
            place = path[len(nodes) - 1] if nodes else path[0].before or place
        best = place.byte_pos, place.token_pos or 0
        for maybe, before, path_whole, node in maybes:
            if path_whole:
                shared = await self._shared(maybe, node, prompt)
                if shared is not None and self._reach(maybe, shared) > best:
                    best, partial, place = self._reach(maybe, shared), shared, maybe.place
                    nodes = await self._fill_ids(before, prompt)
        return self._finish(identity, prompt, nodes, partial, place, walk.probes, resume_key)

    def peek(self, identity: Identity, prompt: Prompt) -> tuple[int, int]:
        """How many tokens and bytes of whole nodes are stored; index only, counts nothing."""
        walk = self._catalog.walk(identity, prompt)
        nodes, _ = self._nodes(walk.best, prompt)
        return sum(len(node.ids) for node in nodes), sum(node.n_bytes for node in nodes)

    def path(self, identity: Identity, prompt: Prompt) -> list[MatchedNode]:
        """The whole nodes that a prompt begins with; index only, counts nothing."""
        return self._nodes(self._catalog.walk(identity, prompt).best, prompt)[0]

    # --- from places to nodes ---------------------------------------------------------------------

    def _nodes(self, place: Place, prompt: Prompt) -> tuple[list[MatchedNode], bool]:
        """The path to a place, cut before the first node that is not live; False if it was cut."""
        nodes: list[MatchedNode] = []
        for step in place.path():
            if not self._catalog.is_live(step.row):
                return nodes, False
            ids = None
            if not step.by_bytes and step.token_pos is not None:
                ids = prompt.tokens[step.token_pos - self._catalog.tree.n_tokens[step.row] : step.token_pos]
            nodes.append(self._node(step.row, step.by_bytes, ids))
        return nodes, True

    def _node(self, row: int, by_bytes: bool, ids: Tokens | None) -> MatchedNode:
        tree, table = self._catalog.tree, self._catalog.tree.parts
        parts: dict[PartKind, str] = {}
        for part in tree.part_rows(row):
            if self._catalog.is_usable(part):
                hot = table.hot[part]
                parts[table.kind(part)] = RAM_TIER if hot else self._tiers.get(table.home[part]).tier.name
        return MatchedNode(
            name=tree.names.name(row),
            start=tree.start[row],
            ids=np.empty(tree.n_tokens[row], np.int32) if ids is None else ids,
            n_bytes=tree.n_bytes[row],
            by_bytes=by_bytes,
            provenance=tree.provenance(row),
            parts=parts,
        )

    async def _fill_ids(self, nodes: list[MatchedNode], prompt: Prompt) -> list[MatchedNode]:
        """Give nodes matched by bytes their own ids; cut where the text is not the prompt's after all."""
        if not any(node.by_bytes for node in nodes):
            return nodes
        assert prompt.text is not None
        filled, pos = [], 0
        for node in nodes:
            if node.by_bytes:
                meta = await self.heads.get(node.name)
                if meta is None or meta.text != prompt.text[pos : pos + node.n_bytes]:
                    break
                node.ids.setflags(write=True)
                node.ids[:] = meta.tokens
            filled.append(node)
            pos += node.n_bytes
        return filled

    async def _shared(self, maybe: Maybe, node: MatchedNode, prompt: Prompt) -> PartialNode | None:
        """How much of `node` the prompt shares; None if nothing or it cannot be read."""
        meta = await self.heads.get(node.name)
        if meta is None:
            return None
        node.ids[:] = meta.tokens
        n_tokens = n_bytes = 0
        at = maybe.place.token_pos
        if at is not None:
            n_tokens = common_prefix(meta.tokens, prompt.tokens[at:])
            if prompt.offsets is not None:
                n_bytes = int(prompt.offsets[at + n_tokens] - prompt.offsets[at])
        if maybe.by_bytes:
            assert prompt.text is not None
            rest = np.frombuffer(prompt.text, np.uint8, offset=maybe.place.byte_pos)
            n_bytes = common_prefix(np.frombuffer(meta.text, np.uint8), rest)
        if not n_tokens and not n_bytes:
            return None
        return PartialNode(node=node, n_tokens=n_tokens, n_bytes=n_bytes)

    @staticmethod
    def _reach(maybe: Maybe, shared: PartialNode) -> tuple[int, int]:
        tokens = (maybe.place.token_pos or 0) + shared.n_tokens
        return maybe.place.byte_pos + shared.n_bytes, tokens

    # --- counting ---------------------------------------------------------------------------------

    def _finish(
        self,
        identity: Identity,
        prompt: Prompt,
        nodes: list[MatchedNode],
        partial: PartialNode | None,
        place: Place,
        probes: int,
        resume_key: bytes | None,
    ) -> Match:
        path = place.path()
        if len(nodes) < len(path):  # cut at a node that is not live or not what it seemed
            place = path[len(nodes) - 1] if nodes else path[0].before or path[0]
            partial = None
        self._count(identity, prompt, nodes, partial, resume_key)
        return Match(
            identity=identity,
            nodes=tuple(nodes),
            partial=partial,
            token_pos=place.token_pos,
            byte_pos=place.byte_pos,
            probes=probes,
        )

    def _count(
        self,
        identity: Identity,
        prompt: Prompt,
        nodes: list[MatchedNode],
        partial: PartialNode | None,
        resume_key: bytes | None,
    ) -> None:
        counters, catalog = self._counters, self._catalog
        matched = nodes[-1].end if nodes else 0
        n_tokens = matched + (partial.n_tokens if partial else 0)
        counters.tokens_asked += len(prompt.tokens)
        counters.tokens_matched += n_tokens
        if not n_tokens and not (partial and partial.n_bytes):
            counters.misses += 1
            return
        if matched >= len(prompt.tokens):
            counters.hits_exact += 1
        elif resume_key is not None and any(node.name == resume_key for node in nodes):
            counters.hits_resume += 1
        else:
            counters.hits_longest_prefix += 1
        used = [*nodes, partial.node] if partial else nodes
        rows = [row for row in (catalog.tree.find(node.name) for node in used) if row is not None]
        now = catalog.clock()
        for row in rows:
            first = catalog.tree.first_part[row]
            counters.age_at_hit_s += max(0.0, now - catalog.tree.parts.used[first])
        counters.prefill_saved_s += catalog.prefill_s(identity, 0, n_tokens)
        catalog.hit(rows)
        catalog.pins.touch({node.name for node in nodes})
