"""Run the tests of our C++ under AddressSanitizer.

    python tools/asan.py [PYTEST ARGUMENT ...]     default: the shim's tests in tests/llama

The binding is compiled once more, with the sanitizer in it, into build/asan beside the libraries of the last
build, which stay as they are: what is found are faults of the shim and of what it passes on. Linux, GCC.
Needs the unpacked sources (`make sources`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tools.libllama import binding, native, runtime  # noqa: E402  # found through the line above

BUILT = REPO / "erllama" / "llama" / "_native" / "cpu"
SOURCES = Path(os.environ.get("ERLLAMA_SOURCES", REPO / "vendor" / "llama.cpp"))
TARGET = REPO / "build" / "asan"
SUBJECTS = ("batch", "chat", "gguf_check", "guide", "rows", "sampler", "threads", "vocab", "wrappers")
TESTS = [f"tests/llama/test_{name}.py" for name in SUBJECTS]
GROWS = "not leak_nothing"  # freed memory stays with the sanitizer, so the process grows
FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g")


def build() -> None:
    """A native folder like the last build's, with a sanitized binding."""
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    for path in BUILT.iterdir():
        if path.name not in (binding.extension_name(), runtime.stamp.STAMP_FILE):
            (TARGET / path.name).symlink_to(path)
    recorded = runtime.stamp.read_stamp(BUILT)
    if recorded is None:
        sys.exit(f"{BUILT} holds no finished build; run: python build_libllama.py")
    binding.build_binding(
        libs_dir=BUILT,
        include_dirs=[SOURCES / name for name in native.INCLUDE_DIRS],
        out_dir=TARGET / "out",
        cxx=tuple(shlex.split(os.environ.get("CXX", "g++"))),
        cxx_flags=FLAGS,
        stamp=recorded["base"],
        log=lambda line: print(f"    {line}", flush=True),
    )
    for name in (binding.extension_name(), runtime.stamp.STAMP_FILE):
        (TARGET / "out" / name).rename(TARGET / name)
    shutil.rmtree(TARGET / "out")


def run(arguments: list[str]) -> int:
    """The tests, in a Python whose memory the sanitizer watches."""
    watched = [_library("libasan.so"), _library("libstdc++.so")]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(watched),
        # Python itself never frees everything; leaks have tests of their own, which count.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
        "ERLLAMA_BACKEND": os.path.relpath(TARGET, BUILT.parent),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(arguments or [*TESTS, "-k", GROWS]),
    ]
    return subprocess.run(command, cwd=REPO, env=environment, check=False).returncode


def _library(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return os.path.realpath(done.stdout.strip())


if __name__ == "__main__":
    build()
    sys.exit(run(sys.argv[1:]))
