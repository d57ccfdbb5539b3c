"""Which nodes `kvc prune` removes: pure, leaves first, so that what stays is closed."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .folder import StoredNode


def choose(
    nodes: dict[bytes, StoredNode],
    *,
    max_bytes: int | None = None,
    unused_since: float | None = None,
    shape_prefix: str | None = None,
) -> list[StoredNode]:
    """Nodes to remove, in order.

    `shape_prefix`: everything of that model. `unused_since`: leaves last used before that time, then what
    becomes a leaf. `max_bytes`: least recently used leaves until what is left fits.
    """
    chosen: list[StoredNode] = []
    left = {name: len(node.children) for name, node in nodes.items()}
    heap = [(_last_used(node), name) for name, node in nodes.items() if not left[name]]
    heapq.heapify(heap)
    total = sum(node.n_bytes for node in nodes.values())
    while heap:
        used, name = heapq.heappop(heap)
        node = nodes[name]
        of_shape = shape_prefix is not None and node.meta.identity.shape_hash.hex().startswith(shape_prefix)
        too_old = unused_since is not None and used < unused_since
        too_much = max_bytes is not None and total > max_bytes
        if not (of_shape or too_old or too_much):
            continue
        chosen.append(node)
        total -= node.n_bytes
        parent = node.meta.parent
        if parent in left:
            left[parent] -= 1
            if not left[parent]:
                heapq.heappush(heap, (_last_used(nodes[parent]), parent))
    return chosen


def _last_used(node: StoredNode) -> float:
    return max(file.mtime for file in node.files.values())
