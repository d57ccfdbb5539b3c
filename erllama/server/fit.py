"""Which turns of a conversation that is too long are left out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


SYSTEM_ROLES = ("system", "developer")


def without_oldest(
    messages: Sequence[Mapping[str, Any]], *, n_prompt: int, n_wanted: int
) -> list[Mapping[str, Any]] | None:
    """The messages without the oldest exchanges, so that about `n_wanted` of `n_prompt` tokens are left.

    System messages stay, wherever they are, and so does the last exchange: what the user asked last and all
    that came of it. An exchange is a user's message and what follows it: calls and their results go together.
    None: nothing can be left out.
    """
    exchanges = _exchanges(messages)
    if len(exchanges) < 2:
        return None
    # Characters stand for tokens; the caller renders what is left and comes back if that was too little.
    total = sum(map(_weight, messages)) or 1
    surplus = total * max(n_prompt - n_wanted, 1) / max(n_prompt, 1)
    dropped: set[int] = set()
    while len(exchanges) > 1 and surplus > 0:
        oldest = exchanges.pop(0)
        dropped |= set(oldest)
        surplus -= sum(_weight(messages[i]) for i in oldest)
    return [message for i, message in enumerate(messages) if i not in dropped]


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of each exchange's messages, without those of the system."""
    found: list[list[int]] = []
    for i, message in enumerate(messages):
        if message.get("role") in SYSTEM_ROLES:
            continue
        if message.get("role") == "user" or not found:
            found.append([])
        found[-1].append(i)
    return found


def _weight(message: Mapping[str, Any]) -> int:
    """About how long a message is, in characters."""
    return 16 + len(str(message.get("content") or "")) + len(str(message.get("tool_calls") or ""))
