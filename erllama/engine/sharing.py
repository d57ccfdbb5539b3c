"""Prompts that begin alike are computed once: what one sequence can have of another's memory.

With residents and with sequences that still run, as far as memory can be cut: with a window or a state, what
somebody holds can be had whole or not at all; and only under the same salt. Pure of I/O: what is to be done
to memory is put where the owner does it before the next native call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory_ops import MemoryOp, Share
from .resident import Resident, n_common
from .state import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from erllama.backend import BackendFacts

    from .sequence import Sequence


class Sharing:
    """Among the sequences and residents of one context, which belong to its `Lanes`."""

    def __init__(
        self,
        facts: BackendFacts,
        running: dict[int, Sequence],
        residents: dict[int, Resident],
        put: Callable[[MemoryOp], None],
    ) -> None:
        self._layout = facts.layout
        self._n_batch = facts.n_batch
        self._running = running
        self._residents = residents
        self._put = put
        self._left: list[Resident] = []  # residents that ran a moment ago
        self._alike: dict[tuple[int, int], int] = {}  # common beginnings of running sequences, by arrival
        self.is_off = False  # memory has shown that it has no room for what sharing needs

    def __repr__(self) -> str:
        return f"<Sharing among {len(self._running)} running, {len(self._residents)} residents>"

    def left(self, seq: Sequence, resident: Resident | None) -> None:
        """`seq` gave its slot up, and this is what stays of it."""
        self.respelled(seq)
        if resident is not None:
            self._left.append(resident)

    def share_running(self, now: float) -> set[Sequence]:
        """Give sequences what older ones with the same beginning have computed; who had better wait for more.

        A prompt is computed by the oldest sequence that has it; the others take it as it comes. Should that
        one leave, the next oldest goes on from where it was.
        """
        waiting: set[Sequence] = set()
        if self.is_off:
            return waiting
        filling = [s for s in self._running.values() if s.phase is Phase.PREFILL]
        self._take_over(filling, now)
        for seq in sorted(filling, key=lambda s: s.arrival):
            leader, n = self._leader(seq)
            if leader is None:
                continue
            end = self._n_given(leader, n)
            if end > seq.n_kv and self._is_due(leader, n):
                seq.evidence.saw(n, leader.ledger, leader.n_tokens)
                self._share(leader, seq, end, now)
            if n > seq.n_kv and seq.phase is Phase.PREFILL and self._leads(leader, seq, n):
                waiting.add(seq)
        return waiting

    def _take_over(self, filling: list[Sequence], now: float) -> None:
        """What a leader computed in its last step is left to those who followed it."""
        if not self._left:
            return
        self._left = [r for r in self._left if self._residents.get(r.slot) is r]
        for seq in filling:
            for resident in self._left:
                if (n := self.n_shared(seq, resident)) > seq.n_kv:
                    seq.evidence.saw(n, resident.ledger, resident.n_kv)
                    self._share(resident, seq, n, now)
        if all(s.phase is not Phase.RESTORE for s in self._running.values()):
            self._left.clear()

    def _share(self, source: Resident | Sequence, seq: Sequence, end: int, now: float) -> None:
        self._put(Share(source.slot, seq.slot, seq.n_kv, end))
        seq.share(source, end, now)

    def _n_given(self, leader: Sequence, n: int) -> int:
        """How much of its first `n` tokens `leader` can give away now."""
        assert self._layout is not None
        if leader.phase is Phase.RESTORE and not self._layout.cuttable:
            return 0  # its memory is at no legal place
        return self._layout.cut(leader.n_kv, n)

    def _is_due(self, leader: Sequence, n: int) -> bool:
        """Where sharing takes all or nothing, it is put off until the leader may go beyond `n`."""
        assert self._layout is not None
        return self._layout.cuttable or leader.phase is not Phase.PREFILL or leader.n_kv + self._n_batch > n

    def _leads(self, leader: Sequence, seq: Sequence, n: int) -> bool:
        """Whether `leader` is on its way to give `seq` more: nobody waits for one whose reader lags."""
        if leader.phase is Phase.PREFILL:
            passed = leader.n_kv > n and self._n_given(leader, n) <= seq.n_kv
            return leader.buffer.has_room and leader.n_kv >= seq.n_kv and not passed
        assert self._layout is not None
        return leader.phase is Phase.RESTORE and self._layout.cuttable

    def n_led(self, seq: Sequence) -> int:
        """How much of `seq` an older running sequence has or will have."""
        return self._leader(seq)[1]

    def _leader(self, seq: Sequence) -> tuple[Sequence | None, int]:
        """The older running sequence that shares more of `seq` than it has itself, and how much."""
        best: tuple[Sequence | None, int] = (None, seq.n_kv)
        if self.is_off or seq.options.cache == "off" or self._layout is None:
            return best
        for other in self._running.values():
            if other.arrival > seq.arrival or other is seq or (n := self._n_alike(seq, other)) <= best[1]:
                continue
            if self._n_given(other, n) > seq.n_kv or self._leads(other, seq, n):
                best = other, n
        return best

    def _n_alike(self, seq: Sequence, other: Sequence) -> int:
        """Common beginning of two prompts, whether computed yet or not."""
        if self._layout is None or other.options.cache == "off" or other.salt != seq.salt:
            return 0
        pair = seq.arrival, other.arrival
        if pair not in self._alike:
            self._alike[pair] = n_common(seq.ledger[: seq.n_tokens - 1], np.asarray(other.ledger, np.int32))
        return self._alike[pair]

    def n_shared(self, seq: Sequence, holder: Resident | Sequence) -> int:
        """How many tokens of `seq` it can have from `holder` as things are; its last is always computed."""
        if self._layout is None or seq.options.cache == "off" or not holder.shareable:
            return 0
        if holder.salt != seq.salt:
            return 0
        if holder.is_restoring and not self._layout.cuttable:
            return 0  # its memory is at no legal place
        n = min(holder.n_kv, seq.n_tokens - 1)
        n = n_common(seq.ledger[:n], np.asarray(holder.ledger[:n], np.int32))
        return self._layout.cut(holder.n_kv, n)

    def respelled(self, seq: Sequence) -> None:
        """The ids of its prompt are others now."""
        self._alike = {pair: n for pair, n in self._alike.items() if seq.arrival not in pair}
