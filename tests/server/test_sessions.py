"""Sessions over HTTP: who names one, what is held for it, when it ends, and what a full server says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from runtime.chat_scenes import ScriptedChat

import erllama
from erllama.errors import ErllamaError, QueueFull, SeqCapacity, StickyBusy
from erllama.server.failures import headers_of, status_of
from server.scenes import Scene, chat_body, serving, until

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
SLOW = partial(ScriptedChat, says="word " * 200, threaded=True, step_delay_s=0.02, n_slots=2)
HEADER = {"x-conversation-id": "me"}


def holds(scene: Scene, session: str) -> bool:
    """Whether the engine holds a sequence for it."""
    held: bool = scene.entry().model.handle.actor.holds(session)
    return held


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sessions that were ended, in order."""
    seen: list[object] = []
    real = erllama.Model.end_session

    async def end_session(model: erllama.Model, session_id: Any, **more: Any) -> None:
        seen.append(session_id)
        await real(model, session_id, **more)

    monkeypatch.setattr(erllama.Model, "end_session", end_session)
    return seen


@pytest.mark.parametrize(
    ("path", "more", "headers"),
    [
        (CHAT, {}, HEADER),
        (CHAT, {"prompt_cache_key": "me"}, {}),
        (CHAT, {"prompt_cache_key": "not me"}, HEADER),  # the header is meant for us
        (MESSAGES, {"metadata": {"user_id": "me"}}, {}),
        (OLLAMA, {"stream": False}, HEADER),
    ],
)
async def test_what_names_a_session(path: str, more: dict[str, Any], headers: dict[str, str]) -> None:
    """A header on every surface, and each dialect's own field; its turn is held when it has ended well."""
    async with serving() as scene:
        limit = {} if path == OLLAMA else {"max_tokens": 50}
        reply = await scene.client.post(path, json=chat_body() | limit | more, headers=headers)
        assert reply.status_code == 200, reply.text
        assert holds(scene, "me")
        assert not holds(scene, "not me")


async def test_strangers_with_the_same_words_do_not_wait_for_each_other() -> None:
    """Nobody names a session, so nothing is held, and both are served at once."""
    async with serving(SLOW) as scene:
        statuses = []

        async def ask() -> None:
            reply = await scene.client.post(CHAT, json=chat_body("The same words", max_tokens=20))
            statuses.append(reply.status_code)

        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask)
            await until(lambda: scene.entry().n_running == 2)
        assert statuses == [200, 200]
        assert scene.entry().model.statistics().n_pinned_idle == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_ends_only_with_a_turn_that_was_broken_off(stream: bool, ended: list[object]) -> None:
    """One that ended well is held, and nobody ends it; one whose client left is ended, once."""
    async with serving(SLOW) as scene:
        await scene.client.post(CHAT, json=chat_body(stream=stream, max_tokens=3), headers=HEADER)
        await scene.wait_idle()
        assert ended == []
        assert holds(scene, "me")
        model = scene.entry().model
        body = chat_body(stream=stream, max_tokens=200)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.client.post, CHAT, json=body, headers=HEADER))
            await until(lambda: any(request.n_generated > 3 for request in model.requests()))
            nursery.cancel_scope.cancel()
        await scene.wait_idle()
        assert ended == ["me"]
        assert not holds(scene, "me")


async def test_a_session_that_is_held_does_not_keep_others_out() -> None:
    """There is one sequence, and it is held: whoever comes next gets it."""
    async with serving(partial(SLOW, n_slots=1), models={"fake": {"context": {"n_seq_max": 1}}}) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=2), headers=HEADER)
        assert holds(scene, "me")
        with trio.fail_after(30):
            other = await scene.client.post(CHAT, json=chat_body("Another", max_tokens=2))
        assert other.status_code == 200


@pytest.mark.parametrize(("error", "elsewhere"), [(StickyBusy, 503), (SeqCapacity, 503), (QueueFull, 429)])
def test_busy_is_told_as_each_surface_tells_it(error: type[ErllamaError], elsewhere: int) -> None:
    """Anthropic's clients wait and retry on 529, the others on what HTTP has; all are told for how long."""
    assert status_of(error("x"), "anthropic") == 529
    for surface in ("openai", "ollama"):
        assert status_of(error("x"), surface) == elsewhere
    assert headers_of(error("x")) == {"retry-after": "1"}


@pytest.mark.parametrize(("path", "status"), [(CHAT, 429), (MESSAGES, 529), (OLLAMA, 429)])
async def test_a_full_server_says_so_at_once(path: str, status: int) -> None:
    """Everybody's place is taken and nobody is to wait: refused in well under a second, on every surface."""
    models = {"fake": {"context": {"n_seq_max": 1}, "queue_depth": 0}}
    async with serving(SLOW, models=models) as scene:
        await scene.client.post(CHAT, json=chat_body(max_tokens=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(scene.client.post, CHAT, json=chat_body(max_tokens=1000)))
            await until(lambda: scene.entry().n_running == 1)
            with trio.fail_after(15):
                refused = await scene.client.post(path, json=chat_body() | {"max_tokens": 5})
            nursery.cancel_scope.cancel()
        assert (refused.status_code, refused.headers["retry-after"]) == (status, "1")


async def test_each_turn_reuses_all_that_was_committed() -> None:
    """Three turns: the second and the third compute nothing again of the prompt and the answer before."""
    async with serving() as scene:
        messages = [{"role": "user", "content": "One"}]
        committed = 0
        for text in ("Two", "Three", "Four"):
            reply = await scene.client.post(
                CHAT, json={"model": "fake", "messages": messages}, headers=HEADER
            )
            usage = reply.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == committed
            answer = reply.json()["choices"][0]["message"]["content"]
            committed = usage["prompt_tokens"] + len(answer)  # a byte is a token of this model
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
