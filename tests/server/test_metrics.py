"""The histograms of admission and of chats, and how busy the server is."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

import erllama
from erllama.runtime.cache import Cache
from erllama.server.metrics import BusyRatio
from server.scenes import chat_body, serving

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "Hello"}]
SECOND = [*FIRST, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}]


async def scraped(client: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("keys", [[], ["one"]], ids=["open", "keys"])
async def test_both_ways_of_admission_and_one_chat(keys: list[str]) -> None:
    """A turn is admitted anew, the next one of its session goes on; each chat is rendered and read once."""
    async with serving(auth={"openai": keys}) as scene:
        for n, (messages, op) in enumerate(((FIRST, "infer"), (SECOND, "continue")), 1):
            header = {"x-conversation-id": "me", "x-api-key": "one"}
            reply = await scene.client.post(CHAT, json=chat_body() | {"messages": messages}, headers=header)
            assert reply.status_code == 200, reply.text
            found = await scraped(scene.client)
            admit = "erllama_engine_admit_duration_seconds"
            assert found[f"{admit}_count", (("op", op),)] == 1
            assert found[f"{admit}_bucket", (("le", "+Inf"), ("op", op))] == 1
            assert 0 < found[f"{admit}_sum", (("op", op),)] < 10
            for name in ("apply", "parse"):
                chat = f"erllama_chat_{name}_duration_seconds"
                assert found[f"{chat}_count", (("model", "fake"),)] == n
                assert found[f"{chat}_bucket", (("le", "+Inf"), ("model", "fake"))] == n
                assert 0 < found[f"{chat}_sum", (("model", "fake"),)] < 10
        reply = await scene.client.post(
            CHAT, json=chat_body() | {"messages": FIRST}, headers=header | {"x-conversation-id": "another"}
        )
        found = await scraped(scene.client)
        assert found["erllama_engine_admit_duration_seconds_count", (("op", "infer"),)] == 2
        for kind in ("event_loop", "threads"):
            assert 0 <= found["erllama_busy_ratio", (("kind", kind),)] <= 1


async def test_a_prompt_that_is_text_is_not_counted_as_a_chat() -> None:
    """It is admitted, and nothing is rendered."""
    async with serving() as scene:
        body = {"model": "fake", "prompt": "Hello", "max_tokens": 2}
        assert (await scene.client.post("/v1/completions", json=body)).status_code == 200
        found = await scraped(scene.client)
        assert found["erllama_engine_admit_duration_seconds_count", (("op", "infer"),)] == 1
        assert ("erllama_chat_apply_duration_seconds_count", (("model", "fake"),)) not in found


async def test_how_busy_it_is_follows_the_work() -> None:
    """A loop that sleeps is idle, one that computes is not; threads count while they work."""
    busy = BusyRatio()
    await trio.sleep(0.05)
    idle = busy.sample()
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    computing = busy.sample()
    assert 0 <= idle["event_loop"] < computing["event_loop"] <= 1
    assert computing["threads"] == 0
    release = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(trio.to_thread.run_sync, release.wait)
        await trio.testing.wait_all_tasks_blocked(0.01)
        total = trio.to_thread.current_default_thread_limiter().total_tokens
        assert busy.sample()["threads"] == 2 / total
        release.set()


async def test_operators_see_the_tiers_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each holds and may hold; one that an error switched off is 0."""
    tier = erllama.DiskTier("kv", str(tmp_path / "kv"), max_bytes=2**24)
    kv = (("tier", "kv"),)
    async with serving(engine=erllama.EngineConfig(tiers=[tier])) as scene:
        found = await scraped(scene.client)
        assert found["erllama_cache_tier_on", kv] == 1
        assert found["erllama_cache_max_bytes", kv] == 2**24
        assert found["erllama_cache_used_bytes", kv] == 0
        assert found["erllama_cache_evictions_total", kv] == 0
        assert found["erllama_cache_max_bytes", (("tier", "ram"),)] > 0
        real = Cache.list_tiers
        monkeypatch.setattr(
            Cache, "list_tiers", lambda self: [dataclasses.replace(t, on=t.name != "kv") for t in real(self)]
        )
        found = await scraped(scene.client)
        assert found["erllama_cache_tier_on", kv] == 0
        assert found["erllama_cache_tier_on", (("tier", "ram"),)] == 1
