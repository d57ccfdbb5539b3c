"""What loading a model takes, estimated from its file, and whether there is room for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import MalformedGguf, ModelWouldOom
from erllama.models.gguf import read_metadata

from .embedding_models import context_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from erllama.engine.free_memory import FreeMemory

    from .settings import ModelTable

F16_BYTES = 2
GIB = 1 << 30
HEADS_KV = "attention.head_count_kv"
SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that a model takes once it is loaded. `on_gpu`: whether layers of it go there."""

    weights_bytes: int
    kv_bytes: int
    on_gpu: bool = False

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.weights_bytes + self.kv_bytes


async def need_of(table: ModelTable, file: Path) -> Need | None:
    """What the model in `file` will take; None if its file does not tell: loading it says why.

    Cancellation: waits for the file to be read.
    """
    if not await trio.Path(file).is_file():
        return None
    try:
        context = await context_of(table, file)
        metadata = await trio.to_thread.run_sync(lambda: read_metadata(file, whole=(HEADS_KV,)))
        weights = await trio.to_thread.run_sync(weights_bytes, file)
    except (MalformedGguf, OSError):
        return None
    kv = kv_bytes(metadata, context.n_ctx)
    return Need(weights_bytes=weights, kv_bytes=kv, on_gpu=table.model_options().n_gpu_layers != 0)


def weights_bytes(file: Path) -> int:
    """The size of a model's file, or of all files of one that was split. Raises: OSError."""
    split = SPLIT.search(file.name)
    if split is None:
        return file.stat().st_size
    stem = file.name[: split.start()]
    n = int(split[1])
    return sum(file.with_name(f"{stem}-{i:05}-of-{n:05}.gguf").stat().st_size for i in range(1, n + 1))


def kv_bytes(metadata: Mapping[str, Any], n_ctx: int | None) -> int:
    """KV of `n_ctx` cells in f16, every layer keeping all of them; None: what the model was trained for."""
    architecture = metadata.get("general.architecture")

    def of(key: str, default: Any = 0) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    n_layer, n_head = int(of("block_count")), of("attention.head_count")
    heads_kv = of(HEADS_KV, n_head)
    n_heads_kv = sum(heads_kv) if isinstance(heads_kv, list) else n_layer * int(heads_kv)
    head = int(of("embedding_length")) // n_head if isinstance(n_head, int) and n_head else 0
    row = int(of("attention.key_length", head)) + int(of("attention.value_length", head))
    cells = int(of("context_length")) if n_ctx is None else n_ctx
    return n_heads_kv * row * cells * F16_BYTES


def check_room(need: Need, free: FreeMemory, *, taken_bytes: int, margin_bytes: int) -> None:
    """Whether there is room in the tighter of both memories. Raises: `ModelWouldOom` with the numbers.

    `taken_bytes`: what loads in flight will still take; `margin_bytes`: what is to stay free.
    """
    room = free.system_bytes
    if need.on_gpu and free.gpu_bytes is not None:
        room = min(room, free.gpu_bytes)
    room -= taken_bytes + margin_bytes
    if need.total_bytes <= room:
        return
    raise ModelWouldOom(
        f"the model needs about {need.total_bytes / GIB:.1f} GiB (weights {need.weights_bytes / GIB:.1f}, "
        f"KV {need.kv_bytes / GIB:.1f}) and there are {max(0, room) / GIB:.1f} GiB for it",
        detail={"weights_bytes": need.weights_bytes, "kv_bytes": need.kv_bytes, "available_bytes": room},
    )
