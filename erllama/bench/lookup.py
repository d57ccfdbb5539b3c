"""P8: the index of the store, looked up by itself."""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING

import numpy as np
import trio

from erllama.kvcache.key import Identity, Prompt, as_tokens
from erllama.kvcache.kinds import ROOT_NAME, PartKind
from erllama.kvcache.meta import NodeMeta
from erllama.kvcache.parts import RAM
from erllama.kvcache.tree import Tree
from erllama.kvcache.walk import Walker

from .figure import Bar, Figure, single
from .spread import Spread
from .workload import Found, Workload

if TYPE_CHECKING:
    from .settings import Settings

BAR, ALIKE_BAR, NODE_BAR = Bar("<=", 1.0, "value"), Bar("<=", 1.5), Bar("<=", 160, "value")
BLOCK = 256
N_VOCAB = 50_000
N_LOOKS = 50


class Forest:
    """An index that is filled with random histories. `Settings` decides its size, a seed its content."""

    def __init__(self) -> None:
        self.tree = Tree()
        self._identity = Identity(shape_hash=b"bench" * 6)
        self._root = self.tree.add_root(self._identity)
        self._random = random.Random(1)
        self._heads: dict[int, NodeMeta] = {}

    def grow(self, n_nodes: int, n_tokens: int) -> list[NodeMeta]:
        """Insert one history of `n_nodes` nodes of `n_tokens` each."""
        chain: list[NodeMeta] = []
        row = self._root
        for _ in range(n_nodes):
            chain.append(self._node(chain[-1] if chain else None, n_tokens))
            row = self.tree.insert(row, chain[-1], self._heads.__getitem__)
            self._heads[row] = chain[-1]
            self.tree.add_part(row, PartKind.BASE, 1, RAM, 0)
        return chain

    def _node(self, parent: NodeMeta | None, n_tokens: int) -> NodeMeta:
        tokens = as_tokens([self._random.randrange(N_VOCAB) for _ in range(n_tokens)])
        above = ROOT_NAME if parent is None else parent.name
        return NodeMeta(
            name=self._identity.node_name(above, tokens.tobytes()),
            parent=above,
            identity=self._identity,
            start=0 if parent is None else parent.start + len(parent.tokens),
            tokens=tokens,
            text=tokens.tobytes(),
        )

    def fill(self, n_nodes: int) -> None:
        """Unrelated histories, until there are that many nodes."""
        while self.tree.n_nodes < n_nodes:
            self.grow(self._random.randrange(1, 40), 8)

    def look(self, prompt: Prompt) -> float:
        """Milliseconds of one look-up."""
        began = time.perf_counter()
        found = Walker(self.tree, self._identity, prompt).run().best.token_pos
        elapsed_s = time.perf_counter() - began
        if found != len(prompt.tokens):
            raise RuntimeError(f"the index found {found} of {len(prompt.tokens)} tokens")
        return 1000 * elapsed_s


async def measure(settings: Settings, found: Found) -> None:
    """In a thread: it computes for seconds and awaits nothing."""
    await found.add(*await trio.to_thread.run_sync(_measure, settings))


def _measure(settings: Settings) -> list[Figure]:
    n_prompt, n_nodes = settings.pick((30_000, 100_000), (2_000, 2_000))
    forest = Forest()
    chain = forest.grow(n_prompt // BLOCK, BLOCK)
    ids = np.concatenate([meta.tokens for meta in chain])
    prompt = Prompt(ids)
    with_text = Prompt(ids, ids.tobytes(), np.arange(0, 4 * len(ids) + 4, 4, dtype=np.int64))
    few, n_few = _looks(forest, prompt), forest.tree.n_nodes
    gc.disable()  # 100,000 objects of the bench's own, not of the index
    try:
        forest.fill(n_nodes)
        many, as_text = _looks(forest, prompt), _looks(forest, with_text)
    finally:
        gc.enable()
    ratio = Spread(min(many) / min(few), 0.0, 1)  # other programs only ever make one longer
    return [
        single(f"{len(prompt.tokens)} tokens among {forest.tree.n_nodes} nodes", "ms", many, BAR),
        Figure(
            name="… against fewer unrelated nodes",
            unit="ms",
            ours=Spread.of(many),
            other=Spread.of(few),
            other_name=f"{n_few} nodes",
            ratio=ratio,
            bar=ALIKE_BAR,
        ),
        single("… with its text, as a prompt that is not found by ids", "ms", as_text, BAR),
        single("index memory a node", "bytes", [forest.tree.nbytes / forest.tree.n_nodes], NODE_BAR),
    ]


def _looks(forest: Forest, prompt: Prompt) -> list[float]:
    return [forest.look(prompt) for _ in range(N_LOOKS)]


LOOKUP = Workload(
    id="P8",
    title="look-up of a long prompt among many nodes",
    compared="the index walk alone, no I/O, in a small and in a large index; no peer",
    measure=measure,
)
