"""Draw the life of a sequence into docs/internals/states.md, from the table the engine runs on.

`python tools/draw_states.py` writes the page; `tests/engine/test_state.py` fails while it is out of date.
"""

from __future__ import annotations

from pathlib import Path

from erllama.engine.state import TRANSITIONS, Happening, Phase

PAGE = Path(__file__).resolve().parent.parent / "docs" / "internals" / "states.md"

PHASES = {
    Phase.QUEUED: "It waits for a slot. It may hold generated tokens already: then it was preempted.",
    Phase.RESTORE: "It owns a slot; what live sequences and the store hold of its tokens is put into it.",
    Phase.PREFILL: "It owns a slot; all but its last known token go into memory, piece by piece.",
    Phase.DECODE: "It owns a slot; every step computes its last token and samples the next.",
    Phase.FINISHED: "Its reader has got `Done` or an error; slot and sampler are given back.",
}
HAPPENINGS = {
    Happening.ADMITTED: "It got the lowest free slot.",
    Happening.RESTORED: "Whatever could be reused is in memory; often that is nothing.",
    Happening.PREFILLED: "All but its last token are in memory.",
    Happening.REWOUND: "A step was aborted and memory was lost; what is gone is computed again.",
    Happening.PREEMPTED: "No cell was free; as the youngest it gives its own up and waits again.",
    Happening.FINISHED: "Answered, failed or cancelled.",
}


def render() -> str:
    """The page as it should be."""
    return "\n".join([*_head(), *_diagram(), *_phases(), *_table(), *_happenings(), ""])


def _head() -> list[str]:
    return [
        "# The life of a sequence",
        "",
        "Written by `tools/draw_states.py` from `TRANSITIONS` in `erllama/engine/state.py`. Change it there.",
        "",
    ]


def _diagram() -> list[str]:
    arrows = [
        f"    {phase.value} --> {target.value}: {happening.value}"
        for phase, row in TRANSITIONS.items()
        for happening, target in row.items()
    ]
    start, end = f"    [*] --> {Phase.QUEUED.value}", f"    {Phase.FINISHED.value} --> [*]"
    return ["```mermaid", "stateDiagram-v2", start, *arrows, end, "```", ""]


def _phases() -> list[str]:
    return ["| phase | meaning |", "|---|---|", *(f"| {p.value} | {PHASES[p]} |" for p in Phase), ""]


def _table() -> list[str]:
    head = ["| | " + " | ".join(h.value for h in Happening) + " |", "|---" * (len(Happening) + 1) + "|"]
    rows = []
    for phase in Phase:
        targets = (TRANSITIONS[phase].get(h) for h in Happening)
        rows.append(f"| **{phase.value}** | " + " | ".join(t.value if t else "–" for t in targets) + " |")
    return [
        *head,
        *rows,
        "",
        "A dash is a transition that cannot happen: trying it is a bug in the engine.",
        "",
    ]


def _happenings() -> list[str]:
    return ["| happening | when |", "|---|---|", *(f"| {h.value} | {HAPPENINGS[h]} |" for h in Happening)]


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
