"""The tree against a plain dictionary: inserts, removals, longest prefixes by tokens and by bytes."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erllama.kvcache.key import Identity, Prompt, common_prefix
from erllama.kvcache.kinds import NodeFlag, PartKind, Provenance, SaveReason
from erllama.kvcache.parts import RAM
from erllama.kvcache.tree import Tree
from erllama.kvcache.trie import NeedKey
from erllama.kvcache.walk import Walk, Walker

from .nodes import IDENTITY, node, pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from erllama.kvcache.meta import NodeMeta


class Model:
    """A tree beside what it should say: every node by name, in a dictionary."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.metas: dict[bytes, NodeMeta] = {}

    def read(self, row: int) -> NodeMeta:
        return self.metas[self.tree.names.name(row)]

    def add(self, meta: NodeMeta) -> int:
        row = self.tree.find(meta.name)
        if row is None:
            root = self.tree.add_root(meta.identity)
            parent = self.tree.find(meta.parent) if any(meta.parent) else root
            assert parent is not None
            row = self.tree.insert(parent, meta, self.read)
            self.metas[meta.name] = meta
        return row

    def add_path(self, path: list[list[int]]) -> None:
        """A history block by block."""
        above = None
        for ids in path:
            above = node(ids, above)
            self.add(above)

    def remove(self, meta: NodeMeta) -> None:
        row = self.tree.find(meta.name)
        assert row is not None
        for part in self.tree.part_rows(row):
            self.tree.remove_part(part)
        self.tree.remove(row)
        del self.metas[meta.name]

    def walk(self, prompt: Prompt, identity: Identity = IDENTITY) -> Walk:
        return Walker(self.tree, identity, prompt).run()

    def reach(self, prompt: Prompt) -> int:
        """The longest prefix in tokens, partial blocks included, as the tree finds it."""
        walk = self.walk(prompt)
        reached = walk.best.token_pos or 0
        for maybe in walk.maybe:
            at = maybe.place.token_pos or 0
            reached = max(reached, at + common_prefix(self.read(maybe.row).tokens, prompt.tokens[at:]))
        return reached

    def true_reach(self, ids: Sequence[int]) -> int:
        """The same by looking at every node."""
        best = 0
        for meta in self.metas.values():
            history = self.history(meta)
            n = 0
            while n < min(len(history), len(ids)) and history[n] == ids[n]:
                n += 1
            best = max(best, n)
        return best

    def history(self, meta: NodeMeta) -> list[int]:
        ids = list(map(int, meta.tokens))
        while any(meta.parent):
            meta = self.metas[meta.parent]
            ids = list(map(int, meta.tokens)) + ids
        return ids


# Few symbols and short blocks: crowds of siblings, shared heads, equal texts from other tokens.
blocks = st.lists(st.lists(st.integers(0, 2) | st.just(26), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks, max_size=20), st.lists(st.integers(0, 2) | st.just(26), max_size=12), st.randoms())
def test_longest_prefix_is_the_dictionary_s(paths: list, prompt: list[int], rng: random.Random) -> None:
    """K3, K24: whatever was inserted and removed, the walk reaches as far as a search over all nodes."""
    model = Model()
    for path in paths:
        model.add_path(path)
        if rng.random() < 0.4:
            leaves = [m for m in model.metas.values() if model.tree.is_leaf(model.tree.find(m.name) or 0)]
            model.remove(rng.choice(leaves))
    assert model.reach(Prompt.of(prompt)) == model.true_reach(prompt)
    for name, meta in model.metas.items():
        row = model.tree.find(name)
        assert row is not None
        assert (model.tree.start[row], model.tree.n_tokens[row]) == (meta.start, len(meta.tokens))
        whole = model.walk(Prompt.of(model.history(meta)))
        assert whole.best.token_pos == len(model.history(meta))
    assert model.tree.n_nodes == len(model.metas) == len(list(model.tree.rows()))


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks, min_size=1, max_size=12), st.integers(0, 10_000))
def test_another_tokenisation_of_the_same_bytes_hits(paths: list, pick: int) -> None:
    """K2: a history spelled letter by letter reaches at least as far, by bytes, as the stored spelling."""
    model = Model()
    for path in paths:
        model.add_path(path)
    metas = list(model.metas.values())
    history = model.history(metas[pick % len(metas)])
    text = b"".join(pieces(history))
    spelled = [c - 97 for c in text]
    walk = model.walk(Prompt.of(spelled, pieces(spelled)))
    assert walk.best.byte_pos == len(text)
    covered = b"".join(model.metas[model.tree.names.name(p.row)].text for p in walk.best.path())
    assert covered == text


def test_a_prompt_without_text_never_matches_by_bytes() -> None:
    """D5: token ids given by the caller are matched as ids."""
    model = Model()
    model.add(node([26, 1]))
    assert model.walk(Prompt.of([0, 0, 1])).best.token_pos == 0
    assert model.walk(Prompt.of([0, 0, 1], pieces([0, 0, 1]))).best.byte_pos == 3


def test_a_match_that_ends_inside_a_token_says_so() -> None:
    """K25: behind a byte match inside one of the prompt's tokens there is no token position."""
    model = Model()
    model.add(node([0]))
    best = model.walk(Prompt.of([27], pieces([27]))).best  # one token "ab", stored is "a"
    assert (best.byte_pos, best.token_pos, best.by_bytes) == (1, None, True)


def test_identities_do_not_see_each_other() -> None:
    """K1, K3: another shape or another salt is another tree."""
    model = Model()
    model.add(node([1, 2, 3]))
    for other in (Identity(shape_hash=b"other"), Identity(shape_hash=IDENTITY.shape_hash, salt=b"tenant")):
        assert model.walk(Prompt.of([1, 2, 3]), other).best.token_pos == 0
        model.add(node([1, 2, 3], identity=other))
    assert len({m.name for m in model.metas.values()}) == 3


def test_a_control_token_is_not_its_characters() -> None:
    """K1: the key bytes of a control token cannot be typed."""
    from erllama.kvcache.key import control_piece

    typed = [b"<", b"end", b">"]
    assert control_piece(7) not in b"".join(typed)
    with pytest.raises(UnicodeDecodeError):
        control_piece(7).decode()


def test_a_row_keeps_provenance_reason_and_flags_apart() -> None:
    """All combinations come back from one byte, and a flag that is set or cleared changes nothing else."""
    model = Model()
    cases = list(itertools.product(Provenance, SaveReason, (NodeFlag.NONE, NodeFlag.ANCHOR)))
    for i, (provenance, reason, flags) in enumerate(cases):
        row = model.add(node([i], provenance=provenance, reason=reason, flags=flags))
        model.tree.set_flag(row, NodeFlag.PRIVATE, on=True)
        assert model.tree.flags(row) == flags | NodeFlag.PRIVATE
        model.tree.set_flag(row, NodeFlag.PRIVATE, on=False)
        assert (model.tree.provenance(row), model.tree.reason(row)) == (provenance, reason)
        assert model.tree.flags(row) == flags


def test_a_missing_sibling_key_changes_nothing() -> None:
    """Rule 3 of the tree: `NeedKey` names the node and leaves the tree as it was."""
    model = Model()
    first = model.add(node([1, 2]))

    def unread(row: int) -> NodeMeta:
        raise NeedKey(row)

    root = model.tree.root(IDENTITY)
    assert root is not None
    with pytest.raises(NeedKey) as asked:
        model.tree.insert(root, node([1, 3]), unread)
    assert asked.value.node == first
    assert model.tree.n_nodes == 1
    model.add(node([1, 3]))
    assert model.reach(Prompt.of([1, 3, 9])) == 2


def test_a_crowd_of_siblings_costs_logarithmic_probes() -> None:
    """Thousands of conversations that part inside one block: few probes, the best sibling named."""
    model, rng = Model(), random.Random(4)
    head = [7] * 200
    for i in range(3000):
        model.add(node([*head, *(rng.randrange(50_000) for _ in range(20)), i], text=False))
    ids = [*head, 11, 12, 13]
    walk = model.walk(Prompt.of(ids))
    assert walk.probes < 5
    assert model.reach(Prompt.of(ids)) == model.true_reach(ids)


def test_index_memory_per_node() -> None:
    """D6: at most 160 bytes per node, in a chain and in a crowd, with text and one part each."""
    for crowd in (False, True):
        model = Model()
        above = None
        for i in range(4000):
            meta = node([i % 26, i // 26 % 26, i // 676], above if not crowd else None)
            model.tree.add_part(model.add(meta), PartKind.BASE, 1, RAM, 0)
            above = meta
        assert model.tree.nbytes / model.tree.n_nodes <= 160


def test_rows_are_used_again() -> None:
    """Removed nodes leave no memory behind."""
    model = Model()
    for turn in range(50):
        metas = [node([turn % 7, i]) for i in range(20)]
        for meta in metas:
            model.tree.add_part(model.add(meta), PartKind.BASE, 1, RAM, 0)
        if turn == 0:
            size = model.tree.nbytes
        for meta in metas:
            model.remove(meta)
    assert model.tree.nbytes == size
    assert model.tree.n_nodes == model.tree.parts.n_parts == 0


def test_identities_without_nodes_cost_nothing() -> None:
    """A thousand salts that come and go: no more rows than one of them has, and none is known any more."""
    model = Model()
    for i in range(1000):
        identity = Identity(shape_hash=b"x", salt=b"%d" % i)
        first = node([1, 2], identity=identity)
        second = node([3], first, identity=identity)
        for meta in (first, second):
            model.add(meta)
        assert model.walk(Prompt.of([1, 2, 3]), identity).best.token_pos == 3
        model.remove(second)
        assert model.tree.root(identity) is not None
        model.remove(first)
        assert model.tree.root(identity) is None
    assert model.tree.identities() == []
    assert len(model.tree.parent) == 4


def test_a_root_on_a_row_that_was_a_node_is_found() -> None:
    """Rows are recycled: a root has no name, so what hangs behind it is found by its own."""
    model = Model()
    kept, gone = node([1, 2]), node([3, 4])
    model.add(kept)
    model.add(gone)
    model.remove(gone)
    other = Identity(shape_hash=b"x", salt=b"another")
    model.add(node([5, 6], identity=other))
    assert model.walk(Prompt.of([5, 6]), other).best.token_pos == 2
