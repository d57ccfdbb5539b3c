"""What can go wrong around saved KV, on a real model: a miss and the right answer, never another one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from make_tiny_gguf import dense, make_tiny_gguf

import erllama
from erllama import ContextOptions, DiskTier, SavePolicy
from erllama.backend import Step, StepResult, StepStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

POLICY = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=64)
STORY = " ".join(f"Crate {i} holds {i * 7919 % 1000} coins." for i in range(14))  # about 150 tokens
OTHER = "Completely different words about the sea and its ships. " * 6
GREEDY = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2}


@asynccontextmanager
async def served(
    path: Path, root: Path | None = None, *, context: ContextOptions | None = None, **config: object
) -> AsyncIterator[tuple[erllama.Engine, erllama.Model]]:
    """A model with one sequence, its KV in RAM or under `root`."""
    if root is not None:
        config["tiers"] = [DiskTier("kv", str(root))]
    async with erllama.open_engine(**config) as engine:
        model = await engine.load_model(
            path,
            context=context or ContextOptions(n_ctx=1024),
            policy=POLICY,
            tier="ram" if root is None else "kv",
        )
        yield engine, model
        await engine.cache.flush()
        await trio.testing.wait_all_tasks_blocked()
        counters = engine.cache.counters()
        assert (counters.leases, counters.loads_in_flight) == (0, 0)
        assert await engine.cache.check() == []


def payload_files(root: Path) -> list[Path]:
    """Files of nodes, largest first."""
    return sorted(root.rglob("*.kvc"), key=lambda f: -f.stat().st_size)


def flip(file: Path, at: int) -> None:
    """Damage one byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


DAMAGES = {
    "payload": lambda f: flip(f, -1000),
    "metadata": lambda f: flip(f, 60),
    "header": lambda f: flip(f, 9),
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-1024]),
    "cut in the header": lambda f: f.write_bytes(f.read_bytes()[:20]),
    "empty": lambda f: f.write_bytes(b""),
    "gone": lambda f: f.unlink(),
}


@pytest.fixture(scope="module")
def saved(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, erllama.Completion]:
    """A tier's folder that holds the story, and the cold answer to it."""
    root = tmp_path_factory.mktemp("saved")

    async def save() -> erllama.Completion:
        async with served(smollm2_path, root) as (_, model):
            return await model.complete(STORY, **GREEDY)

    return root, trio.run(save)


@pytest.mark.parametrize(
    ("damage", "when"),
    [
        *((damage, "before the start") for damage in DAMAGES),
        *((damage, "while it is open") for damage in ("payload", "cut", "gone")),
    ],
)
async def test_a_damaged_file_is_a_miss_without_residue(
    smollm2_path: Path, tmp_path: Path, saved: tuple[Path, erllama.Completion], damage: str, when: str
) -> None:
    """The answer is the cold one, bit for bit; nothing of the file is in memory; later answers are right."""
    source, cold = saved
    root = tmp_path / "kv"
    shutil.copytree(source, root)
    victim = payload_files(root)[0]
    if when == "before the start":
        DAMAGES[damage](victim)
    async with served(smollm2_path, root) as (engine, model):
        if when != "before the start":
            DAMAGES[damage](victim)
        for _ in range(2):
            answer = await model.complete(STORY, **GREEDY)
            assert answer.generated == cold.generated
            assert answer.logprobs == cold.logprobs
        assert model.statistics().n_prefill_tokens > 0
        counters = engine.cache.counters()
        if damage != "gone" or when != "before the start":
            assert sum(counters.damage.values()) + sum(counters.rejected.values()) >= 1
        await engine.cache.flush()
        if when != "before the start":
            await engine.cache.check(fix=True)  # the tier counted bytes that somebody took away
    async with served(smollm2_path, root) as (engine, model):  # healed
        answer = await model.complete(STORY, **GREEDY)
        assert (answer.cache_hit_kind, answer.logprobs) == ("exact", cold.logprobs)


async def test_nothing_saved_is_nothing_wrong(smollm2_path: Path, tmp_path: Path) -> None:
    """An empty store, an empty sequence: no file, no crash, no node."""
    async with served(smollm2_path, tmp_path / "kv") as (engine, model):
        await engine.cache.flush()
        async with model.stream("Hi", max_tokens=5):
            pass
        with trio.CancelScope() as scope:
            scope.cancel()
            await model.complete(STORY)
        await engine.cache.flush()
        assert list(engine.cache.dump()) == []
        assert payload_files(tmp_path) == []


async def test_cells_in_pieces_and_nearly_full(smollm2_path: Path) -> None:
    """512 cells: residents here and there, a stored prompt that fits, then one that needs nearly all."""
    context = ContextOptions(n_ctx=512, n_seq_max=4)
    async with served(smollm2_path, context=context) as (engine, model):
        words = model.tokenize(STORY * 4)
        middle, large = words[:200], [words[0], *words[57:447]]
        cold = {}
        for name, prompt in (("middle", middle), ("large", large)):
            cold[name] = await model.complete(prompt, **GREEDY)
        async with trio.open_nursery() as nursery:
            for i in range(4):  # four of about 100, of different lengths: each leaves a resident
                tokens = model.tokenize(f"{i} {OTHER}")[: 90 + 5 * i]
                nursery.start_soon(partial(model.complete, tokens, max_tokens=2 + i))
        before = model.statistics().n_prefill_tokens
        warm = await model.complete(middle, **GREEDY)
        assert warm.generated == cold["middle"].generated
        assert model.statistics().n_prefill_tokens == before
        warm = await model.complete(large, **GREEDY)
        assert warm.generated == cold["large"].generated
        assert sum(engine.cache.counters().damage.values()) == 0
        assert model.statistics().n_rebuilt == 0


async def test_other_weights_under_the_same_path_are_a_miss(tmp_path: Path) -> None:
    """A file replaced, another written over it: each answers as it does alone, from its own KV."""
    path, root = tmp_path / "model.gguf", tmp_path / "kv"
    prompt = list(range(20, 120))
    alone: list[erllama.Completion] = []
    for seed in (0, 1):
        dense("llama", seed=seed).save(path)
        async with served(path) as (_, model):
            alone.append(await model.complete(prompt, **GREEDY))
    assert alone[0].logprobs != alone[1].logprobs
    for seed, kind in ((0, "cold"), (1, "cold"), (0, "exact"), (1, "exact")):
        dense("llama", seed=seed).save(path)
        async with served(path, root) as (_, model):
            answer = await model.complete(prompt, **GREEDY)
            assert (answer.cache_hit_kind, answer.logprobs) == (kind, alone[seed].logprobs)


async def test_every_part_of_a_split_model_decides(tmp_path: Path) -> None:
    """Other weights in the second file are other weights."""
    first = make_tiny_gguf("split", tmp_path / "m.gguf")
    root, prompt = tmp_path / "kv", list(range(20, 120))
    async with served(first, root) as (_, model):
        await model.complete(prompt, **GREEDY)
    flip(first.with_name(first.name.replace("-00001-", "-00002-")), -40)
    async with served(first, root) as (_, model):
        assert (await model.complete(prompt, **GREEDY)).cache_hit_kind == "cold"


@pytest.mark.parametrize(
    "other",
    [{"type_k": "q8_0"}, {"flash_attn": False}, {"flash_attn": True, "type_v": "q8_0", "type_k": "q8_0"}],
    ids=str,
)
async def test_another_layout_is_a_miss(
    smollm2_path: Path, tmp_path: Path, saved: tuple[Path, erllama.Completion], other: dict
) -> None:
    """Other KV types, attention with and without flash: never each other's bytes, in either direction."""
    source, _ = saved
    root = tmp_path / "kv"
    shutil.copytree(source, root)
    context = ContextOptions(n_ctx=1024, **other)
    async with served(smollm2_path, context=context) as (_, model):
        alone = await model.complete(STORY, **GREEDY)
    for kind in ("cold", "exact"):
        async with served(smollm2_path, root, context=context) as (_, model):
            answer = await model.complete(STORY, **GREEDY)
            assert (answer.cache_hit_kind, answer.logprobs) == (kind, alone.logprobs)
    async with served(smollm2_path, root) as (_, model):
        answer = await model.complete(STORY, **GREEDY)
        assert (answer.cache_hit_kind, answer.logprobs) == ("exact", saved[1].logprobs)


async def test_a_decode_error_behind_a_restore_is_answered_cold(
    smollm2_path: Path, tmp_path: Path, saved: tuple[Path, erllama.Completion]
) -> None:
    """The entry is quarantined, the context rebuilt, the request computed from nothing."""
    source, cold = saved
    root = tmp_path / "kv"
    shutil.copytree(source, root)
    async with served(smollm2_path, root) as (engine, model):
        backend, steps = model.handle.backend, []
        step = backend.step

        def failing(asked: Step) -> StepResult:
            steps.append(asked)
            return StepResult(status=StepStatus.FATAL, rc=-3) if len(steps) == 1 else step(asked)

        backend.step = failing
        answer = await model.complete(STORY, **GREEDY)
        assert answer.logprobs == cold.logprobs
        assert model.statistics().n_rebuilt == 1
        assert model.statistics().n_prefill_tokens == cold.stats.n_prompt - 1
        assert sum(engine.cache.counters().damage.values()) >= 1
    async with served(smollm2_path, root) as (_, model):
        assert (await model.complete(STORY, **GREEDY)).logprobs == cold.logprobs


def test_a_full_disk_fails_no_request(smollm2_path: Path, tmp_path: Path) -> None:
    """No file may grow beyond 100 kB: nothing is stored on the tier, every answer comes, RAM still serves."""
    program = textwrap.dedent(
        """
        import resource, sys, trio, erllama
        from erllama import ContextOptions, DiskTier, SavePolicy

        async def main(path, root, *prompts):
            policy = SavePolicy(min_tokens=32, cold_min_tokens=32, block_tokens=64)
            async with erllama.open_engine(tiers=[DiskTier("kv", root)]) as engine:
                model = await engine.load_model(
                    path, context=ContextOptions(n_ctx=1024), policy=policy, tier="kv"
                )
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
                seen = []
                for prompt in [*prompts, *prompts]:
                    answer = await model.complete(prompt, max_tokens=8, temperature=0.0)
                    await engine.cache.flush()
                    seen.append(answer.generated)
                assert seen[: len(prompts)] == seen[len(prompts) :]
                found = await engine.cache.check()
                assert {finding.kind for finding in found} <= {"off"}, found
                print(model.statistics().n_prefill_tokens)

        trio.run(main, *sys.argv[1:])
        """
    )
    root = tmp_path / "kv"
    done = subprocess.run(
        [sys.executable, "-c", program, str(smollm2_path), str(root), STORY, OTHER],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert payload_files(root) == []
    assert int(done.stdout) > 0


async def test_ram_smaller_than_a_block_keeps_nothing_and_says_why(smollm2_path: Path) -> None:
    """A block of 64 tokens is 1.5 MB: with 1 MB nothing is stored, nothing is over the limit."""
    async with served(smollm2_path, ram_max_bytes=1 << 20) as (engine, model):
        cold = await model.complete(STORY, **GREEDY)
        await model.complete(OTHER, max_tokens=1)
        again = await model.complete(STORY, **GREEDY)
        await engine.cache.flush()
        assert again.logprobs == cold.logprobs
        counters = engine.cache.counters()
        assert counters.n_nodes <= 1  # a short tail may fit
        assert counters.memory_bytes <= 1 << 20


async def test_the_same_prompt_minus_its_last_token_and_plus_one(smollm2_path: Path) -> None:
    """Always one token left to evaluate; restored answers are those of a cold engine."""
    async with served(smollm2_path) as (_, model):
        tokens = model.tokenize(STORY)
        prompts = [tokens, tokens, tokens[:-1], [*tokens, 28], tokens[:65], tokens[:64]]
        cold = [await model.complete(p, max_tokens=4, temperature=0.0, cache="off") for p in prompts]
    for live in (True, False):
        async with served(smollm2_path) as (_, model):
            for prompt, expected in zip(prompts, cold, strict=True):
                if not live:
                    await model.complete(OTHER, max_tokens=1)
                answer = await model.complete(prompt, max_tokens=4, temperature=0.0)
                assert answer.generated == expected.generated
            assert model.statistics().n_prefill_tokens <= len(tokens) + (len(model.tokenize(OTHER)) * 2)
