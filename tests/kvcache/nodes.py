"""Nodes, prompts and payloads that the store's tests are made of."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from erllama.kvcache.key import Identity, as_tokens
from erllama.kvcache.kinds import ROOT_NAME, NodeFlag, Provenance, SaveReason
from erllama.kvcache.meta import NodeMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

IDENTITY = Identity(
    shape_hash=hashlib.sha256(b"model").digest(), n_ctx=4096, facts={"fingerprint": "f" * 64, "host": "here"}
)


def pieces(ids: Sequence[int]) -> list[bytes]:
    """Key bytes of a toy vocabulary: ids 0-25 are letters, 26 and more are two letters each."""
    return [bytes((97 + i,)) if i < 26 else bytes((97 + (i - 26) // 26, 97 + (i - 26) % 26)) for i in ids]


def node(
    ids: Sequence[int],
    parent: NodeMeta | None = None,
    *,
    identity: Identity = IDENTITY,
    text: bool = True,
    provenance: Provenance = Provenance.PREFILL,
    reason: SaveReason = SaveReason.COLD,
    flags: NodeFlag = NodeFlag.NONE,
) -> NodeMeta:
    """A node with these ids behind `parent`."""
    tokens = as_tokens(ids)
    above = ROOT_NAME if parent is None else parent.name
    return NodeMeta(
        name=identity.node_name(above, tokens.tobytes()),
        parent=above,
        identity=identity,
        start=0 if parent is None else parent.start + len(parent.tokens),
        tokens=tokens,
        text=b"".join(pieces(ids)) if text else b"",
        provenance=provenance,
        reason=reason,
        flags=flags,
        created_ns=1_700_000_000_000_000_000,
    )


def chain(blocks: Sequence[Sequence[int]], **options: object) -> list[NodeMeta]:
    """A path of nodes."""
    made: list[NodeMeta] = []
    for ids in blocks:
        made.append(node(ids, made[-1] if made else None, **options))  # type: ignore[arg-type]
    return made


def payload(meta: NodeMeta, n_bytes: int, kind: int = 1) -> bytes:
    """Bytes that only this part of this node has."""
    seed = hashlib.sha256(meta.name + bytes((kind,))).digest()
    return (seed * (n_bytes // len(seed) + 1))[:n_bytes]
