"""The whole build: request in, a native folder that decodes out.

    pin → (sources, verified) → CMake, ninja → cache entry → binding → self-test → _native/<backend>
           only if not cached                   by key        by key    in a child  renamed into place

Every arrow's result is either complete or absent, so an interrupted build is continued by running
the same command again.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tools.libllama import native, runtime
from tools.libllama.compile import compile_targets, configure
from tools.libllama.errors import BuildError
from tools.libllama.folders import disk_errors, locked
from tools.libllama.pin import ROOT, Pin, read_pin
from tools.libllama.profile import Platform, Profile, plan_profile
from tools.libllama.reuse import make_reusable
from tools.libllama.source import (
    Source,
    in_use,
    is_unpacked,
    pinned_source,
    remove_sources,
    user_source,
)
from tools.libllama.toolchain import Compilers, find_compilers, find_toolchain, toolkit_id

if TYPE_CHECKING:
    from pathlib import Path

    from tools.libllama.progress import Progress

BUILD_ROOT = ROOT / "build"
_JOB_BYTES = 1536 * 2**20  # the largest C++ files of the pin take about 1 GiB of compiler memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; see `build_libllama.py --help`."""

    backend: str | None = None
    source: Path | None = None
    cmake_args: tuple[str, ...] = ()
    server_tools: bool = False
    native: bool = False
    jobs: int | None = None
    clean: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A finished build: its folder, and the CPU library that was found to run here."""

    native_dir: Path
    variant: Path


def run(request: Request, progress: Progress) -> Built:
    """Build what is asked for, or find it finished.

    Raises: BuildError with a sentence and advice; nothing half-done is left where it would be used.
    """
    _require_modules()
    with disk_errors("The build", ROOT):
        return _run_portable_if_native_faults(request, progress)


def _run_portable_if_native_faults(request: Request, progress: Progress) -> Built:
    from tools.libllama.install import NoVariantRuns  # needs cffi and gguf, which are there

    pin, on = read_pin(), Platform.here()
    commit = "local" if request.source else pin.commit
    profile = plan_profile(
        request.backend,
        on,
        commit=commit,
        native=request.native,
        server_tools=request.server_tools,
        extra_args=request.cmake_args,
    )
    try:
        return _run(request, profile, pin, on, progress)
    except NoVariantRuns as failure:
        if not profile.native or not on.has_variants:
            raise
        progress.note(str(failure))
        progress.note("this CPU does not run what it says it can; building the portable variants instead")
        portable = plan_profile(
            request.backend,
            on,
            commit=commit,
            server_tools=request.server_tools,
            extra_args=request.cmake_args,
        )
        return _run(replace(request, native=False), portable, pin, on, progress)


def fetch_only(progress: Progress) -> Path:
    """Have the pinned sources unpacked and verified, and nothing else; returns their folder."""
    with disk_errors("Fetching the sources", ROOT):
        return pinned_source(read_pin(), progress).root


def default_jobs() -> int:
    """How many compilers to run at once: one per usable CPU, fewer where memory is short."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(n_cpus, total_bytes // _JOB_BYTES))


def _run(request: Request, profile: Profile, pin: Pin, on: Platform, progress: Progress) -> Built:
    from tools.libllama.install import binding_dir, ensure_binding, install

    if request.clean:
        _clean(profile.backend, progress)
    compilers = find_compilers()
    source = user_source(request.source) if request.source else _known_source(pin, progress)
    digest = source.digest if source else pin.tree
    toolkit = toolkit_id(profile.backend)
    key = native.native_key(digest, profile, compilers.id, on, toolkit)
    entry = native.entry_dir(key)
    library = native.library_key(digest, profile, compilers.id, on, toolkit)
    base = f"{profile.backend}-{library}"
    # Builds with and without upstream's programs have an entry each, but share the binding.
    lock = entry.with_name(f".{library}.lock")
    with disk_errors("Using the cache folder", entry), locked(lock, waiting=progress.note) as held:
        if request.clean:
            for folder in (entry, binding_dir(base)):
                shutil.rmtree(folder, ignore_errors=True)
        if native.is_complete(entry):
            progress.note(f"libraries: {entry} (built before)")
        else:
            source = source or pinned_source(pin, progress)
            recipe = native.recipe_key(profile, compilers.id, on, toolkit)
            _compile(source, profile, compilers, request.jobs or default_jobs(), recipe, entry, progress)
        bound = ensure_binding(base, entry, compilers.cxx, progress, held)
    target = runtime.NATIVE / profile.backend
    facts = _facts(pin, request, profile, digest, key, compilers, on)
    with disk_errors("Installing", target), locked(_lock_beside(target), waiting=progress.note):
        variant = install(entry=entry, bound=bound, target=target, facts=facts, progress=progress)
    return Built(native_dir=target, variant=variant)


def _known_source(pin: Pin, progress: Progress) -> Source | None:
    """The vendored tree, verified, if it lies there; it is not fetched before it is needed."""
    return pinned_source(pin, progress) if is_unpacked() else None


def _compile(
    source: Source,
    profile: Profile,
    compilers: Compilers,
    jobs: int,
    recipe: str,
    entry: Path,
    progress: Progress,
) -> None:
    tools = find_toolchain(compilers)
    folder = BUILD_ROOT / profile.backend
    log = folder / "build.log"
    with (
        disk_errors("Compiling", folder),
        locked(_lock_beside(folder), waiting=progress.note) as lock_fd,
        in_use(source, progress),
    ):
        make_reusable(folder, source, recipe)
        configure(source.root, folder, profile, tools, log, progress, lock_fd)
        compile_targets(folder, profile, tools, jobs, log, progress, lock_fd)
        if not source.is_unchanged():
            raise BuildError(
                f"{source.root} was changed while it was compiled.", advice="Run the same command again."
            )
        native.publish_entry(folder, source, profile, entry)


def _lock_beside(folder: Path) -> Path:
    """A folder's lock lies outside, so that removing the folder leaves the lock."""
    return folder.with_name(f".{folder.name}.lock")


def _facts(
    pin: Pin, request: Request, profile: Profile, digest: str, key: str, compilers: Compilers, on: Platform
) -> dict[str, Any]:
    """What build.json tells at run time about where the libraries come from."""
    return {
        "pin": None if request.source else pin.as_dict(),
        "source": str(request.source.absolute()) if request.source else None,
        "tree": digest,
        "key": key,
        "backend": profile.backend,
        "native": profile.native,
        "server_tools": profile.server_tools,
        "cmake_args": profile.cmake_args,
        "compiler": compilers.id,
        "platform": f"{on.system}-{on.machine}",
    }


def _clean(backend: str, progress: Progress) -> None:
    progress.step("Removing the earlier build and the unpacked sources")
    for folder in (BUILD_ROOT / backend, runtime.NATIVE / backend):
        with locked(_lock_beside(folder), waiting=progress.note):
            shutil.rmtree(folder, ignore_errors=True)
    remove_sources(progress)


def _require_modules() -> None:
    import importlib.util

    missing = [name for name in ("cffi", "gguf", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"This Python lacks {', '.join(missing)}, which the build needs.",
            advice="Use `make build`, which sets up .venv, or: python -m pip install cffi gguf numpy",
        )
