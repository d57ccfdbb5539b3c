"""A fake whose memory is compared with the books before every step, and which fails now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import erllama
from erllama.backend import Step, StepResult, StepStatus
from erllama.engine.cells import n_distinct
from erllama.engine.runner import InlineRunner
from erllama.testing import FakeBackend
from erllama.types import PartKind

if TYPE_CHECKING:
    import random

    from erllama.engine.actor import Actor


class Watched(FakeBackend):
    """Before each step: every slot holds exactly the tokens its owner believes in, in as many cells."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.actor: Actor | None = None
        self.n_compared = 0
        self.n_imports = 0
        self.n_refused = 0
        self.before_step = self.look

    def look(self, step: Step) -> StepResult | None:
        """Compare, unless something decided since the step was handed over is still to be done."""
        assert self.actor is not None
        lanes = self.actor._lanes
        if lanes._ops or lanes._n_reserved != step.n_tokens or self._is_queued_behind():
            return None
        holders = {holder.slot: holder for holder in lanes._holders()}
        if not self._layout.base:
            lengths = {slot: held.n for slot, held in self.slots.items() if held.n}
            filling = {slot for slot, h in holders.items() if h.is_restoring}
            lengths = {slot: n for slot, n in lengths.items() if slot not in filling}
            believed = {slot: h.n_kv for slot, h in holders.items() if h.n_kv and slot not in filling}
            assert lengths == believed, f"held {lengths}, believed {believed}"
            self.n_compared += 1
            return None
        held = {slot: [cells[p] for p in range(len(cells))] for slot, cells in self.memory.items() if cells}
        wanted = {slot: list(h.ledger[: h.n_kv]) for slot, h in holders.items() if h.n_kv}
        shown = sorted((slot, len(ids), len(wanted.get(slot, ()))) for slot, ids in held.items())
        assert held == wanted, f"(slot, held, believed): {shown}"
        assert n_distinct(h.cells for h in holders.values()) == self._n_used()
        self.n_compared += 1
        return None

    def _is_queued_behind(self) -> bool:
        """Whether another call waits for its turn, perhaps with decisions that it will carry out first."""
        assert self.actor is not None
        runner = self.actor._thread._runner
        return isinstance(runner, InlineRunner) and runner.has_waiting

    def import_(
        self,
        slot: int,
        block: tuple[int, int],
        wanted: tuple[int, int],
        data: memoryview,
        part: PartKind = PartKind.BASE,
    ) -> bool:
        """Count what arrives and what does not."""
        arrived = super().import_(slot, block, wanted, data, part)
        self.n_imports += arrived
        self.n_refused += not arrived
        return arrived


class Moody(Watched):
    """Refuses, aborts, times out and fails now and then, by a seeded coin."""

    def __init__(self, coin: random.Random, **settings: object) -> None:
        super().__init__(**settings)
        self._coin = coin

    def look(self, step: Step) -> StepResult | None:
        """A mood for most steps: none."""
        super().look(step)
        mood = self._coin.random()
        if mood < 0.03 and len(step.rows) > 1:
            return StepResult(status=StepStatus.NO_ROOM, rc=1)
        if mood < 0.05:
            for row in step.rows[: self._coin.randint(0, len(step.rows))]:
                self._remember(row)
            return StepResult(status=StepStatus.ABORTED, rc=2)
        if mood < 0.052:
            return StepResult(status=StepStatus.TIMEOUT)
        if mood < 0.054:
            return StepResult(status=StepStatus.FATAL, rc=-3)
        if mood < 0.056:
            raise erllama.NativeError("now and then")
        return None

    def import_(
        self,
        slot: int,
        block: tuple[int, int],
        wanted: tuple[int, int],
        data: memoryview,
        part: PartKind = PartKind.BASE,
    ) -> bool:
        """Now and then the bytes are refused, in either of two ways."""
        mood = self._coin.random()
        if mood < 0.02:
            self.n_refused += 1
            return False
        if mood < 0.03:
            self.n_refused += 1
            raise erllama.NativeError("these bytes break something")
        return super().import_(slot, block, wanted, data, part)
