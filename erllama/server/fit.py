"""Which turns of a conversation that is too long are left out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEAD_ROLES = ("system", "developer")


def without_oldest(
    messages: Sequence[Mapping[str, Any]], *, n_prompt: int, n_wanted: int
) -> list[Mapping[str, Any]] | None:
    """The messages without the oldest exchanges, so that about `n_wanted` of `n_prompt` tokens are left.

    System messages stay, and so does the last exchange: what the user asked last and all that came of it. An
    exchange is a user's message and what follows it, so calls and their results go together.
    None: nothing can be left out.
    """
    head = [m for m in messages if m.get("role") in HEAD_ROLES]
    exchanges: list[list[Mapping[str, Any]]] = []
    for message in messages:
        if message.get("role") in HEAD_ROLES:
            continue
        if message.get("role") == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    if len(exchanges) < 2:
        return None
    # Characters stand for tokens; the caller renders what is left and comes back if that was too little.
    total = sum(map(_weight, messages)) or 1
    surplus = total * max(n_prompt - n_wanted, 1) / max(n_prompt, 1)
    while len(exchanges) > 1 and surplus > 0:
        surplus -= sum(map(_weight, exchanges.pop(0)))
    return [*head, *(m for exchange in exchanges for m in exchange)]


def _weight(message: Mapping[str, Any]) -> int:
    """About how long a message is, in characters."""
    return 16 + len(str(message.get("content") or "")) + len(str(message.get("tool_calls") or ""))
