"""What users call to go on where a session stands."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Unpack

import trio

from erllama.engine.home import require_home
from erllama.engine.purpose import Purpose
from erllama.errors import EngineError, InvalidOption, MissingOption
from erllama.options import GenerationOptions

from .request_calls import RequestCalls
from .text_calls import token_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Sequence

    from erllama.engine.request import EventStream
    from erllama.types import Completion

    from .generation import Continuation
    from .text_calls import Prompt

RESET_PATIENCE_S = 5.0


class SessionCalls(RequestCalls):
    """The part of `Model` that knows sessions: see the guide."""

    async def continue_(
        self,
        tail_tokens: Prompt,
        *,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Unpack[Continuation],
    ) -> Completion:
        """Generate behind what the session holds, prompt and answer so far, and `tail_tokens`.

        Only the tail is computed, and what was sampled last; nothing is looked up (with `exact="cold"` it
        is, and answers are prefilled again). To a tail given as text no tokens are added; an empty one goes
        on with the answer. `expect_committed`: the ids that the session must hold, or nothing happens.
        Raises: as `complete`, and `MissingOption` (no session), `NoSession` (it is not held any more),
        `StickyBusy`, `TranscriptMismatch`, `NotSupported` (this model's memory cannot be cut).
        Cancellation: as `complete`; the session keeps what was computed.
        """
        arguments = {
            "tail_tokens": tail_tokens,
            "session_id": session_id,
            "expect_committed": expect_committed,
            **generation,
        }
        done: Completion = await self._calls.run("continue_", arguments, self._continue_whole)
        return done

    async def _continue_whole(self, **arguments: Any) -> Completion:
        return await self._collected(self._continued(**arguments))

    def continue_stream(
        self,
        tail_tokens: Prompt,
        *,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Unpack[Continuation],
    ) -> AbstractAsyncContextManager[EventStream]:
        """`continue_` as events; see `stream`."""
        arguments = {
            "tail_tokens": tail_tokens,
            "session_id": session_id,
            "expect_committed": expect_committed,
            **generation,
        }
        return self._block("continue_stream", arguments, self._continued)

    def _continued(
        self,
        tail_tokens: Prompt,
        session_id: Hashable = None,
        expect_committed: Sequence[int] | None = None,
        **generation: Any,
    ) -> AbstractAsyncContextManager[EventStream]:
        if session_id is None:
            raise MissingOption("continuing needs the session_id of an earlier request", detail="session_id")
        options = GenerationOptions(session_id=session_id, **generation)
        if options.cache != "on":
            raise InvalidOption(
                f"cache={options.cache!r}: a continuation goes on from what is kept, so it keeps it",
                detail={"key": "cache", "value": options.cache},
            )
        expected = None if expect_committed is None else token_ids(expect_committed)
        return self._continue(tail_tokens, expected, options)

    @asynccontextmanager
    async def _continue(
        self, tail: Prompt, expected: list[int] | None, options: GenerationOptions
    ) -> AsyncIterator[EventStream]:
        handle = self._live()
        options = await self._constrained(options)
        if isinstance(tail, str):
            ids = await self._prompt_ids(tail, add_special=False) if tail else []
        else:
            ids = token_ids(tail)

        def prompt() -> list[int]:
            return [*handle.actor.history(options.session_id, expected, options.salt), *ids]

        async with self._request(prompt, options, Purpose.CONTINUE) as events:
            yield events

    async def end_session(self, session_id: Hashable, *, salt: bytes = b"") -> None:
        """Give the session's sequence back; a turn in flight goes on and is not held after. Idempotent.

        `salt`: that of its requests; ids are names within it.
        """
        self._live().actor.end_session(session_id, salt)
        await trio.lowlevel.checkpoint()

    async def reset_session(
        self, session_id: Hashable, *, salt: bytes = b""
    ) -> Literal["recovered", "not_found"]:
        """Drop what the session holds, and end its request in flight; its reader gets `EngineReset` at once.

        Raises: `EngineError` with reason "timeout" if its sequence is not free again after 5 s.
        Cancellation: the request is ended all the same.
        """
        require_home(self.handle.home)
        actor = self._live().actor
        hit = actor.reset_session(session_id, salt)
        held = actor.end_session(session_id, salt, keep_cells=False)
        with trio.move_on_after(RESET_PATIENCE_S) as patience:
            for seq in hit:
                await seq.ended.wait()
        if patience.cancelled_caught:
            raise EngineError(
                f"session {session_id!r} is still computing after {RESET_PATIENCE_S:g} s", reason="timeout"
            )
        return "recovered" if hit or held else "not_found"
