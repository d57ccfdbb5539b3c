"""What a sequence leaves behind, and where two token sequences part."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from erllama.engine.node_path import NodePath
from erllama.engine.resident import Resident, n_common

from .warm_scenes import seq_of

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS)
def test_the_common_beginning_ends_at_the_first_difference(a: list[int], b: list[int]) -> None:
    """Compared token by token, whatever the lengths."""
    n = n_common(a, np.asarray(b, np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_a_resident_is_what_is_in_memory_and_no_more() -> None:
    """The pending token is not part of it."""
    seq = seq_of([1, 2, 3])
    seq.admit(0, 0.0)
    seq.restored(0.0)
    seq.computed(2, 0.0)
    left = Resident.of(seq, 7.0)
    assert (left.slot, left.ledger.tolist(), left.n_kv, left.last_used) == (0, [1, 2], 2, 7.0)


def test_a_path_is_cut_where_memory_is() -> None:
    """Only whole nodes count; a copy does not follow its original."""
    path = NodePath()
    assert (path.end, path.tip) == (0, None)
    path.add(b"a", 16)
    path.add(b"b", 20)
    copy = path.up_to(19)
    assert (copy.end, copy.tip) == (16, b"a")
    path.cut_to(15)
    assert (path.end, copy.end) == (0, 16)
    copy.drop_last()
    assert copy.tip is None
