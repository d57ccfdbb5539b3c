"""What Ollama's clients are told about models: of their files, and of those that are loaded."""

from __future__ import annotations

import hashlib
import math
import os
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from erllama.errors import MalformedGguf
from erllama.models.gguf import Length, read_metadata

from .embedding_models import opens_to_embed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .pool import Entry
    from .registry import Spec

NEVER = timedelta(days=100 * 365)  # what clients are shown for "not at all"
# llama.h: enum llama_ftype, the numbers that `general.file_type` has.
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
THINKING_MARKS = ("<think>", "enable_thinking", "reasoning_content", "reasoning_effort")
# Sampling that a file asks for, by the names that Ollama has for it.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
}


def listed(spec: Spec) -> dict[str, Any]:
    """An entry of /api/tags. Blocks."""
    stat = _stat(spec)
    return {
        "name": spec.name,
        "model": spec.name,
        "size": 0 if stat is None else stat.st_size,
        "digest": digest(spec),
        "modified_at": datetime.fromtimestamp(0 if stat is None else stat.st_mtime, UTC).isoformat(),
        "details": details(metadata_of(spec)),
    }


async def running(entry: Entry) -> dict[str, Any] | None:
    """An entry of /api/ps; None if it was freed meanwhile."""
    metadata = await trio.to_thread.run_sync(metadata_of, entry.spec)
    hashed = await trio.to_thread.run_sync(digest, entry.spec)
    if entry.model is None:
        return None
    info, wall = entry.model.info(), datetime.now(UTC)
    left = entry.expires_at - trio.current_time()
    return {
        "name": entry.spec.name,
        "model": entry.spec.name,
        "digest": hashed,
        "size": info.vram_estimate_bytes,
        "size_vram": info.vram_estimate_bytes if entry.spec.table.model_options().n_gpu_layers else 0,
        "expires_at": (wall + (NEVER if math.isinf(left) else timedelta(seconds=left))).isoformat(),
        "context_length": info.n_ctx,
        "details": details(metadata),
    }


def shown(spec: Spec) -> dict[str, Any]:
    """/api/show: what its file says, and the context that a load would use. Blocks."""
    metadata = metadata_of(spec)
    template = _template(spec, metadata)
    parameters = _parameters(spec, metadata)
    made = {
        "modelfile": f"FROM {spec.name}\n" + "".join(f"PARAMETER {line}\n" for line in parameters),
        "parameters": "\n".join(parameters),
        "template": template,
        "details": details(metadata),
        "model_info": model_info(metadata),
    }
    if license_text := metadata.get("general.license"):
        made["license"] = license_text
    if (stat := _stat(spec)) is not None:
        made["modified_at"] = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat()
    return made


def digest(spec: Spec) -> str:
    """64 hexadecimal digits that tell a model's file from another, by its name, size and times. Blocks.

    Not of what is in it: that would take minutes, and clients only show and compare it.
    """
    stat = _stat(spec)
    times = None if stat is None else (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return hashlib.sha256(repr((spec.name, times)).encode()).hexdigest()


def _stat(spec: Spec) -> os.stat_result | None:
    """None where the file is not there yet."""
    try:
        return None if spec.file is None else spec.file.stat()
    except OSError:  # loading it will say what is wrong
        return None


def details(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Family, size and quantisation; what a file does not say is empty."""
    architecture = str(metadata.get("general.architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture] if architecture else [],
        "parameter_size": str(metadata.get("general.size_label", "")),
        "quantization_level": FILE_TYPES.get(metadata.get("general.file_type", -1), ""),
    }


def model_info(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's scalars and texts, without the template; lists are null, as Ollama has them."""
    return {
        key: None if isinstance(value, Length) else _finite(value)
        for key, value in metadata.items()
        if not key.startswith("tokenizer.chat_template")
    }


async def capabilities(spec: Spec, entry: Entry | None, template: str) -> list[str]:
    """What a model can be asked for, as far as its file tells while it is not loaded."""
    if entry is not None and entry.model is not None and entry.is_loaded:
        info = entry.model.info()
        generates, embeds = info.generates, info.embeddings is not None
    else:
        embeds = await opens_to_embed(spec)
        generates = not embeds
    named = {
        "completion": generates,
        "tools": generates and "tools" in template,
        "thinking": generates and any(mark in template for mark in THINKING_MARKS),
        "embedding": embeds,
    }
    return [name for name, there in named.items() if there]


def metadata_of(spec: Spec) -> Mapping[str, Any]:
    """What the file says; nothing where it is not there yet, or is no GGUF file. Blocks."""
    file = spec.file
    try:
        if file is None or not file.is_file():
            return {}
        stat = file.stat()
        return _metadata(os.fspath(file), stat.st_mtime_ns, stat.st_size)
    except (MalformedGguf, OSError):  # loading it will say what is wrong
        return {}


@lru_cache(maxsize=64)
def _metadata(path: str, mtime_ns: int, n_bytes: int) -> Mapping[str, Any]:
    return read_metadata(Path(path))


def _template(spec: Spec, metadata: Mapping[str, Any]) -> str:
    if spec.table.chat_template_file is not None:
        try:
            return Path(spec.table.chat_template_file).read_text(encoding="utf-8")
        except (OSError, ValueError):  # loading it will say what is wrong
            return ""
    return str(metadata.get("tokenizer.chat_template", ""))


def _parameters(spec: Spec, metadata: Mapping[str, Any]) -> list[str]:
    architecture = metadata.get("general.architecture")
    n_ctx = spec.n_ctx or metadata.get(f"{architecture}.context_length")
    lines = [] if n_ctx is None else [f"num_ctx {n_ctx}"]
    for key, name in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            lines.append(f"{name} {value:g}")
    return lines


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
