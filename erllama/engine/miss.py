"""Why not more of a prompt was reused, from the evidence that admission and look-up left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.types import Miss

from .evidence import AROUND

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Tokens

    from erllama.backend import Layout

    from .sequence import Sequence


def explain(
    seq: Sequence,
    *,
    min_tokens: float,
    layout: Layout | None,
    text: Callable[[Tokens[int]], str],
) -> Miss | None:
    """The reason, or None when all but the last token was there. Only for a sequence that was admitted.

    `min_tokens`: shorter histories are not stored. `layout`: of what is kept; None: nothing can be.
    """
    n, seen = seq.n_cached, seq.evidence
    if seq.options.cache == "off":
        return Miss(reason="cache_off", message='the request asked for cache="off"')
    if layout is None:
        return Miss(reason="not_cached", message="this model's memory is not kept")
    if n >= seq.n_prompt - 1:
        return None
    if seen.failed:
        return Miss(
            reason="restore_failed", message=f"what is stored behind token {n} could not be restored", index=n
        )
    if seen.evicted_to > n:
        message = f"tokens {n} to {seen.evicted_to} were stored and had to make room"
        return Miss(reason="evicted", message=message, index=n)
    if seen.whole > n and not layout.cuttable:
        message = f"tokens up to {seen.whole} are kept, but a window or state to go on from only up to {n}"
        return Miss(reason="part_missing", message=message, index=n)
    if seen.kept and seen.reach >= n:
        return _differs(seq, text)
    if n:
        return Miss(
            reason="ends_at",
            message=f"nothing that is kept goes on like the prompt behind token {n}",
            index=n,
        )
    if seq.n_prompt < min_tokens:
        message = f"nothing is kept that begins like this; below {min_tokens:.0f} tokens nothing is stored"
        return Miss(reason="below_gate", message=message)
    return Miss(reason="nothing_stored", message="nothing is kept that begins like this prompt")


def _differs(seq: Sequence, text: Callable[[Tokens[int]], str]) -> Miss:
    at = seq.evidence.reach
    stored, asked = (
        text(seq.evidence.kept),
        text(seq.ledger[max(0, at - AROUND) : min(at + AROUND, seq.n_prompt)]),
    )
    return Miss(
        reason="differs_at",
        message=f"at token {at} the prompt differs from what is kept: {stored!r} there, {asked!r} here",
        index=at,
        stored=stored,
        asked=asked,
    )
