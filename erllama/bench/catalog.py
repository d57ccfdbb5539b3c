"""All workloads, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.errors import InvalidOption

from . import cancel, chat, decode, lookup, memory, over_http, prefill, restore, saving, sharing, stall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .workload import Workload

WORKLOADS = (
    *(decode.DECODE, decode.NEIGHBOURS, prefill.PREFILL, restore.RAM, restore.DISK, chat.GROWTH),
    *(sharing.SHARING, chat.EDIT, lookup.LOOKUP, stall.LOOP, stall.GAP, saving.SAVING, memory.RSS),
    *(over_http.OVER_HTTP, cancel.CANCEL, chat.BRANCH, chat.RETURN, restore.WINDOW, memory.RESUME_POINTS),
)


def choose(names: Sequence[str]) -> list[Workload]:
    """The named workloads, all for none; case does not matter. Raises: `InvalidOption`."""
    by_id = {workload.id.lower(): workload for workload in WORKLOADS}
    unknown = [name for name in names if name.lower() not in by_id]
    if unknown:
        known = ", ".join(workload.id for workload in WORKLOADS)
        raise InvalidOption(
            f"no workload {unknown[0]!r}; there are {known}", detail={"key": "workload", "value": unknown[0]}
        )
    wanted = {name.lower() for name in names} or by_id.keys()
    return [workload for key, workload in by_id.items() if key in wanted]
