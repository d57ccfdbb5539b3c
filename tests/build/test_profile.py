"""Which CMake options each backend gets on each platform."""

from __future__ import annotations

import itertools

import pytest

from tools.libllama import native
from tools.libllama.errors import BuildError
from tools.libllama.profile import BACKENDS, Platform, plan_profile

LINUX = Platform(system="linux", machine="x86_64")
ARM = Platform(system="linux", machine="aarch64")
MAC = Platform(system="darwin", machine="arm64")
FREEBSD = Platform(system="freebsd14", machine="amd64")
SWITCHES = {"cuda": "GGML_CUDA", "metal": "GGML_METAL", "vulkan": "GGML_VULKAN", "hip": "GGML_HIP"}


def plan(backend=None, on=LINUX, **more):
    return plan_profile(backend, on, commit="0123456789abcdef", **more)


@pytest.mark.parametrize(("backend", "on"), list(itertools.product(BACKENDS, [LINUX, ARM, MAC, FREEBSD])))
def test_one_option_turns_on_exactly_one_backend(backend, on):
    """B20: CUDA, Metal, Vulkan and HIP are one option each, and never come along uninvited."""
    if backend == "metal" and on is not MAC:
        with pytest.raises(BuildError, match="macOS only"):
            plan(backend, on)
        return
    options = plan(backend, on).options
    assert {name for name, switch in SWITCHES.items() if options[switch] == "ON"} == {backend} - {"cpu"}


def test_metal_is_the_default_on_macos_with_accelerate():
    """B20: without a word, macOS gets Metal with its kernels embedded, and Accelerate."""
    profile = plan(on=MAC)
    assert profile.backend == "metal"
    assert profile.options["GGML_METAL"] == "ON"
    assert profile.options["GGML_METAL_EMBED_LIBRARY"] == "ON"
    assert profile.options["GGML_ACCELERATE"] == "ON"


@pytest.mark.parametrize("on", [LINUX, ARM, FREEBSD])
def test_the_cpu_is_the_default_elsewhere(on):
    """Everywhere but on macOS a plain build is a CPU build."""
    assert plan(on=on).backend == "cpu"


@pytest.mark.parametrize(
    ("backend", "on"), [("cpu", LINUX), ("cuda", LINUX), ("metal", MAC), ("cpu", FREEBSD)]
)
def test_what_holds_for_every_build(backend, on):
    """B2, B20: no OpenSSL, no OpenMP, C++17, shared libraries with loadable backends, common included."""
    options = plan(backend, on).options
    expected = {
        "LLAMA_OPENSSL": "OFF",
        "GGML_OPENMP": "OFF",
        "CMAKE_CXX_STANDARD": "17",
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_BACKEND_DL": "ON",
        "LLAMA_BUILD_COMMON": "ON",
        "LLAMA_USE_PREBUILT_UI": "OFF",
    }
    assert expected.items() <= options.items()


@pytest.mark.parametrize(
    ("on", "variants"),
    [
        (LINUX, True),
        (ARM, True),
        (MAC, True),
        (FREEBSD, True),
        (Platform(system="freebsd14", machine="arm64"), False),
        (Platform(system="linux", machine="loongarch64"), False),
    ],
)
def test_variants_where_ggml_has_them_else_a_native_build(on, variants):
    """All CPU variants where upstream lists some for the platform; else one library for this CPU."""
    options = plan("cpu", on).options
    assert options["GGML_CPU_ALL_VARIANTS"] == ("ON" if variants else "OFF")
    assert options["GGML_NATIVE"] == ("OFF" if variants else "ON")


def test_native_builds_one_library_for_this_cpu():
    """--native: no variants, this machine's instructions, linked in."""
    options = plan(native=True).options
    assert (options["GGML_NATIVE"], options["GGML_CPU_ALL_VARIANTS"]) == ("ON", "OFF")
    # ggml's CMake stops at native together with loadable backends.
    assert options["GGML_BACKEND_DL"] == "OFF"


def test_libraries_find_each_other_by_place():
    """The run path is the library's own folder, and its parent for the programs below it."""
    assert plan(on=LINUX).options["CMAKE_INSTALL_RPATH"] == "$ORIGIN;$ORIGIN/.."
    assert plan(on=MAC).options["CMAKE_INSTALL_RPATH"] == "@loader_path;@loader_path/.."


def test_server_tools_are_extra_targets():
    """Upstream's programs are configured and built only when asked for."""
    plain, tools = plan(), plan(server_tools=True)
    assert "llama-server" not in plain.targets
    assert plain.options["LLAMA_BUILD_TOOLS"] == "OFF"
    assert {"llama-server", "llama-bench"} <= set(tools.targets)
    assert tools.options["LLAMA_BUILD_SERVER"] == "ON"


def test_the_users_cmake_arguments_come_last():
    """--cmake-arg wins over what we set, because CMake takes the last."""
    arguments = plan(extra_args=("-DGGML_AVX512=OFF", "-DGGML_OPENMP=ON")).cmake_args
    assert arguments[-2:] == ["-DGGML_AVX512=OFF", "-DGGML_OPENMP=ON"]
    assert arguments.index("-DGGML_OPENMP=OFF") < arguments.index("-DGGML_OPENMP=ON")


def test_the_library_does_not_depend_on_our_own_commit():
    """Upstream's scripts would ask git, which in a checkout answers with our commit."""
    assert plan().options["LLAMA_BUILD_COMMIT"] == "012345678"


def test_an_unknown_backend_is_refused_by_name():
    """A backend that does not exist names those that do."""
    with pytest.raises(BuildError, match="'opencl'") as caught:
        plan("opencl")
    assert "vulkan" in caught.value.advice


def test_building_the_server_tools_later_keeps_the_objects_of_the_libraries():
    """The recipe of the objects is the same with and without them, and for nothing else that differs."""
    plain, tools = plan(), plan(server_tools=True)
    assert tools.without_tools() == plain
    assert (
        native.recipe_key(tools, "c", LINUX)
        == native.recipe_key(plain, "c", LINUX)
        == native.native_key("", plain, "c", LINUX)
    )
    assert native.recipe_key(plan(native=True), "c", LINUX) != native.recipe_key(plain, "c", LINUX)


def test_the_build_stamp_is_the_same_with_the_server_tools():
    """Adding llama-server leaves the key that saved KV is named after; what is in the cache differs."""
    plain, tools = plan(), plan(server_tools=True)
    assert native.library_key("tree", tools, "c", LINUX) == native.native_key("tree", plain, "c", LINUX)
    assert native.native_key("tree", tools, "c", LINUX) != native.native_key("tree", plain, "c", LINUX)
