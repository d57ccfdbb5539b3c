"""What loading a model will take, and what is done where there is no room for it."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import trio

from erllama.engine.free_memory import FreeMemory
from erllama.errors import ModelWouldOom
from erllama.models.gguf import read_metadata
from erllama.server.memory import HEADS_KV, Need, check_room, kv_bytes, need_of, weights_bytes
from erllama.server.settings import ModelTable
from server.scenes import chat_body, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from server.scenes import Scene

CHAT = "/v1/chat/completions"
GIB = 1 << 30
LLAMA3_8B = {
    "general.architecture": "llama",
    "llama.block_count": 32,
    "llama.context_length": 8192,
    "llama.embedding_length": 4096,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
}


@pytest.mark.parametrize(
    ("changes", "n_ctx", "expected"),
    [
        ({}, 8192, GIB),  # 8 of 32 heads have KV: 2 x 2 bytes x 32 layers x 8 x 128 x 8192
        ({}, None, GIB),
        ({"llama.attention.head_count_kv": 32}, 8192, 4 * GIB),
        ({"llama.attention.head_count_kv": None}, 8192, 4 * GIB),  # every head
        ({"llama.attention.head_count_kv": [8] * 8 + [0] * 24}, 8192, GIB // 4),  # the others keep a state
        ({"llama.attention.key_length": 256, "llama.attention.value_length": 256}, 8192, 2 * GIB),
        ({"llama.attention.head_count": 0, "llama.attention.head_count_kv": 0}, 8192, 0),
        ({"general.architecture": "other"}, 8192, 0),
    ],
)
def test_kv_is_that_of_the_heads_that_have_it(changes: dict[str, Any], n_ctx: int, expected: int) -> None:
    """Grouped queries, a head count for each layer, lengths of heads that are not what the width says."""
    metadata = {key: value for key, value in (LLAMA3_8B | changes).items() if value is not None}
    assert kv_bytes(metadata, n_ctx) == expected


@pytest.mark.parametrize(
    ("on_gpu", "system", "gpu", "taken", "fits"),
    [
        (False, 6, None, 0, True),
        (False, 5.9, None, 0, False),
        (False, 6, 1, 0, True),  # nothing of it goes there
        (True, 60, 6, 0, True),
        (True, 60, 5.9, 0, False),
        (True, 5.9, 60, 0, False),
        (True, 6, None, 0, True),
        (False, 7, None, 1, True),
        (False, 7, None, 1.1, False),
    ],
)
def test_the_tighter_memory_decides(on_gpu: bool, system: float, gpu: float | None, taken: float, fits: bool):
    """5 GiB are needed and one is to stay free."""
    need = Need(weights_bytes=4 * GIB, kv_bytes=GIB, on_gpu=on_gpu)
    free = FreeMemory(system_bytes=int(system * GIB), gpu_bytes=None if gpu is None else int(gpu * GIB))
    with nullcontext() if fits else pytest.raises(ModelWouldOom, match=r"5\.0 GiB"):
        check_room(need, free, taken_bytes=int(taken * GIB), margin_bytes=GIB)


async def test_a_files_need_is_told(tiny_gguf, tmp_path: Path) -> None:
    """Its size, and 2 layers x 1 head x 2 x 32 x 2 bytes for each cell; nothing for what is no model."""
    file = tiny_gguf("dense")
    need = await need_of(ModelTable(context={"n_ctx": 512}, load={"n_gpu_layers": 3}), file)
    assert need == Need(weights_bytes=file.stat().st_size, kv_bytes=512 * 256, on_gpu=True)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for odd in ("x.gguf", "none.gguf"):
        assert await need_of(ModelTable(), tmp_path / odd) is None


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    """Whichever of them is named."""
    for i, size in ((1, 10), (2, 200), (3, 3000)):
        (tmp_path / f"m-{i:05}-of-00003.gguf").write_bytes(bytes(size))
    assert weights_bytes(tmp_path / "m-00001-of-00003.gguf") == 3210


def test_arrays_are_read_where_they_are_wanted(tiny_gguf) -> None:
    """A head count for each layer is a list, other arrays are their length."""
    metadata = read_metadata(tiny_gguf("hybrid"), whole=(HEADS_KV, "tokens"))
    assert len(metadata["tokenizer.ggml.tokens"]) == 512
    assert isinstance(metadata["tokenizer.ggml.tokens"][0], str)
    assert isinstance(metadata["tokenizer.ggml.token_type"], int)


class Machine:
    """Memory for `n` models of a file, of which those that are loaded take their part."""

    def __init__(self, scene: Any, need: Need, n: int) -> None:
        self.n = n
        self._scene, self._need = scene, need

    def look(self) -> FreeMemory:
        """See `Pool`."""
        n_loaded = sum(entry.is_loaded for entry in self._scene.pool.all_entries())
        return FreeMemory(system_bytes=(self.n - n_loaded) * self._need.total_bytes)


@asynccontextmanager
async def aware_of_memory(file: Path, names: str) -> AsyncIterator[tuple[Scene, Need]]:
    """A server that looks before it loads, models of one letter each from the same file; what one needs."""
    need = await need_of(ModelTable(), file)
    assert need is not None
    models = {name: {"path": str(file)} for name in names}
    async with serving(
        names=tuple(names), models=models, memory_aware_loading=True, model_load_memory_margin=0
    ) as scene:
        yield scene, need


async def test_the_model_unused_for_longest_makes_room(tiny_gguf) -> None:
    """It is gone before the other is loaded; where nothing can go: 503, and nothing was loaded."""
    async with aware_of_memory(tiny_gguf("dense"), "abcd") as (scene, need):
        machine = Machine(scene, need, 2)
        scene.pool._look = machine.look

        async def ask(name: str) -> Any:
            return await scene.client.post(CHAT, json=chat_body() | {"model": name})

        for name in ("a", "b", "a", "c"):
            assert (await ask(name)).status_code == 200
        assert {e.spec.name for e in scene.pool.entries()} == {"a", "c"}
        machine.n = 0
        refused = await ask("d")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_would_oom")
        assert not scene.pool.entries()  # both were idle, and it was tried with the room of both
        machine.n = 1
        async with scene.pool.lease(scene.service.spec("a")):
            assert (await ask("b")).status_code == 503  # who is in use stays
        assert scene.loads == ["a", "b", "c", "a"]


async def test_memory_that_is_being_freed_is_waited_for(tiny_gguf) -> None:
    """A model that is going takes its memory until it is gone: the load waits for that, and no other goes."""
    async with aware_of_memory(tiny_gguf("dense"), "ab") as (scene, need):
        held = True
        scene.pool._look = lambda: FreeMemory(system_bytes=0 if held else need.total_bytes)
        held = False
        assert (await scene.client.post(CHAT, json=chat_body() | {"model": "a"})).status_code == 200
        held, go_on = True, trio.Event()
        model = scene.entry("a").model
        real = model.unload

        async def unload() -> None:
            nonlocal held
            await go_on.wait()
            held = False
            await real()

        model.unload = unload
        statuses = []

        async def ask() -> None:
            reply = await scene.client.post(CHAT, json=chat_body() | {"model": "b"})
            statuses.append(reply.status_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.pool.unload, scene.entry("a"))
            await trio.sleep(0.05)
            nursery.start_soon(ask)
            await trio.sleep(0.2)
            assert statuses == []
            go_on.set()
        assert statuses == [200]


async def test_loads_at_once_do_not_take_the_same_room(tiny_gguf) -> None:
    """Room for one: the second is refused while the first has not taken its memory yet."""
    async with aware_of_memory(tiny_gguf("dense"), "ab") as (scene, need):
        scene.pool._look = Machine(scene, need, 1).look
        scene.hold_load = trio.Event()
        statuses = {}

        async def ask(name: str) -> None:
            statuses[name] = (await scene.client.post(CHAT, json=chat_body() | {"model": name})).status_code

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            await trio.sleep(0.1)
            await ask("b")
            scene.hold_load.set()
        assert statuses == {"b": 503, "a": 200}
        assert scene.loads == ["a"]


async def test_off_by_default(tiny_gguf) -> None:
    """Nobody looks at the memory."""
    async with serving(models={"fake": {"path": str(tiny_gguf("dense"))}}) as scene:
        scene.pool._look = lambda: FreeMemory(system_bytes=0)
        assert (await scene.client.post(CHAT, json=chat_body())).status_code == 200
