"""The histograms of admission and of chats, and how busy the server is."""

from __future__ import annotations

import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

import erllama
from erllama.server.metrics import BusyRatio, Metrics
from erllama.testing import FakeBackend
from server.scenes import chat_body, serving

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "Hello"}]
SECOND = [*FIRST, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}]


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(client: Any) -> Samples:
    """What `/metrics` has."""
    return samples((await client.get("/metrics")).text)


def samples(text: str) -> Samples:
    """Values by name and labels."""
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


POLICY = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=64)


async def test_operators_see_the_tiers_of_the_cache(tmp_path: Path) -> None:
    """What each holds and may hold, what did not fit, and one that an error has switched off."""
    folder = tmp_path / "kv"
    tier = erllama.DiskTier("kv", str(folder), max_bytes=2**12)
    kv = (("tier", "kv"),)
    metrics = Metrics()
    async with erllama.open_engine(tiers=[tier]) as engine:
        metrics.watch_cache(engine.cache)
        model = await engine.load_model(backend=FakeBackend(), model_id="m", policy=POLICY, tier="kv")

        async def ask(first: int, n: int) -> Samples:
            await model.complete([first, *[7] * n], max_tokens=2)
            await engine.cache.flush()
            return samples(metrics.text().decode())

        found = await ask(1, 2)
        assert found["erllama_cache_tier_on", kv] == 1
        assert found["erllama_cache_max_bytes", kv] == 2**12
        assert found["erllama_cache_used_bytes", kv] == 0
        assert found["erllama_cache_evictions_total", kv] == 0
        assert found["erllama_cache_tier_failures_total", ()] == 0
        assert found["erllama_cache_max_bytes", (("tier", "ram"),)] > 0
        room = ("erllama_cache_refusals_total", (("reason", "no_room"),))
        assert room not in found
        found = await ask(2, 300)
        assert found[room] > 0
        assert found["erllama_cache_tier_on", kv] == 1
        shutil.rmtree(folder)
        folder.touch()  # it stays off
        found = await ask(3, 300)
        assert found["erllama_cache_tier_on", kv] == 0
        assert found["erllama_cache_tier_on", (("tier", "ram"),)] == 1
        assert found["erllama_cache_tier_failures_total", ()] >= 1
