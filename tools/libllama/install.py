"""Assemble a native folder (libraries, binding, self-test model, build.json), try it, put it in place.

The order is the point: a folder is tried by a real decode before it takes the place of the one that
worked until now.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import cffi

from tools.libllama import binding, runtime
from tools.libllama.errors import BuildError
from tools.libllama.folders import disk_errors, link_or_copy, published
from tools.libllama.linkage import check_linkage
from tools.libllama.native import include_dirs, install_libraries, is_complete, libraries, list_files
from tools.libllama.selftest_model import write_selftest_model

if TYPE_CHECKING:
    from pathlib import Path

    from tools.libllama.progress import Progress

BUILD_FILE = runtime.variant.BUILD_FILE


class NoVariantRuns(BuildError):
    """Every CPU library of the build failed its decode on this machine."""


def binding_key(base: str) -> str:
    """The name of the binding for these libraries: our sources, generator, Python and cffi decide."""
    folder = binding.HERE
    digest = hashlib.sha256()
    sources = runtime.stamp.sources_hash(binding.PACKAGE_DIR)
    for part in (base, sources, sys.version, cffi.__version__):
        digest.update(f"{part}\n".encode())
    for name in ("binding.py", "wrappers.py"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:24]


def binding_dir(base: str) -> Path:
    """Where the cache keeps the compiled binding for these libraries."""
    return runtime.cache_dir() / "bindings" / binding_key(base)


def ensure_binding(base: str, entry: Path, cxx: tuple[str, ...], progress: Progress, lock_fd: int) -> Path:
    """The folder in the cache that holds the compiled binding for an entry's libraries, all of it.

    Raises: BuildError with the compiler's last lines.
    """
    target = binding_dir(base)
    if is_complete(target):
        return target
    progress.step("Compiling the Python binding")
    with disk_errors("Keeping the binding", target), published(target) as partial:
        binding.build_binding(
            libs_dir=entry / "lib",
            include_dirs=include_dirs(entry),
            out_dir=partial / "out",
            cxx=cxx,
            stamp=base,
            log=progress.update,
            lock_fd=lock_fd,
        )
        for name in _binding_files():
            (partial / "out" / name).rename(partial / name)
        shutil.rmtree(partial / "out")
        list_files(partial)
    return target


def _binding_files() -> tuple[str, str]:
    return binding.extension_name(), runtime.stamp.STAMP_FILE


def install(*, entry: Path, bound: Path, target: Path, facts: dict[str, Any], progress: Progress) -> Path:
    """Bring `target` up to date and return the CPU library that was found to run.

    `facts` go into build.json; a folder that already has them, and all its files, is left as it is.

    Raises: NoVariantRuns if no CPU library survives its decode; BuildError for a wrong linkage.
    """
    recorded = runtime.stamp.read_stamp(bound) or {}
    facts = {**facts, "stamp": runtime.stamp.full_stamp(recorded.get("base"), recorded.get("sources"))}
    if is_current(target, facts):
        progress.note(f"{target} is up to date")
        return _choose(target, progress, fresh=False)
    progress.step(f"Trying and installing into {target}")
    with disk_errors("Installing", target), published(target) as partial:
        install_libraries(entry, partial)
        for name in _binding_files():
            # Copies: what happens to the installed binding must not happen to the one in the cache.
            shutil.copy2(bound / name, partial / name)
        write_selftest_model(partial / runtime.selftest.MODEL_NAME)
        # First without, so that the choice is remembered under the stamp of this very build.
        _write_build_file(partial, facts)
        check_linkage([*libraries(partial), partial / binding.extension_name()])
        chosen = _choose(partial, progress, fresh=True)
        if (partial / "tools").is_dir():
            # Upstream's programs load the best-rated library they find beside them, so they find one.
            link_or_copy(chosen, partial / "tools" / chosen.name)
        _write_build_file(partial, facts)
    return target / chosen.name


def is_current(target: Path, facts: dict[str, Any]) -> bool:
    """Whether a native folder was made from these facts and still has all its files."""
    try:
        recorded = json.loads((target / BUILD_FILE).read_text())
        sizes = recorded.pop("files")
        return bool(recorded == facts and sizes == _sizes(target))
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _choose(folder: Path, progress: Progress, *, fresh: bool) -> Path:
    try:
        chosen: Path | None = runtime.variant.choose(folder, fresh=fresh, log=progress.note)
    except runtime.NativeLibraryError as error:
        raise NoVariantRuns(
            f"The build does not run here: {error}.",
            advice=(
                "Run again with --clean, which forgets everything that was built before. If it stays, please "
                "report the output above; --cmake-arg can turn a CPU feature off."
            ),
        ) from error
    if chosen is None:
        raise BuildError(f"{folder} holds no CPU library.", advice="Run again with --clean.")
    return chosen


def _write_build_file(folder: Path, facts: dict[str, Any]) -> None:
    text = json.dumps({**facts, "files": _sizes(folder)}, indent=1)
    (folder / BUILD_FILE).write_text(text + "\n")


def _sizes(folder: Path) -> dict[str, int]:
    paths = (p for p in folder.rglob("*") if p.is_file() and p != folder / BUILD_FILE)
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(paths)}
