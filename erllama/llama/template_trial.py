"""Whether a chat template comes to an end: it is tried once in a process of its own.

llama-common's interpreter knows no limits: a template that recurses or loops without end would take this
process with it. So one that is new to this machine renders some conversations in a child process first, with
half a thread's stack and a limit of time and memory. What came of it is remembered by the text and the build.
What only a certain conversation brings about is not found.

Run as a module, `python -m erllama.llama.template_trial FILE`, it is that child.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from erllama.child import leashed
from erllama.errors import ErllamaError, InvalidContent
from erllama.files import cache_dir, try_write

log = logging.getLogger("erllama.llama")

CPU_S = 4  # the largest of upstream's templates takes 0.1
WALL_S = 120.0  # on a machine that is busy with others
MEMORY_BYTES = 4 << 30  # of addresses, beside those that libraries have taken
STACK_BYTES = 4 << 20  # half of what threads have
GOOD = "ends"

_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
for _ in range(6):
    _SCHEMA = {"type": "object", "properties": {"a": _SCHEMA, "b": {"type": "array", "items": _SCHEMA}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": {"a": [1]}}'}}
_SYSTEM, _USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "r"}
_SAID = {"role": "assistant", "content": "a", "reasoning_content": "t"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    {"messages": [_SYSTEM, *[_USER, _CALLS, _RESULT, _SAID] * 4, _USER], "tools": [_TOOL]},
    {"messages": [_USER, _SAID, _USER], "enable_thinking": False},
    {"messages": [_USER, _SAID, _USER, _SAID], "continue_final_message": "auto"},
    {"messages": [_USER, _SAID], "add_generation_prompt": False},
]


def check_ends(source: str, build: str) -> None:
    """Raise `InvalidContent` for a template that does not come to an end in any of `CONVERSATIONS`.

    A text that is new takes about half a second, later ones a file's look-up. `build` names what renders.
    Thread: any but the event loop's.
    """
    key = hashlib.sha256(f"{build}\n{source}".encode(errors="surrogatepass")).hexdigest()[:32]
    memory = cache_dir() / "templates" / key
    said = _recall(memory)
    if said is None:
        said = _try(source)
        if said is None:
            return  # it could not be tried; that is no reason to refuse it
        try_write(memory, said)
    if said != GOOD:
        raise InvalidContent(f"the chat template cannot be used: rendering it {said}")


def _recall(memory: Path) -> str | None:
    try:
        return memory.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _try(source: str) -> str | None:
    """`GOOD`, or what went wrong; None if that was not the template."""
    try:
        with tempfile.TemporaryDirectory(prefix="erllama-") as folder:
            file = Path(folder) / "template"
            file.write_bytes(source.encode(errors="surrogatepass"))
            command = [sys.executable, "-m", __name__, str(file)]
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
            with leashed(command, stdout=subprocess.DEVNULL, environment=environment) as process:
                return _verdict(process.wait(WALL_S))
    except subprocess.TimeoutExpired:
        return f"does not end in {WALL_S:.0f} s"
    except OSError as why:
        log.warning("a chat template could not be tried in a process of its own: %s", why)
        return None


def _verdict(code: int) -> str | None:
    match code:
        case 0:
            return GOOD
        case 3:
            return f"takes more than {MEMORY_BYTES >> 30} GiB"
        case 152 | 137:  # 128 + SIGXCPU, SIGKILL
            return f"does not end in {CPU_S} s"
        case _ if code > 128:
            return f"crashes it (signal {code - 128})"
    log.warning("a chat template could not be tried in a process of its own: exit code %d", code)
    return None


def main(path: str) -> int:
    """Render; 3 if there was not enough memory. What the template refuses is its own matter."""
    from .chat import ChatTemplates, live_texts

    live_texts()  # loads the library, before there are limits
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # refused on macOS, and above an administrator's limit
        most = _address_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    source = Path(path).read_bytes().decode(errors="surrogatepass")
    codes = [0]

    def render() -> None:
        try:
            with ChatTemplates.of_text(source, bos="<s>", eos="</s>") as templates:
                for inputs in CONVERSATIONS:
                    _apply(templates, inputs)
        except (MemoryError, ErllamaError) as why:
            codes[0] = 3 if isinstance(why, MemoryError) or why.reason == "oom" else 0

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    return codes[0]


def _address_bytes() -> int:
    """What this process has taken so far, as libraries for GPUs do by the dozen GiB; 0 if nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _apply(templates: Any, inputs: dict[str, Any]) -> None:
    try:
        templates.apply(inputs)
    except ErllamaError as why:
        if why.reason == "oom":
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
