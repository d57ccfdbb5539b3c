"""Which CMake options a backend gets on a platform. Pure: no file is read, no command is run.

The reasons behind the options that are not obvious:

- `GGML_BACKEND_DL` + `GGML_CPU_ALL_VARIANTS`: one library per CPU generation, chosen by running them,
  so that one build serves every machine and a variant that faults can be left out.
- `GGML_OPENMP=OFF`: with libgomp, decoding on any thread but the first that used it is half as fast;
  ggml's own thread pool has no such effect.
- `LLAMA_OPENSSL=OFF`: the library loads files; it never talks HTTPS.
- `LLAMA_BUILD_NUMBER` and `_COMMIT`: else upstream's scripts ask git, which inside a checkout answers
  with *our* commit, and every commit of ours would rebuild the library.
- `CMAKE_PLATFORM_NO_VERSIONED_SONAME`: plain `libllama.so` without symbolic links, which a wheel
  cannot hold.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field, replace

from tools.libllama.errors import BuildError

LIBRARIES, PROGRAMS = ("llama", "llama-common"), ("llama-server", "llama-bench")
BACKENDS = ("cpu", "cuda", "metal", "vulkan", "hip")
_SWITCH = {"cuda": "GGML_CUDA", "metal": "GGML_METAL", "vulkan": "GGML_VULKAN", "hip": "GGML_HIP"}
# ggml/src/CMakeLists.txt: the (system, architecture) pairs with a list of variants.
_VARIANT_ARCHS = {
    "linux": {"x86", "arm", "ppc", "s390x", "riscv64"},
    "darwin": {"x86", "arm"},
    "freebsd": {"x86"},
}
_ARCH = {
    "x86_64": "x86",
    "amd64": "x86",
    "i686": "x86",
    "aarch64": "arm",
    "arm64": "arm",
    "ppc64le": "ppc",
    "s390x": "s390x",
    "riscv64": "riscv64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The machine that is built for: `system` as in sys.platform, `machine` as uname says it."""

    system: str
    machine: str

    @classmethod
    def here(cls) -> Platform:
        """The machine we run on."""
        return cls(system=sys.platform, machine=platform.machine())

    @property
    def family(self) -> str:
        """`linux`, `darwin` or `freebsd`, without a release number."""
        return self.system.rstrip("0123456789")

    @property
    def default_backend(self) -> str:
        """The backend that is built when none is named: Metal on macOS, else the CPU."""
        return "metal" if self.family == "darwin" else "cpu"

    @property
    def has_variants(self) -> bool:
        """Whether ggml can build one CPU library per generation here."""
        return _ARCH.get(self.machine.lower(), "") in _VARIANT_ARCHS.get(self.family, set())

    @property
    def origin(self) -> str:
        """How a library's search path spells "the folder I lie in"."""
        return "@loader_path" if self.family == "darwin" else "$ORIGIN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that decides what comes out of CMake.

    `options` are CMake cache entries; `targets` what ninja is asked for. Two profiles with equal
    options and targets produce the same libraries from the same sources with the same compiler.
    """

    backend: str
    options: dict[str, str]
    targets: tuple[str, ...]
    extra_args: tuple[str, ...] = ()
    native: bool = False
    server_tools: bool = field(default=False)

    @property
    def cmake_args(self) -> list[str]:
        """The command line for CMake: our options, then the user's, which therefore win."""
        return [*(f"-D{name}={value}" for name, value in self.options.items()), *self.extra_args]

    def without_tools(self) -> Profile:
        """The same libraries, without upstream's programs beside them."""
        options = self.options | _tools(False)
        return replace(self, options=options, targets=LIBRARIES, server_tools=False)


def plan_profile(
    backend: str | None,
    on: Platform,
    *,
    commit: str,
    native: bool = False,
    server_tools: bool = False,
    extra_args: tuple[str, ...] = (),
) -> Profile:
    """The profile of one build.

    Raises: BuildError for an unknown backend, and for Metal anywhere but on macOS.
    """
    backend = backend or on.default_backend
    if backend not in BACKENDS:
        raise BuildError(f"There is no backend {backend!r}.", advice=f"Choose one of {', '.join(BACKENDS)}.")
    if backend == "metal" and on.family != "darwin":
        raise BuildError("Metal exists on macOS only.", advice="Leave --backend away for a CPU build.")
    variants = on.has_variants and not native
    options = _common(on, commit, variants) | _cpu(variants) | _backend(backend, on) | _tools(server_tools)
    targets = LIBRARIES + (PROGRAMS if server_tools else ())
    return Profile(
        backend=backend,
        options=options,
        targets=targets,
        extra_args=extra_args,
        native=native,
        server_tools=server_tools,
    )


def _common(on: Platform, commit: str, variants: bool) -> dict[str, str]:
    return {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_STANDARD": "17",
        "CMAKE_CXX_STANDARD_REQUIRED": "ON",
        "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        # The second entry is for what lies one folder below: the server tools.
        "CMAKE_INSTALL_RPATH": f"{on.origin};{on.origin}/..",
        "BUILD_SHARED_LIBS": "ON",
        # ggml refuses a native CPU library that is loaded instead of linked: its ratings need variants.
        "GGML_BACKEND_DL": "ON" if variants else "OFF",
        "GGML_OPENMP": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_COMMON": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_BUILD_NUMBER": "0",
        "LLAMA_BUILD_COMMIT": commit[:9],
    }


def _cpu(variants: bool) -> dict[str, str]:
    return {
        "GGML_NATIVE": "OFF" if variants else "ON",
        "GGML_CPU_ALL_VARIANTS": "ON" if variants else "OFF",
    }


def _backend(backend: str, on: Platform) -> dict[str, str]:
    """Each backend on or off by name, so that no default of upstream's can turn one on."""
    options = {switch: "ON" if name == backend else "OFF" for name, switch in _SWITCH.items()}
    if on.family == "darwin":
        options |= {"GGML_ACCELERATE": "ON", "GGML_METAL_EMBED_LIBRARY": options["GGML_METAL"]}
    return options


def _tools(server_tools: bool) -> dict[str, str]:
    switch = "ON" if server_tools else "OFF"
    return {"LLAMA_BUILD_TOOLS": switch, "LLAMA_BUILD_SERVER": switch}
