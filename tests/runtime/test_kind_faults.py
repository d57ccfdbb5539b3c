"""What can go wrong around saved memory of every kind: a miss and the right answer, never another one."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

import erllama
from erllama import ContextOptions, SavePolicy
from erllama.backend import Step, StepResult, StepStatus

from .kind_scenes import (
    BLOCK,
    GREEDY,
    KINDS,
    N_THREADS,
    NO_STORE,
    POLICY,
    Scene,
    agree,
    bits,
    changed,
    kept,
    some_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

ALL_KINDS = (*KINDS, "hybrid_window")
PARTS = {
    "dense": ("base",),
    "window": ("base", "window"),
    "hybrid": ("base", "state"),
    "recurrent": ("state",),
    "hybrid_window": ("base", "state"),
}
PROMPT = some_tokens(300)
COLD = [some_tokens(120, 50), some_tokens(90, 51)]  # asked behind each fault, one in each sequence
BIG_BLOCKS = SavePolicy(min_tokens=16, cold_min_tokens=16)  # of 256 tokens


async def fresh(path: Path, *prompts: list[int], n_seq_max: int = 2) -> list[erllama.Completion]:
    """What a context that has never held anything says to each prompt."""
    answers = []
    async with erllama.open_engine(ram_max_bytes=0) as engine:
        context = ContextOptions(n_threads=N_THREADS, n_ctx=2048, n_seq_max=n_seq_max)
        model = await engine.load_model(path, context=context, policy=NO_STORE)
        for prompt in prompts:
            model.handle.backend.rebuild()  # nobody runs
            answers.append(await model.complete(prompt, cache="off", **GREEDY))
    return answers


async def left_no_residue(scene: Scene, expected: list[erllama.Completion]) -> None:
    """Cold requests in all sequences at once answer as in a fresh process."""
    answers: dict[int, erllama.Completion] = {}

    async def ask(i: int) -> None:
        answers[i] = await scene.model.complete(COLD[i], cache="off", **GREEDY)

    async with trio.open_nursery() as nursery:
        for i in range(len(COLD)):
            nursery.start_soon(ask, i)
    assert all(agree(answers[i], one) for i, one in enumerate(expected))


def saved_files(root: Path) -> list[Path]:
    """Files of parts."""
    return sorted(root.rglob("*.kvc"))


def flip(file: Path) -> None:
    """Damage one byte in the payload."""
    data = bytearray(file.read_bytes())
    data[-len(data) // 3] ^= 0x40
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte flipped": flip,
    "1 KiB cut off": lambda f: f.write_bytes(f.read_bytes()[: -min(1024, f.stat().st_size // 2)]),
    "cut in the header": lambda f: f.write_bytes(f.read_bytes()[:20]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in ALL_KINDS for part in PARTS[kind]])
async def test_a_damaged_part_is_a_miss_without_residue(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str, part: str, damage: str
) -> None:
    """One file of that kind of part, then all of them: right answers, in every sequence, and healed after."""
    path = tiny_gguf(kind)
    first, *cold = await fresh(path, PROMPT, *COLD)
    source = tmp_path / "saved"
    async with kept(path, "disk", source) as scene:
        await scene.model.complete(PROMPT, **GREEDY)
    for n_damaged in (1, 99):
        root = tmp_path / str(n_damaged)
        shutil.copytree(source, root)
        files = sorted(root.rglob(f"*.{part}.kvc"), key=lambda f: f.stat().st_size)
        assert files
        for file in files[-n_damaged:]:
            DAMAGES[damage](file)
        async with kept(path, "disk", root) as scene:
            assert scene.model.info().parts == PARTS[kind]
            answer = await scene.model.complete(PROMPT, **GREEDY)
            assert agree(answer, first)
            if n_damaged > 1:
                assert scene.n_prefilled > 0
            await left_no_residue(scene, cold)
            counters = scene.engine.cache.counters()
            # What a restore does not need is not read: its damage shows another day.
            if n_damaged > 1:
                assert sum(counters.damage.values()) + sum(counters.rejected.values()) >= 1
            assert agree(await scene.model.complete(PROMPT, **GREEDY), first)
            await scene.engine.cache.flush()
            await scene.engine.cache.check(fix=True)  # finds the damage of what nobody has read yet
        async with kept(path, "disk", root) as scene:  # healed
            answer = await scene.model.complete(PROMPT, **GREEDY)
            assert answer.cache_hit_kind == "exact"
            assert agree(answer, first)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_decode_error_behind_a_restore_is_answered_cold(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """What was restored is quarantined, the context rebuilt, the request computed from nothing."""
    path = tiny_gguf(kind)
    first, *cold = await fresh(path, PROMPT, *COLD)
    async with kept(path, "disk", tmp_path) as scene:
        await scene.model.complete(PROMPT, **GREEDY)
    async with kept(path, "disk", tmp_path) as scene:
        backend, n_steps = scene.model.handle.backend, 0
        step = backend.step

        def failing(asked: Step) -> StepResult:
            nonlocal n_steps
            n_steps += 1
            return StepResult(status=StepStatus.FATAL, rc=-3) if n_steps == 1 else step(asked)

        backend.step = failing
        answer = await scene.model.complete(PROMPT, **GREEDY)
        assert agree(answer, first)
        assert scene.model.statistics().n_rebuilt == 1
        assert scene.n_prefilled >= BLOCK
        assert sum(scene.engine.cache.counters().damage.values()) >= 1
        await left_no_residue(scene, cold)


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_the_same_prompt_its_prefix_and_one_token_more(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Always a token left to evaluate, live and restored, on memory that cannot be cut back too."""
    path = tiny_gguf(kind)
    prompts = [PROMPT, PROMPT, PROMPT[:-1], [*PROMPT, 28], PROMPT[:65], PROMPT[:64], PROMPT[:63], PROMPT[:1]]
    expected = await fresh(path, *prompts)
    for live in (True, False):
        async with kept(path, "disk", tmp_path / str(live)) as scene:
            for i, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
                if not live:
                    await scene.drop_live()
                await scene.engine.cache.flush()
                before = scene.n_prefilled
                answer = await scene.model.complete(prompt, **GREEDY)
                assert agree(answer, wanted)
                if i:
                    assert scene.n_prefilled - before <= BLOCK


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_a_state_restored_again_and_again(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Five times the same head out of the store and the same user text: the same bits each time."""
    async with kept(tiny_gguf(kind), "ram", tmp_path, n_seq_max=1) as scene:
        await scene.model.prefill_only(PROMPT)
        rounds = []
        for i in range(5):
            await scene.drop_live()
            await scene.model.complete(some_tokens(70 + i, 60 + i), cache="off", **GREEDY)
            answer = await scene.model.complete([*PROMPT, *some_tokens(30, 1)], cache="read", **GREEDY)
            assert answer.cache_source == "ram"
            assert answer.stats.n_cached >= len(PROMPT) - 1
            rounds.append(bits(answer))
        assert rounds == [rounds[0]] * 5


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_a_change_near_the_end_costs_what_is_behind_it_and_a_block(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """2,000 tokens, token 1,950 changed: 50 on dense memory, a block more elsewhere; also restarted."""
    path, prompt = tiny_gguf(kind), some_tokens(2000)
    shape = {"n_ctx": 4096, "policy": BIG_BLOCKS}
    allowed = 50 if kind == "dense" else 50 + 256
    for seed in (1, 2):
        async with kept(path, "disk", tmp_path, **shape) as scene:
            if seed == 1:
                await scene.model.complete(prompt, **GREEDY)
            await scene.drop_live()
            before = scene.n_prefilled
            answer = await scene.model.complete(changed(prompt, 1950, seed), **GREEDY)
            print(f"{kind}: {scene.n_prefilled - before} of 2000 computed, {answer.cache_hit_kind}")
            assert scene.n_prefilled - before <= allowed


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_after_a_restart_only_the_tail_is_computed(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """1,500 tokens, and 20 more after a restart: at most these and a block, and the cold answer."""
    path, prompt = tiny_gguf(kind), some_tokens(1500)
    longer = [*prompt, *some_tokens(20, 1)]
    [expected] = await fresh(path, longer)
    async with kept(path, "disk", tmp_path, policy=BIG_BLOCKS) as scene:
        await scene.model.complete(prompt, **GREEDY)
    async with kept(path, "disk", tmp_path, policy=BIG_BLOCKS) as scene:
        answer = await scene.model.complete(longer, **GREEDY)
        print(f"{kind}: {scene.n_prefilled} of 1520 computed")
        assert scene.n_prefilled <= 20 + 256
        assert agree(answer, expected)


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_cells_in_pieces_and_nearly_full(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """512 cells: residents here and there, a stored prompt that fits, one that needs nearly all of them."""
    path, middle, large = tiny_gguf(kind), some_tokens(200, 1), some_tokens(440, 2)
    expected = await fresh(path, middle, large, n_seq_max=4)
    async with kept(path, "ram", tmp_path, n_ctx=512, n_seq_max=4) as scene:
        for prompt in (middle, large):
            await scene.model.complete(prompt, **GREEDY)
        await scene.engine.cache.flush()
        async with trio.open_nursery() as nursery:
            for i in range(4):
                ask = partial(scene.model.complete, some_tokens(90 + 5 * i, 10 + i), max_tokens=2 + i)
                nursery.start_soon(ask)
        await scene.engine.cache.flush()
        for prompt, wanted in zip((middle, large), expected, strict=True):
            before = scene.n_prefilled
            answer = await scene.model.complete(prompt, **GREEDY)
            assert agree(answer, wanted)
            assert scene.n_prefilled - before <= BLOCK
        assert sum(scene.engine.cache.counters().damage.values()) == 0
        assert scene.model.statistics().n_rebuilt == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_another_layout_is_a_miss(tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """Without flash attention the values lie otherwise: nobody reads the other's bytes."""
    path = tiny_gguf(kind)
    for flash_attn in (True, False):
        context = ContextOptions(n_threads=N_THREADS, n_ctx=2048, flash_attn=flash_attn)
        async with erllama.open_engine(ram_max_bytes=0) as engine:
            model = await engine.load_model(path, context=context, policy=NO_STORE)
            alone = await model.complete(PROMPT, **GREEDY)
        for hit in ("cold", "exact"):
            async with erllama.open_engine(tiers=[erllama.DiskTier("kv", str(tmp_path))]) as engine:
                model = await engine.load_model(path, context=context, policy=POLICY, tier="kv")
                answer = await model.complete(PROMPT, **GREEDY)
                await engine.cache.flush()
            assert answer.cache_hit_kind == hit
            assert agree(answer, alone)


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_nothing_saved_is_nothing_wrong(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """An empty store, a short prompt, a request that is over before it began: no file, no node, no crash."""
    async with kept(tiny_gguf(kind), "disk", tmp_path, policy=BIG_BLOCKS) as scene:
        async with scene.model.stream(PROMPT[:3], max_tokens=5):
            pass
        with trio.CancelScope() as scope:
            scope.cancel()
            await scene.model.complete(PROMPT)
        await scene.engine.cache.flush()
        assert list(scene.engine.cache.dump()) == []
    assert saved_files(tmp_path) == []


# --- budgets ---


async def bytes_of(path: Path, root: Path, prompt: list[int]) -> int:
    """What one conversation takes in RAM."""
    async with kept(path, "ram", root) as scene:
        empty = scene.engine.cache.counters().memory_bytes
        await scene.model.complete(prompt, **GREEDY)
        await scene.engine.cache.flush()
        return scene.engine.cache.counters().memory_bytes - empty


@pytest.mark.parametrize("kind", KINDS)
async def test_the_shared_head_outlives_six_conversations(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Room for three of six conversations with one head, in turn, twice: the head stays, little is written.

    Where memory cannot be cut, the head's end is an anchor if the requests say where it is.
    """
    options = GREEDY if kind == "dense" else {**GREEDY, "prefix_checkpoint_len": 320}
    path, head = tiny_gguf(kind), some_tokens(320)
    prompts = [[*head, *some_tokens(640, i + 1)] for i in range(6)]
    budget = 3 * await bytes_of(path, tmp_path / "one", prompts[0])
    async with kept(path, "ram", tmp_path, config={"ram_max_bytes": budget}) as scene:
        computed = []
        for _ in range(2):
            for prompt in prompts:
                await scene.drop_live()
                before = scene.n_prefilled
                await scene.model.complete(prompt, **options)
                computed.append(scene.n_prefilled - before)
            await scene.engine.cache.flush()
            assert scene.engine.cache.counters().memory_bytes <= budget
        written = sum(scene.engine.cache.counters().saves.values())
        print(f"{kind}: computed {computed}, {written} nodes written, {budget} bytes")
        assert all(n <= 640 + BLOCK for n in computed[1:])
        assert written <= 5 + 2 * 6 * 12


@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_larger_than_ram_is_not_kept_and_memory_is_bounded(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """Nothing is over the limit, the refusals are counted, a hundred conversations leave no trace in RSS."""
    path = tiny_gguf(kind)
    [expected] = await fresh(path, PROMPT)
    limit = 24 << 10
    async with kept(path, "ram", tmp_path, config={"ram_max_bytes": limit}) as scene:
        process = psutil.Process(os.getpid())
        for i in range(100):
            prompt = PROMPT if i % 2 else some_tokens(200, i)
            answer = await scene.model.complete(prompt, **{**GREEDY, "max_tokens": 2})
            assert scene.engine.cache.counters().memory_bytes <= limit
            if i == 20:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 16 << 20
        assert answer.generated == expected.generated[:2]
        await scene.engine.cache.flush()
        counters = scene.engine.cache.counters()
        assert counters.refusals.keys() <= {"no_room", "too_large"}
        assert sum(counters.refusals.values()) >= 100
        assert kind == "recurrent" or counters.n_parts <= 1  # a short tail may fit; empty bases do


@pytest.mark.parametrize("kind", KINDS)
async def test_a_growing_conversation_is_no_write_storm(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """60 turns: what is written altogether is less than three times what is there in the end."""
    async with kept(tiny_gguf(kind), "disk", tmp_path, n_ctx=4096, policy=BIG_BLOCKS) as scene:
        history: list[int] = []
        for turn in range(60):
            history += some_tokens(20, turn + 1)
            before = scene.n_prefilled
            answer = await scene.model.complete(history, **GREEDY)
            assert scene.n_prefilled - before <= 20
            history = answer.context_tokens
            await scene.engine.cache.flush()
        counters = scene.engine.cache.counters()
        [tier] = [t for t in counters.tiers if t.name == "kv"]
        written = counters.bytes_written["kv"]
        print(f"{kind}: {len(history)} tokens, written {written}, kept {tier.used_bytes}")
        assert written <= 3 * tier.used_bytes
