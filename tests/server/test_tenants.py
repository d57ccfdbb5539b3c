"""Who shares KV with whom on one server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from runtime.chat_scenes import ScriptedChat

from erllama.errors import InvalidConfig
from erllama.server.generation import Ask
from erllama.server.settings import CacheTable, make_settings
from erllama.server.tenants import of_tenant, salt_of
from server.scenes import chat_body, serving, until

if TYPE_CHECKING:
    from server.scenes import Scene

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEYS = {"openai": ["one", "two"], "anthropic": ["one"]}
LONG = "The same words for everybody. " * 8


async def cached(scene: Scene, key: str | None = None, **more: Any) -> int:
    """Tokens of the prompt that were reused, as the reply tells them."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reply = await scene.client.post(CHAT, json=chat_body(LONG, max_tokens=1, **more), headers=headers)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_users_with_different_keys_share_nothing() -> None:
    """The second user's prompt is computed though the first one's is there; each finds its own again."""
    async with serving(auth=KEYS) as scene:
        assert await cached(scene, "one") == 0
        assert await cached(scene, "two") == 0
        assert await cached(scene, "two") > 200
        assert await cached(scene, "one") == 0  # one sequence, and short prompts are not stored
        assert await cached(scene, "one") > 200


async def test_a_key_is_the_same_user_on_every_surface() -> None:
    """What was asked through OpenAI's route is found by Anthropic's."""
    async with serving(auth=KEYS) as scene:
        assert await cached(scene, "one") == 0
        body = chat_body(LONG, max_tokens=1)
        reply = await scene.client.post(MESSAGES, json=body, headers={"x-api-key": "one"})
        assert reply.json()["usage"]["cache_read_input_tokens"] > 200


async def test_keys_may_share_and_so_do_those_without() -> None:
    """`api_keys = "share"`, and a server without keys, whatever key its clients send."""
    async with serving(auth=KEYS, cache={"api_keys": "share"}) as scene:
        assert await cached(scene, "one") == 0
        assert await cached(scene, "two") > 200
    async with serving() as scene:
        assert await cached(scene, "one") == 0
        assert await cached(scene, "two") > 200


async def test_prompt_cache_key_separates_where_it_is_to() -> None:
    """By default it names a session; set so, it separates as well, below the API key."""
    async with serving() as scene:
        assert await cached(scene, prompt_cache_key="a") == 0
        assert await cached(scene, prompt_cache_key="b") > 200
    async with serving(auth=KEYS, cache={"prompt_cache_key": "separates"}) as scene:
        assert await cached(scene, "one", prompt_cache_key="a") == 0
        assert await cached(scene, "one", prompt_cache_key="b") == 0
        assert await cached(scene, "one", prompt_cache_key="b") > 200
        assert await cached(scene, "two", prompt_cache_key="b") == 0


async def test_users_may_use_the_same_session_id() -> None:
    """It is a name within a key: nobody waits for who has it under another one, or ends that session."""
    slow = partial(ScriptedChat, says="word " * 200, threaded=True, step_delay_s=0.02, n_slots=2)
    async with serving(slow, auth=KEYS) as scene, trio.open_nursery() as nursery:

        async def ask(key: str, n: int) -> int:
            body = chat_body(LONG, max_tokens=n, prompt_cache_key="chat-1")
            headers = {"authorization": f"Bearer {key}"}
            return (await scene.client.post(CHAT, json=body, headers=headers)).status_code

        await cached(scene, "one")  # the model is loaded
        nursery.start_soon(ask, "one", 180)
        await until(lambda: scene.entry().model.statistics().n_decoding == 1)  # it has its session
        assert await ask("one", 1) == 503
        assert await ask("two", 1) == 200
        actor = scene.entry().model.handle.actor
        assert actor.holds("chat-1", salt_of("two"))
        assert not actor.holds("chat-1")
        nursery.cancel_scope.cancel()


async def test_who_leaves_ends_its_own_session_only() -> None:
    """Under a key its session ends; those of the same id, of another key and of nobody, stay held."""
    slow = partial(ScriptedChat, says="word " * 200, threaded=True, step_delay_s=0.02, n_slots=3)
    header = {"x-conversation-id": "chat-1"}
    async with serving(slow, auth={"openai": KEYS["openai"]}) as scene:

        async def ask(key: str, n: int) -> None:
            body, bearer = chat_body(max_tokens=n), {"authorization": f"Bearer {key}"}
            await scene.client.post(CHAT, json=body, headers=header | bearer)

        for key in KEYS["openai"]:
            await ask(key, 1)
        body = chat_body(stream=False, options={"num_predict": 1})
        await scene.client.post("/api/chat", json=body, headers=header)  # a surface without keys
        actor = scene.entry().model.handle.actor
        salts = [salt_of("one"), salt_of("two"), b""]
        assert [actor.holds("chat-1", salt) for salt in salts] == [True, True, True]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "one", 180)
            await until(lambda: any(r.n_generated > 3 for r in scene.entry().model.requests()))
            nursery.cancel_scope.cancel()
        await scene.wait_idle()
        assert [actor.holds("chat-1", salt) for salt in salts] == [False, True, True]


def test_a_salt_is_of_its_key_and_what_it_counts_below() -> None:
    """Without a salt nothing changes."""
    ask = Ask(model="m", session_id="chat-1", cache_key="x")
    table = CacheTable()
    one, two = (of_tenant(ask, salt_of(key), table) for key in KEYS["openai"])
    assert one.salt != two.salt
    assert of_tenant(ask, b"", table) is ask
    assert salt_of("a", under=b"1") != salt_of("a", under=b"2") != salt_of("a")


def test_settings_of_the_cache_are_checked() -> None:
    """By name."""
    for wrong in ({"api_keys": "maybe"}, {"ttl_s": 0}, {"prompt_cache_key": "salt"}, {"tll_s": 1}):
        with pytest.raises(InvalidConfig, match="cache"):
            make_settings({"cache": wrong})
