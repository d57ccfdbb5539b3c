"""Which parts leave: closure, order, protection, newcomers; and policies, rates, block cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erllama.errors import InvalidOption, UnknownOption
from erllama.kvcache.costs import PrefillCosts
from erllama.kvcache.key import Identity
from erllama.kvcache.kinds import NodeFlag, PartKind, Refusal, SaveReason
from erllama.kvcache.parts import RAM
from erllama.kvcache.pins import PinBoard
from erllama.kvcache.planner import Plan, Want, _Planner, newcomer_score, plan_evictions
from erllama.kvcache.policy import SavePolicy, SecondSighting, TokenBucket, cut_blocks, legal_cut
from erllama.kvcache.score import HALF_LIFE_S, PrefillCost, add_hit, reuse

from .nodes import node
from .stores import Clock
from .test_tree import Model

if TYPE_CHECKING:
    import random

NOW = 1_000_000
DISK = 1


def plan(model: Model, n_bytes: int, slot: int = DISK, **options: object) -> Plan:
    parts = model.tree.parts
    want = Want(slot=slot, n_bytes=n_bytes, now=NOW, cost_of=lambda row: int(parts.size[row]), **options)  # type: ignore[arg-type]
    return plan_evictions(model.tree, want)


def add(model: Model, meta, size=100, used=NOW, kind=PartKind.BASE, home=DISK, hits=0.0):
    row = model.add(meta)
    part = model.tree.add_part(row, kind, size, home, used)
    model.tree.parts.hits[part] = hits
    return part


def check_keys(model: Model, parts: list[int], costs: PrefillCosts | None = None) -> None:
    """One part at a time or all at once: the same keys."""
    for slot in (RAM, DISK):
        protected = {model.tree.parts.node[parts[0]]}
        given = {"protected": protected, "costs": costs or PrefillCosts()}
        want = Want(slot=slot, n_bytes=1, now=NOW, cost_of=lambda row: 1, **given)
        planner = _Planner(model.tree, want)
        columns = {name: column[parts] for name, column in model.tree.parts.columns().items()}
        assert planner._keys(columns).tolist() == pytest.approx([planner._key(part) for part in parts])


@settings(max_examples=80, deadline=None)
@given(st.randoms(), st.integers(1, 40), st.integers(1, 3000), st.booleans())
def test_what_is_left_is_closed(rng: random.Random, n: int, n_bytes: int, force: bool) -> None:
    """K35: after any plan every node left has its ancestors, and nothing locked or protected went."""
    model, metas = Model(), []
    for i in range(n):
        above = rng.choice([None, *metas])
        meta = node([i, rng.randrange(26)], above)
        metas.append(meta)
        add(
            model,
            meta,
            rng.choice([0, rng.randrange(1, 200)]),
            NOW - rng.randrange(10**6),
            hits=rng.random() * 5,
        )
        if rng.random() < 0.3:
            add(model, meta, rng.randrange(1, 50), kind=rng.choice([PartKind.STATE, PartKind.WHOLE]))
    parts = [p for row in model.tree.rows() for p in model.tree.part_rows(row)]
    check_keys(model, parts)
    locked = set(rng.sample(parts, len(parts) // 5))
    protected = {model.tree.parts.node[p] for p in rng.sample(parts, len(parts) // 5)}
    chosen = plan(model, n_bytes, locked=locked, protected=protected, force=force)
    gone = set(chosen.parts)
    assert len(gone) == len(chosen.parts)
    assert not gone & locked
    assert chosen.freed_bytes == sum(model.tree.parts.size[p] for p in gone)
    assert chosen.enough == (chosen.freed_bytes >= n_bytes)
    if not force:
        assert not {model.tree.parts.node[p] for p in gone} & protected
    for row in model.tree.rows():
        left = [p for p in model.tree.part_rows(row) if p not in gone]
        parent = model.tree.parent[row]
        lost_some = len(left) == 1 and len(model.tree.part_rows(row)) == 2
        if lost_some and model.tree.parts.is_base(left[0]) and not model.tree.parts.size[left[0]]:
            assert left[0] in locked or not model.tree.is_leaf(row), "a path to nothing"
        if left and model.tree.parent[parent]:
            above_left = [p for p in model.tree.part_rows(parent) if p not in gone]
            assert any(model.tree.parts.is_base(p) for p in above_left)
    # Order: carrying it out step by step never removes a base before what hangs behind it.
    seen: set[int] = set()
    for part in chosen.parts:
        if model.tree.parts.is_base(part):
            for child in model.tree.children(model.tree.parts.node[part]):
                assert all(p in seen for p in model.tree.part_rows(child))
        seen.add(part)


def test_everything_goes_if_everything_must() -> None:
    """A plan for more than there is takes all, heads last, and says that it is not enough."""
    model, above = Model(), None
    rows = []
    for i in range(600):
        above = node([i % 26], above)
        rows.append(add(model, above))
    chosen = plan(model, 10**9)
    assert chosen.parts == rows[::-1]
    assert not chosen.enough


def test_more_hits_survive_until_they_are_old() -> None:
    """K29: with equal recency the one hit more stays; after many half-lives it is only who was used last."""
    model = Model()
    often, once = add(model, node([1]), hits=5.0), add(model, node([2]), hits=1.0)
    assert plan(model, 1).parts == [once]
    old = int(NOW - 40 * HALF_LIFE_S)
    for part in (often, once):
        model.tree.parts.used[part] = max(0, old)
    model.tree.parts.used[once] = max(0, old) + 3600
    assert plan(model, 1).parts == [often]


def test_a_small_head_outlives_large_tails() -> None:
    """K29: bytes count; equal tokens in a tenth of the bytes are worth ten times as much."""
    model = Model()
    add(model, node([1, 2]), size=10)
    large = add(model, node([3, 4]), size=100)
    assert plan(model, 1).parts == [large]


def test_what_takes_longer_to_compute_outlives_the_rest() -> None:
    """Equal bytes, equal use: the KV of the slow model stays, and one nobody measured is worth their mean."""
    model, costs = Model(), PrefillCosts()
    identities = {name: Identity(shape_hash=name.encode()) for name in ("slow", "quick", "unknown")}
    part = {name: add(model, node([1, 2], identity=each)) for name, each in identities.items()}
    for name, per_token_s in (("slow", 1.0), ("quick", 0.1)):
        costs.set(model.tree.shape_number(identities[name].shape_hash), PrefillCost(per_token_s, 0.0))
    assert plan(model, 300, costs=costs).parts == [part["quick"], part["unknown"], part["slow"]]
    behind = add(model, node([3, 4], node([1, 2], identity=identities["slow"]), identity=identities["slow"]))
    assert plan(model, 200, costs=costs).parts == [part["quick"], part["unknown"]]
    assert behind in plan(model, 400, costs=costs).parts
    check_keys(model, [*part.values(), behind], costs)


def test_windows_and_states_go_before_bases_and_anchors_last() -> None:
    """K29: away from anchors by age first; an anchor's by its worth; the base is untouched."""
    model, above, loose = Model(), None, []
    for i in range(3):
        above = node([i], above, flags=NodeFlag.ANCHOR if i == 2 else NodeFlag.NONE)
        add(model, above)
        loose.append(add(model, above, kind=PartKind.WINDOW, used=NOW - i))
    assert plan(model, 150).parts == [loose[1], loose[0]]


def test_an_empty_base_goes_when_nothing_hangs_on_it_any_more() -> None:
    """Alone it is worth nothing and goes first; otherwise it goes with what hangs on it, never before."""
    model = Model()
    full = add(model, node([1]), used=NOW - 10**6)
    alone = add(model, node([2]), size=0)
    head = node([3], flags=NodeFlag.ANCHOR)
    base, state = add(model, head, size=0), add(model, head, size=50, kind=PartKind.STATE, hits=9.0)
    behind = add(model, node([4], head), size=0, used=NOW + 1)
    assert plan(model, 1).parts == [alone, behind, full]
    assert plan(model, 120).parts == [alone, behind, full, state, base]
    assert plan(model, 10**6, locked={base}).parts == [alone, behind, full, state]
    model.tree.parts.home[state] = RAM
    assert plan(model, 10**6).parts == [alone, behind, full, state, base], (
        "what is elsewhere holds nothing up"
    )


def test_an_empty_base_on_a_file_tier_is_not_evicted_from_ram() -> None:
    """Its state is in RAM only, as where the tier had no room for it: that goes, the base stays there."""
    model = Model()
    head = node([1])
    base, state = add(model, head, size=0), add(model, head, size=50, kind=PartKind.STATE, home=RAM)
    assert plan(model, 1, RAM).parts == [state]
    model.tree.parts.hot[base] = 1
    assert sorted(plan(model, 60, RAM).parts) == sorted([state, base]), "its copy may go"
    assert plan(model, 1, DISK).parts == [state, base]


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(1, 25), st.integers(1, 3000))
def test_what_leaves_ram_was_there(rng: random.Random, n: int, n_bytes: int) -> None:
    """Of parts with homes all over, a plan for RAM takes what lives there, leaves first, and copies."""
    model, metas = Model(), []
    homes: dict[int, int] = {}
    for i in range(n):
        above = rng.choice([None, *metas])
        meta = node([i, rng.randrange(26)], above)
        metas.append(meta)
        home = RAM if above is not None and homes[metas.index(above)] == RAM else rng.choice([RAM, DISK])
        homes[i] = home
        parts = [add(model, meta, rng.choice([0, 70]), home=home)]
        if rng.random() < 0.5:
            parts.append(add(model, meta, 50, kind=PartKind.STATE, home=rng.choice([RAM, home])))
        for part in parts:
            model.tree.parts.hot[part] |= rng.random() < 0.5
    parts, tree = model.tree.parts, model.tree
    chosen = plan(model, n_bytes, RAM)
    gone = set(chosen.parts)
    assert len(gone) == len(chosen.parts)
    assert all(parts.hot[part] for part in gone)
    forgotten = {part for part in gone if parts.home[part] == RAM}
    for row in tree.rows():
        left = set(tree.part_rows(row)) - forgotten
        if not left:
            assert all(forgotten.issuperset(tree.part_rows(child)) for child in tree.children(row))
        elif tree.part(row, PartKind.BASE):
            assert tree.part(row, PartKind.BASE) in left, "a node without its base is left"


def test_copies_in_ram_go_before_what_lives_there() -> None:
    """A copy of what a file tier holds costs a read, a part that lives in RAM costs its prefill."""
    model = Model()
    model.add(node([1]))
    lives = model.tree.add_part(1 + 1, PartKind.BASE, 100, RAM, NOW - 10**5)
    copy = add(model, node([2]), hits=50.0)
    model.tree.parts.hot[copy] = 1
    assert plan(model, 1, RAM).parts == [copy]
    assert plan(model, 150, RAM).parts == [copy, lives]
    assert plan(model, 150, RAM, copies_only=True).parts == [copy]


def test_a_newcomer_does_not_push_out_what_is_worth_more() -> None:
    """FAULTS "write churn": nothing is evicted for a save that would be the next victim."""
    model = Model()
    add(model, node([1, 2]), hits=50.0)
    ceiling = newcomer_score(PrefillCost().seconds(0, 2), 100)
    assert not plan(model, 1, ceiling=ceiling).enough
    old = add(model, node([3, 4]), used=NOW - 10**5)
    assert plan(model, 1, ceiling=ceiling).parts == [old]


def test_reuse_and_hits() -> None:
    """Half-lives, and a clock that goes backwards."""
    assert reuse(8.0, 0.0) == 9.0
    assert reuse(8.0, HALF_LIFE_S) == pytest.approx(4.5)
    assert reuse(1.0, -50.0) == 2.0
    assert add_hit(8.0, HALF_LIFE_S) == pytest.approx(5.0)
    assert PrefillCost(1.0, 0.0).seconds(100, 5) == 5.0


# --- policies -------------------------------------------------------------------------------------


def test_policy_defaults_and_checks() -> None:
    """K19: the documented defaults; wrong names and values are refused."""
    policy = SavePolicy()
    assert (policy.min_tokens, policy.cold_min_tokens, policy.block_tokens) == (512, 512, 256)
    assert (policy.cold_max_tokens, policy.continued_interval) == (30_000, 2048)
    assert (policy.session_resume_wait_s, policy.match_bytes, policy.second_sighting) == (0.5, True, False)
    assert (policy.ttl_s, policy.pin_fraction) == (None, 0.25)
    with pytest.raises(UnknownOption, match="min_tokens"):
        SavePolicy(min_token=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match=r"math\.inf"):
        SavePolicy(min_tokens=-1)
    with pytest.raises(InvalidOption):
        SavePolicy(block_tokens=0)


def test_whole_states_have_an_upper_gate() -> None:
    """K19: 30,000 tokens are saved whole, 30,001 are not; blocks have no such limit."""
    policy, cold = SavePolicy(), SaveReason.COLD
    assert policy.gate(cold, 30_000, whole=True) is None
    assert policy.gate(cold, 30_001, whole=True) is Refusal.BELOW_GATE
    assert policy.gate(cold, 30_001) is None
    assert policy.gate(SaveReason.SHUTDOWN, 30_001, whole=True) is None


@given(st.integers(0, 600), st.integers(0, 600), st.integers(1, 64), st.booleans())
def test_block_cuts(start: int, length: int, block: int, tail: bool) -> None:
    """D6: pieces follow each other and end at block multiples; a prompt in flight leaves its tail out."""
    end = start + length
    pieces = cut_blocks(start, end, block, tail=tail)
    position = start
    for a, b in pieces:
        assert a == position
        assert a < b <= a + block
        assert b % block == 0 or (tail and b == end)
        position = b
    assert position == end if tail else end - position < block
    assert legal_cut(end, block) % block == 0
    assert 0 <= end - legal_cut(end, block) < block


def test_token_bucket() -> None:
    """X11: an average rate with a burst; one large amount passes when the bucket is full."""
    clock = Clock(0.0)
    bucket = TokenBucket(10.0, 100.0, clock)
    assert bucket.try_take(100)
    assert not bucket.try_take(1)
    clock.now = 5.0
    assert bucket.try_take(50)
    clock.now = 4.0
    assert not bucket.try_take(1)
    clock.now = 100.0
    assert bucket.try_take(10_000)
    assert not bucket.try_take(1)


def test_second_sighting_is_bounded() -> None:
    """X11: names are remembered, the oldest forgotten."""
    sightings = SecondSighting(capacity=2)
    names = [bytes((i,)) * 32 for i in range(3)]
    assert [sightings.seen_before(name) for name in (names[0], names[0], names[1], names[2])] == [
        False,
        True,
        False,
        False,
    ]
    assert not sightings.seen_before(names[0])


def test_pin_board() -> None:
    """K33: least recently used first, time to live, replacement by key."""
    clock = Clock(0.0)
    board = PinBoard(clock)
    board.put("a", b"A", 10)
    board.put("b", b"B")
    board.put("a", b"A2", 10)
    assert board.names() == [b"B", b"A2"]
    board.touch({b"B"})
    assert board.names() == [b"A2", b"B"]
    assert board.shrink(lambda names: len(names) <= 1) == 1
    assert board.n_forced == 1
    board.put("c", b"C", 5)
    clock.now = 6.0
    assert [key for key, _ in board.items()] == ["b"]
    assert board.forget([b"B", b"Z"]) == 1
    assert len(board) == 0


def test_leased_copies_go_from_the_end_and_take_nothing_along() -> None:
    """A spare copy goes alone; what is leased and lives in RAM stays, and so does the node of either."""
    model, above, copies = Model(), None, []
    for i in range(3):
        above = node([i], above)
        copies.append(add(model, above))
        model.tree.parts.hot[copies[-1]] = 1
    state = add(model, above, kind=PartKind.STATE, home=RAM)  # saved while its node was leased
    lives = add(model, node([9]), home=RAM)
    model.tree.parts.hot[state] = model.tree.parts.hot[lives] = 1
    locked = {*copies, lives}
    assert plan(model, 10**6, RAM, locked=locked).parts == [state]
    assert plan(model, 150, RAM, locked=locked, spare=copies, copies_only=True).parts == copies[:0:-1]
    assert plan(model, 10**6, RAM, locked=locked, spare=copies).parts == [state, *copies[::-1]]
    assert plan(model, 10**6, DISK, locked=locked, spare=copies).parts == []
