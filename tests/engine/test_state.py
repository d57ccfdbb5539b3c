"""The table of a sequence's life, walked cell by cell, and the page drawn from it."""

from __future__ import annotations

import itertools

import draw_states
import pytest

from erllama.engine.state import TRANSITIONS, Happening, IllegalTransition, Lifecycle, Phase

PATHS: dict[Phase, list[Happening]] = {
    Phase.QUEUED: [],
    Phase.RESTORE: [Happening.ADMITTED],
    Phase.PREFILL: [Happening.ADMITTED, Happening.RESTORED],
    Phase.DECODE: [Happening.ADMITTED, Happening.RESTORED, Happening.PREFILLED],
    Phase.FINISHED: [Happening.FINISHED],
}
ALLOWED = {
    (Phase.QUEUED, Happening.ADMITTED): Phase.RESTORE,
    (Phase.QUEUED, Happening.FINISHED): Phase.FINISHED,
    (Phase.RESTORE, Happening.RESTORED): Phase.PREFILL,
    (Phase.RESTORE, Happening.PREEMPTED): Phase.QUEUED,
    (Phase.RESTORE, Happening.FINISHED): Phase.FINISHED,
    (Phase.PREFILL, Happening.PREFILLED): Phase.DECODE,
    (Phase.PREFILL, Happening.REWOUND): Phase.PREFILL,
    (Phase.PREFILL, Happening.PREEMPTED): Phase.QUEUED,
    (Phase.PREFILL, Happening.FINISHED): Phase.FINISHED,
    (Phase.DECODE, Happening.REWOUND): Phase.PREFILL,
    (Phase.DECODE, Happening.PREEMPTED): Phase.QUEUED,
    (Phase.DECODE, Happening.FINISHED): Phase.FINISHED,
}


@pytest.mark.parametrize(("phase", "happening"), list(itertools.product(Phase, Happening)))
def test_every_cell(phase: Phase, happening: Happening):
    """Each phase meets each happening: it moves as listed here, or refuses and stays."""
    life = Lifecycle()
    for step in PATHS[phase]:
        life.fire(step)
    assert life.phase is phase
    if (phase, happening) in ALLOWED:
        assert life.fire(happening) is life.phase is ALLOWED[phase, happening]
    else:
        with pytest.raises(IllegalTransition, match=f"{phase.value} cannot be {happening.value}"):
            life.fire(happening)
        assert life.phase is phase


def test_every_phase_has_a_row_and_leads_to_the_end():
    """No phase is forgotten, and from each one FINISHED is one happening away."""
    assert set(TRANSITIONS) == set(Phase)
    assert all(
        row.get(Happening.FINISHED) is Phase.FINISHED
        for phase, row in TRANSITIONS.items()
        if phase is not Phase.FINISHED
    )


def test_the_page_is_current():
    """docs/internals/states.md is what the table says today; else run `python tools/draw_states.py`."""
    assert draw_states.PAGE.read_text(encoding="utf-8") == draw_states.render()


def test_the_page_shows_every_transition():
    """Each cell of the table is an arrow of the diagram."""
    page = draw_states.render()
    for phase, row in TRANSITIONS.items():
        for happening, target in row.items():
            assert f"{phase.value} --> {target.value}: {happening.value}" in page
