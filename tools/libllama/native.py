"""Finished libraries: what belongs to them, their key, and their place in the cache.

A cache entry `native/<key>/` holds `lib/` (shared libraries), `include/` (the headers the binding is
compiled against, laid out as in the sources) and, if asked for, `tools/` (upstream's programs). The key
covers all that decides what the compiler puts out, so an entry is never stale, only unused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tools.libllama import runtime
from tools.libllama.errors import BuildError
from tools.libllama.folders import copy_tree, disk_errors, published

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.libllama.profile import Platform, Profile
    from tools.libllama.source import Source

# Raise when the layout of an entry, or how it is made from the same inputs, changes.
_LAYOUT = 1
_HEADER_FOLDERS = ("include", "ggml/include", "src", "common", "vendor/nlohmann", "vendor/sheredom")
_HEADER_SUFFIXES = (".h", ".hpp")
# Relative to a tree of headers: what the binding's compiler gets as -I.
INCLUDE_DIRS = ("include", "ggml/include", "common", "vendor")
TOOL_NAMES = ("llama-server", "llama-bench")
_LIBRARY_SUFFIXES = (".so", ".dylib")
_ENTRY = "entry.json"


# What compilers and CMake take from the environment besides the three variables everybody knows.
_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "OBJCFLAGS"),
    *("MACOSX_DEPLOYMENT_TARGET", "SDKROOT", "CMAKE_TOOLCHAIN_FILE"),
    *("CUDAFLAGS", "CUDAARCHS", "CUDAHOSTCXX", "HIPFLAGS", "HIPARCHS"),
)


def native_key(
    source_digest: str, profile: Profile, compiler_id: str, on: Platform, toolkit: str = ""
) -> str:
    """The name of the libraries that these inputs lead to: 24 hex digits."""
    inputs: dict[str, object] = {
        "layout": _LAYOUT,
        "source": source_digest,
        "args": profile.cmake_args,
        "targets": profile.targets,
        "compiler": compiler_id,
        "platform": asdict(on),
        # A native build is made for this CPU, not for the platform.
        "cpu": _cpu_flags() if profile.options["GGML_NATIVE"] == "ON" else "",
        "flags": {name: os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")},
    }
    variables = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    # Only where there are any, so that the keys of plain builds stay what they were.
    inputs |= {name: value for name, value in (("toolkit", toolkit), ("variables", variables)) if value}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def library_key(
    source_digest: str, profile: Profile, compiler_id: str, on: Platform, toolkit: str = ""
) -> str:
    """The name of the libraries alone: equal with and without upstream's programs beside them.

    The build stamp holds this one, so that adding llama-server to a build leaves saved KV valid.
    """
    return native_key(source_digest, profile.without_tools(), compiler_id, on, toolkit)


def recipe_key(profile: Profile, compiler_id: str, on: Platform, toolkit: str = "") -> str:
    """The name of what decides, besides the sources, about the objects of a build folder.

    Upstream's programs add objects and change none, so building them keeps those of the libraries.
    """
    return library_key("", profile, compiler_id, on, toolkit)


def entry_dir(key: str) -> Path:
    """Where the cache keeps the libraries of a key."""
    return runtime.cache_dir() / "native" / key


def is_complete(entry: Path) -> bool:
    """Whether a folder of the cache is there with everything that was put into it, in full size."""
    try:
        names = json.loads((entry / _ENTRY).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all(_size(entry / name) == size for name, size in names.items())


def publish_entry(build: Path, source: Source, profile: Profile, entry: Path) -> None:
    """Collect a finished CMake build into the cache, whole or not at all.

    Raises: BuildError if a library that was to be built is not there, or the disk is full.
    """
    with disk_errors("Keeping the finished build", entry), published(entry) as partial:
        for library in libraries(build / "bin"):
            _copy(library, partial / "lib" / library.name)
        for name in TOOL_NAMES if profile.server_tools else ():
            _copy(build / "bin" / name, partial / "tools" / name)
        for header in _headers(source.root):
            _copy(header, partial / "include" / header.relative_to(source.root))
        _require(partial)
        list_files(partial)


def list_files(folder: Path) -> None:
    """Write down what a folder of the cache holds; `is_complete` compares."""
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    (folder / _ENTRY).write_text(json.dumps({"files": sizes}, indent=1))


def libraries(folder: Path) -> list[Path]:
    """The shared libraries in a folder, as real files, sorted by name."""
    found = (path for path in folder.iterdir() if path.suffix in _LIBRARY_SUFFIXES and not path.is_symlink())
    return sorted(path for path in found if path.name.startswith("lib"))


def include_dirs(entry: Path) -> list[Path]:
    """What a compiler needs as -I to see an entry's headers."""
    return [entry / "include" / name for name in INCLUDE_DIRS]


def install_libraries(entry: Path, target: Path) -> None:
    """Put an entry's libraries (and programs) into a native folder that is being assembled."""
    copy_tree(entry / "lib", target)
    if (entry / "tools").is_dir():
        copy_tree(entry / "tools", target / "tools")


def _copy(source: Path, target: Path) -> None:
    """A copy, never a hard link: a linker or an editor may write into the original's place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _headers(root: Path) -> Iterator[Path]:
    for folder in _HEADER_FOLDERS:
        yield from (p for p in sorted((root / folder).rglob("*")) if p.suffix in _HEADER_SUFFIXES)


def _require(entry: Path) -> None:
    names = {path.stem for path in (entry / "lib").iterdir()}
    wanted = {"libllama", "libllama-common", "libggml", "libggml-base"}
    if missing := sorted(wanted - names):
        raise BuildError(f"The build ended without {', '.join(missing)}.", advice="Run again with --clean.")
    if not any(name.startswith("libggml-cpu") for name in names):
        raise BuildError("The build finished without a CPU library.", advice="Run again with --clean.")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
