"""Compiles the cffi binding: cdef + shim → wrappers → one API-mode extension next to the libraries.

Direct compiler calls, no setuptools. Needs cffi and a C++17 compiler.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import cffi
from cffi import recompiler

from tools.libllama import runtime, wrappers
from tools.libllama.errors import BuildError
from tools.libllama.pin import ROOT

HERE = Path(__file__).resolve().parent
PACKAGE_DIR = ROOT / "erllama" / "llama"
LIBRARIES = ("llama", "llama-common", "ggml", "ggml-base")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-unused-parameter")
MODULE = "_binding"

Log = Callable[[str], None]


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
    cxx: Sequence[str],
    cxx_flags: Sequence[str] = (),
    stamp: str,
    log: Log,
    lock_fd: int | None = None,
) -> Path:
    """Generate, compile and link the binding into `out_dir`, which is a fresh folder.

    Args: `libs_dir` holds the four libraries the binding links against; they must lie in `out_dir`
    when it is loaded. `include_dirs` are upstream's include/, ggml/include/, common/ and vendor/.
    `cxx` is the compiler's command; `cxx_flags` reach our own sources and the link only (sanitizers, -g).
    `stamp` names the native build; the compiled-in stamp is `stamp.full_stamp(stamp, sources)`.
    `lock_fd` is held by a compiler for as long as it runs.
    Returns: the extension's path. Raises: BuildError with the command and the end of its output.
    """
    sources = runtime.stamp.sources_hash(PACKAGE_DIR)
    full_stamp = runtime.stamp.full_stamp(stamp, sources)
    target = out_dir / extension_name()
    work = out_dir / "binding-build"
    work.mkdir(parents=True)
    generate(work)
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread"]
    includes = [f"-isystem{path}" for path in include_dirs]
    ours = [f"-I{PACKAGE_DIR}", f"-I{work}", f'-DERLLAMA_BUILD_STAMP="{full_stamp}"', *WARNINGS, *cxx_flags]
    python = [
        f"-isystem{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    ]
    generated = [f"-I{PACKAGE_DIR}", f"-I{work}", "-w", *cxx_flags, *includes, *python]
    jobs = [(path, [*flags, *ours, *includes]) for path in sorted(PACKAGE_DIR.glob("shim*.cpp"))]
    jobs += [(work / "wrappers.cpp", [*flags, *ours, *includes])]
    jobs += [(work / f"{MODULE}.cpp", [*flags, *generated])]
    objects: list[Path] = []
    for source, options in jobs:
        log(f"compiling {source.name}")
        objects.append(work / (source.stem + ".o"))
        _run([*cxx, *options, "-c", str(source), "-o", str(objects[-1])], lock_fd)
    log(f"linking {target.name}")
    _run(_link_command(cxx, objects, libs_dir, target, cxx_flags), lock_fd)
    runtime.stamp.write_stamp(out_dir, stamp, sources)
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


def _link_command(
    cxx: Sequence[str], objects: Sequence[Path], libs_dir: Path, target: Path, cxx_flags: Sequence[str]
) -> list[str]:
    if sys.platform == "darwin":
        shape = ["-bundle", "-undefined", "dynamic_lookup", "-Wl,-rpath,@loader_path"]
    else:
        shape = ["-shared", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    libraries = [f"-L{libs_dir}", *(f"-l{name}" for name in LIBRARIES), "-pthread"]
    return [*cxx, *shape, *cxx_flags, *map(str, objects), *libraries, "-o", str(target)]


def _run(command: Sequence[str], lock_fd: int | None) -> None:
    keep = () if lock_fd is None else (lock_fd,)
    with runtime.child.leashed(command, stdout=subprocess.PIPE, text=True, keep=keep) as process:
        output = process.stdout.read()
        code = process.wait()
    if code != 0:
        raise BuildError(
            "Compiling the binding failed.",
            advice=f"The command was: {shlex.join(command)}",
            log_tail=output.splitlines()[-15:],
        )
    if output.strip():
        print(output, file=sys.stderr)
