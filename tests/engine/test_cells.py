"""Which cells are held, counted once: against real cells kept in dictionaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from erllama.engine.cells import Cells, n_distinct

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "cut", "adopt", "drop"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=60,
)


@given(STEPS)
def test_cells_are_what_a_dictionary_of_cells_says(steps: list[tuple[str, int, int, int]]) -> None:
    """Growing, cutting, sharing and dropping in any order: lengths and the union are those of real cells."""
    books = [Cells() for _ in range(4)]
    real: list[list[object]] = [[] for _ in range(4)]
    for what, a, b, n in steps:
        match what:
            case "grow":
                books[a].grow_to(n)
                real[a] += [object() for _ in range(n - len(real[a]))]
            case "cut":
                books[a].cut_to(n)
                del real[a][n:]
            case "adopt" if a != b and len(real[a]) <= n <= len(real[b]):
                books[a].adopt(books[b], n)
                real[a] += real[b][len(real[a]) : n]
            case "drop":
                books[a], real[a] = Cells(), []
        assert [cells.n for cells in books] == list(map(len, real))
        assert n_distinct(books) == len({id(cell) for cells in real for cell in cells})


def test_pieces_do_not_pile_up() -> None:
    """A sequence that grows token by token stays one piece, also behind what it shares."""
    a, b = Cells(), Cells()
    for n in range(1, 100):
        a.grow_to(n)
    b.adopt(a, 50)
    for n in range(51, 100):
        b.grow_to(n)
    assert repr(a) == "<Cells 99 in 1 pieces>"
    assert repr(b) == "<Cells 99 in 2 pieces>"
    assert n_distinct([a, b]) == 99 + 49
