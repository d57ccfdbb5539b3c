"""What can be read about one model's actor, as one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatistics:
    """Counters since the model was loaded, and gauges of this moment."""

    n_steps: int
    n_prefill_tokens: int
    n_decode_rows: int
    n_preempted: int
    n_parked: int
    n_refused_steps: int
    n_aborted_steps: int
    n_rebuilt: int
    compute_s: float
    sample_s: float
    n_waiting: int
    n_prefilling: int
    n_decoding: int
    n_slots: int
    n_available: int  # slots that are neither running nor held for a session
    n_pinned_idle: int  # slots held for sessions that have no turn in flight
