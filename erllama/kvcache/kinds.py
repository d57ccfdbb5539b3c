"""The small closed sets the store speaks in: part kinds, save reasons, provenance, flags, refusals."""

from __future__ import annotations

import enum

from erllama.types import PartKind as PartKind

NAME_BYTES = 32
ROOT_NAME = bytes(NAME_BYTES)  # the parent of every first block


class SaveReason(enum.IntEnum):
    """Why a node was stored; the number is in the file's header."""

    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    FINISH = 5
    AGENT_PREFIX = 6


class Provenance(enum.IntEnum):
    """How the block's KV was computed; look-ups never ask. CANONICAL: in whole pieces, for `exact="cold"`."""

    PREFILL = 0
    CANONICAL = 1
    DECODED = 2


class NodeFlag(enum.IntFlag):
    """Facts about a node that eviction has to know."""

    NONE = 0
    ANCHOR = 1  # a message boundary: window parts and states kept here are evicted last
    PRIVATE = 2  # never on a file tier


class Refusal(enum.StrEnum):
    """Why the store did not take a save. Counted, never raised: the request goes on."""

    BACK_PRESSURE = "back_pressure"  # too many bytes wait for the writers
    NO_ROOM = "no_room"  # does not fit, or only by evicting what is worth more
    TOO_LARGE = "too_large"  # larger than the whole tier, or than a file may be
    FIRST_SIGHTING = "first_sighting"  # policy: stored when it is seen again
    WRITE_RATE = "write_rate"  # the tier's write rate is used up
    NO_PARENT = "no_parent"  # what it hangs on (its parent, its base) is not, or no longer, stored
    TIER_OFF = "tier_off"  # the tier failed or is read-only
    CLOSED = "closed"  # the store is shutting down
    BELOW_GATE = "below_gate"  # shorter than the policy's minimum
    ABANDONED = "abandoned"  # dropped while it was being written
