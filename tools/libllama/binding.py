"""Compiles the cffi binding: cdef + shim → wrappers → one API-mode extension next to the libraries.

Direct compiler calls, no setuptools. Needs cffi and a C++17 compiler; imports nothing of erllama
but `stamp.py`, by path, because the build runs before erllama is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cffi
from cffi import recompiler

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).resolve().parent
PACKAGE_DIR = HERE.parents[1] / "erllama" / "llama"
LIBRARIES = ("llama", "llama-common", "ggml", "ggml-base")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-unused-parameter")
MODULE = "_binding"
INPUTS_FILE = "binding-inputs.json"

Log = Callable[[str], None]


class BindingFailed(RuntimeError):
    """A compiler or linker call failed; the message holds the command and the end of its output."""


def _by_path(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


stamp_module = _by_path("_erllama_stamp", PACKAGE_DIR / "stamp.py")
wrappers = _by_path("_erllama_wrappers", HERE / "wrappers.py")


def cdef_headers(package_dir: Path = PACKAGE_DIR) -> list[str]:
    """The texts of cdef/*.h, types first."""
    paths = sorted((package_dir / "cdef").glob("*.h"), key=lambda p: (p.name != "types.h", p.name))
    return [path.read_text() for path in paths]


def extension_name() -> str:
    """The file name of the extension for the running Python."""
    return MODULE + str(sysconfig.get_config_var("EXT_SUFFIX"))


def build_binding(
    *,
    libs_dir: Path,
    include_dirs: Sequence[Path],
    out_dir: Path,
    cxx: str,
    cxx_flags: Sequence[str] = (),
    stamp: str,
    log: Log,
) -> Path:
    """Generate, compile and link the binding into `out_dir`, unless its inputs are unchanged.

    Args: `libs_dir` holds the four libraries the binding links against; they must lie in `out_dir`
    when it is loaded. `include_dirs` are upstream's include/, ggml/include/, common/ and vendor/.
    `cxx_flags` reach our own sources and the link only (sanitizers, -g).
    `stamp` names the native build; the compiled-in stamp is `stamp.full_stamp(stamp, sources)`.
    Returns: the extension's path. Raises: `BindingFailed`.
    """
    sources = stamp_module.sources_hash(PACKAGE_DIR)
    full_stamp = stamp_module.full_stamp(stamp, sources)
    target = out_dir / extension_name()
    inputs = _inputs(full_stamp, libs_dir, include_dirs, cxx, cxx_flags)
    if target.is_file() and _recorded_inputs(out_dir) == inputs:
        log("binding: up to date")
        stamp_module.write_stamp(out_dir, stamp, sources)
        return target

    work = out_dir / "binding-build"
    work.mkdir(parents=True, exist_ok=True)
    (out_dir / INPUTS_FILE).unlink(missing_ok=True)
    (out_dir / stamp_module.STAMP_FILE).unlink(missing_ok=True)
    generate(work)
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread"]
    includes = [f"-isystem{path}" for path in include_dirs]
    ours = [f"-I{PACKAGE_DIR}", f"-I{work}", f'-DERLLAMA_BUILD_STAMP="{full_stamp}"', *WARNINGS, *cxx_flags]
    objects: list[Path] = []
    for source in [*sorted(PACKAGE_DIR.glob("shim*.cpp")), work / "wrappers.cpp"]:
        log(f"binding: compiling {source.name}")
        objects.append(_compile(cxx, source, work, [*flags, *ours, *includes]))
    log(f"binding: compiling {MODULE}.cpp")
    python = [
        f"-isystem{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    ]
    generated_flags = [*flags, f"-I{PACKAGE_DIR}", f"-I{work}", "-w", *cxx_flags, *includes, *python]
    objects.append(_compile(cxx, work / f"{MODULE}.cpp", work, generated_flags))
    log(f"binding: linking {target.name}")
    _link(cxx, objects, libs_dir, target, cxx_flags)
    stamp_module.write_stamp(out_dir, stamp, sources)
    (out_dir / INPUTS_FILE).write_text(json.dumps(inputs, indent=1) + "\n")
    return target


def generate(work: Path) -> None:
    """Write `wrappers.h`, `wrappers.cpp` and cffi's module source into `work`."""
    headers = cdef_headers()
    (work / "wrappers.h").write_text(wrappers.header(headers))
    (work / "wrappers.cpp").write_text(wrappers.source(headers))
    ffi = cffi.FFI()
    ffi.cdef(wrappers.cdef(headers))
    # The generated code is C that also compiles as C++, which the headers of the pin need.
    ffi.set_source(MODULE, '#include "wrappers.h"\n', source_extension=".cpp")
    recompiler.make_c_source(ffi, MODULE, '#include "wrappers.h"\n', str(work / f"{MODULE}.cpp"))


def _inputs(
    full_stamp: str, libs_dir: Path, include_dirs: Sequence[Path], cxx: str, cxx_flags: Sequence[str]
) -> dict[str, str]:
    generator = hashlib.sha256((HERE / "wrappers.py").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    return {
        "stamp": full_stamp,
        "generator": generator[:16],
        "libs_dir": str(libs_dir),
        "include_dirs": " ".join(map(str, include_dirs)),
        "compiler": " ".join([cxx, *cxx_flags]),
        "python": sys.version,
        "cffi": cffi.__version__,
    }


def _recorded_inputs(out_dir: Path) -> object:
    try:
        return json.loads((out_dir / INPUTS_FILE).read_text())
    except (OSError, ValueError):
        return None


def _compile(cxx: str, source: Path, work: Path, flags: Sequence[str]) -> Path:
    target = work / (source.stem + ".o")
    _run([cxx, *flags, "-c", str(source), "-o", str(target)])
    return target


def _link(cxx: str, objects: Sequence[Path], libs_dir: Path, target: Path, cxx_flags: Sequence[str]) -> None:
    if sys.platform == "darwin":
        shape = ["-bundle", "-undefined", "dynamic_lookup", "-Wl,-rpath,@loader_path"]
    else:
        shape = ["-shared", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    temporary = target.with_name(target.name + ".tmp")
    libraries = [f"-l{name}" for name in LIBRARIES]
    _run(
        [
            cxx,
            *shape,
            *cxx_flags,
            *map(str, objects),
            f"-L{libs_dir}",
            *libraries,
            "-pthread",
            "-o",
            str(temporary),
        ]
    )
    temporary.replace(target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).splitlines()[-40:])
        raise BindingFailed(f"{' '.join(command)}\n{tail}")
    if result.stderr.strip():
        print(result.stderr, file=sys.stderr)
