"""Model: what a user asks of one loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erllama.engine.home import require_home
from erllama.types import Exactness

from .chat_calls import ChatCalls
from .embed_calls import EmbedCalls
from .info import ModelInfo, Phase, RequestInfo
from .kept_calls import KeptCalls
from .session_calls import SessionCalls

if TYPE_CHECKING:
    from erllama.engine.handle import Handle
    from erllama.engine.statistics import ActorStatistics

    from .calls import Calls
    from .chat import ModelChat
    from .raw_thinking import RawThinking


class Model(SessionCalls, KeptCalls, ChatCalls, EmbedCalls):
    """A loaded model. Made by `Engine.load_model`; once it is unloaded, every method but `unload` and
    `wait_closed` raises `NotLoaded`.
    """

    def __init__(
        self,
        handle: Handle,
        path: str | None,
        buffer_events: int,
        chat: ModelChat,
        calls: Calls,
        thinking: RawThinking | None = None,
    ) -> None:
        super().__init__(handle, buffer_events, chat, calls, thinking)
        self._path = path

    def __repr__(self) -> str:
        return repr(self.handle)

    # --- read-outs: plain reads, they never wait for the model ---

    def phase(self) -> Phase:
        """`idle`, `prefilling` or `generating`."""
        return self._live().phase

    def pending_len(self) -> int:
        """Requests that wait for a sequence."""
        return self.statistics().n_waiting

    def queue_depth(self) -> int:
        """Requests that wait or run."""
        return self._live().actor.n_requests

    def statistics(self) -> ActorStatistics:
        """Counters and gauges of the engine that runs this model."""
        return self._live().actor.statistics()

    def requests(self) -> list[RequestInfo]:
        """Requests that wait or run, oldest first."""
        return [
            RequestInfo(
                id=seq.request.id,
                model_id=self.model_id,
                phase=seq.phase.value,
                n_prompt=seq.n_prompt,
                n_cached=seq.n_cached,
                n_generated=seq.n_generated,
                n_kv=seq.n_kv,
            )
            for seq in self._live().actor.sequences()
        ]

    def info(self) -> ModelInfo:
        """Everything worth knowing about the model."""
        handle = self._live()
        statistics = handle.actor.statistics()
        return ModelInfo(
            model_id=self.model_id,
            path=self._path,
            phase=handle.phase,
            pending_len=statistics.n_waiting,
            n_ctx=handle.facts.n_ctx,
            n_seq_max=handle.facts.n_slots,
            available_seqs=statistics.n_available,
            pinned_idle_seqs=statistics.n_pinned_idle,
            last_cache_hit=handle.actor.hits.last,
            memory_kind=handle.facts.memory_kind.value,
            status="stopping" if handle.stopping else "loaded",
            quant_tag=handle.facts.quant_tag,
            exactness=Exactness(
                cold=handle.actor.cold.holds,
                reason=handle.actor.cold.reason,
                default=handle.exact,
                deterministic=handle.deterministic,
            ),
            parts=() if handle.facts.layout is None else handle.facts.layout.parts,
            embeddings=handle.facts.embeddings,
            generates=handle.facts.generates,
            vram_estimate_bytes=handle.facts.memory_bytes,
            loaded_at_monotonic=handle.loaded_at,
            details=dict(handle.facts.details),
        )

    # --- end ---

    async def unload(self) -> None:
        """Free the model; who still waits for an answer gets `NotLoaded`.

        Harmless when it is unloaded already. Cancellation: it is freed all the same.
        """
        require_home(self.handle.home)
        self.handle.stop()
        await self.handle.closed.wait()

    async def wait_closed(self) -> None:
        """Until the model is unloaded, by whomever."""
        require_home(self.handle.home)
        await self.handle.closed.wait()
