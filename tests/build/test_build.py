"""The whole build with its expensive parts replaced: what is reused, redone, and refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.libllama import build, cli, install, native, runtime, toolchain
from tools.libllama.errors import BuildError
from tools.libllama.folders import locked, published
from tools.libllama.profile import Platform, plan_profile
from tools.libllama.source import Source

LIBRARIES = ("libllama", "libllama-common", "libggml", "libggml-base", "libggml-cpu-x64", "libggml-cpu-zen4")


class Workshop:
    """The build's surroundings: counts compiles, plays the binding and the choice of a variant."""

    def __init__(self, tmp_path, pin, monkeypatch):
        self.compiles = []
        self.choices = []
        self.native_dir = tmp_path / "_native"
        self.root = tmp_path / "build"
        self.source = Source(root=tmp_path / "model", digest=pin.tree, pinned=True)
        monkeypatch.setattr(runtime, "NATIVE", self.native_dir)
        monkeypatch.setattr(build, "BUILD_ROOT", self.root)
        monkeypatch.setattr(build, "read_pin", lambda: pin)
        monkeypatch.setattr(build, "is_unpacked", lambda: False)
        monkeypatch.setattr(build, "remove_sources", lambda _: None)
        monkeypatch.setattr(build, "pinned_source", lambda *_: self.source)
        monkeypatch.setattr(build, "_compile", self.compile)
        monkeypatch.setattr(install, "ensure_binding", self.bind)
        monkeypatch.setattr(install, "check_linkage", lambda _: None)
        monkeypatch.setattr(runtime.variant, "choose", self.choose)
        monkeypatch.setattr(
            build, "find_compilers", lambda: toolchain.Compilers(cc=("cc",), cxx=("c++",), id="fake 1")
        )

    def compile(self, source, profile, _compilers, _jobs, _recipe, entry, _progress):
        self.compiles.append(profile)
        folder = self.root / profile.backend / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            (folder / f"{name}.so").write_text(f"library {len(self.compiles)}")
        for name in native.TOOL_NAMES:
            (folder / name).write_text("program")
        native.publish_entry(folder.parent, source, profile, entry)

    def bind(self, base, _entry, _cxx, _progress, _lock):
        target = runtime.cache_dir() / "bindings" / "one"
        with published(target) as partial:
            (partial / install.binding.extension_name()).write_text("binding")
            runtime.stamp.write_stamp(partial, base, "sources")
        return target

    def choose(self, folder, *, fresh, log):
        self.choices.append((Path(folder), fresh))
        log("CPU variant zen4: works")
        return folder / "libggml-cpu-zen4.so"


@pytest.fixture
def workshop(tmp_path, pin, monkeypatch):
    """A build whose compiles are counted."""
    return Workshop(tmp_path, pin, monkeypatch)


def test_a_first_build_ends_with_a_real_decode_before_it_is_put_in_place(workshop, progress):
    """B20: the folder is tried under its temporary name, then renamed."""
    built = build.run(build.Request(backend="cpu"), progress)
    assert built.native_dir == workshop.native_dir / "cpu"
    assert built.variant == built.native_dir / "libggml-cpu-zen4.so"
    ((tried, fresh),) = workshop.choices
    assert fresh
    assert tried != built.native_dir
    assert {path.stem for path in built.native_dir.glob("lib*")} == set(LIBRARIES)
    assert (built.native_dir / "selftest.gguf").stat().st_size > 500_000


def test_the_pin_and_the_options_can_be_read_at_run_time(workshop, progress, pin):
    """B1: build.json has the pin, the options, the compiler and the stamp."""
    built = build.run(build.Request(backend="cpu", cmake_args=("-DX=1",)), progress)
    facts = json.loads((built.native_dir / "build.json").read_text())
    assert facts["pin"] == pin.as_dict()
    assert facts["compiler"] == "fake 1"
    assert facts["cmake_args"][-1] == "-DX=1"
    assert facts["stamp"] == f"cpu-{facts['key']}+sources"


def test_a_second_build_does_nothing(workshop, progress, said):
    """With everything in place nothing is compiled, copied or tried again."""
    first = build.run(build.Request(backend="cpu"), progress)
    inode = first.native_dir.stat().st_ino
    assert build.run(build.Request(backend="cpu"), progress) == first
    assert len(workshop.compiles) == 1
    assert first.native_dir.stat().st_ino == inode
    assert workshop.choices[-1] == (first.native_dir, False)
    assert "up to date" in said.getvalue()


def test_another_checkout_takes_the_libraries_from_the_cache(workshop, progress, tmp_path, monkeypatch):
    """The same pin, options and compiler elsewhere: no compile, no sources, hard links."""
    first = build.run(build.Request(backend="cpu"), progress)
    monkeypatch.setattr(runtime, "NATIVE", tmp_path / "elsewhere")
    monkeypatch.setattr(build, "pinned_source", lambda *_: pytest.fail("sources were wanted"))
    second = build.run(build.Request(backend="cpu"), progress)
    assert len(workshop.compiles) == 1
    assert (second.native_dir / "libllama.so").samefile(first.native_dir / "libllama.so")


@pytest.mark.parametrize(
    "other",
    [
        {"cmake_args": ("-DGGML_AVX512=OFF",)},
        {"server_tools": True},
        {"native": True},
        {"backend": "vulkan"},
    ],
)
def test_other_options_are_another_build(workshop, progress, other):
    """The cache never answers a request with libraries made for a different one."""
    build.run(build.Request(backend="cpu"), progress)
    build.run(build.Request(**{"backend": "cpu", **other}), progress)
    assert len(workshop.compiles) == 2


def test_a_damaged_cache_entry_is_built_again(workshop, progress):
    """A library in the cache that has lost bytes is not installed."""
    build.run(build.Request(backend="cpu"), progress)
    (entry,) = (runtime.cache_dir() / "native").glob("[!.]*")
    (entry / "lib" / "libllama.so").unlink()
    (entry / "lib" / "libllama.so").write_text("cut")
    build.run(build.Request(backend="cpu"), progress)
    assert len(workshop.compiles) == 2


def test_a_damaged_native_folder_is_installed_again(workshop, progress):
    """A file gone from the installed folder comes back from the cache without a compile."""
    built = build.run(build.Request(backend="cpu"), progress)
    (built.native_dir / "libggml.so").unlink()
    build.run(build.Request(backend="cpu"), progress)
    assert (built.native_dir / "libggml.so").is_file()
    assert len(workshop.compiles) == 1


def test_clean_starts_over(workshop, progress):
    """--clean drops the cached libraries of these options too."""
    build.run(build.Request(backend="cpu"), progress)
    build.run(build.Request(backend="cpu", clean=True), progress)
    assert len(workshop.compiles) == 2


def test_clean_waits_for_whoever_is_at_work(workshop, progress, said):
    """--clean of one build does not remove the folder that another one compiles or installs into."""
    for folder in (workshop.root / "cpu", workshop.native_dir / "cpu"):
        folder.mkdir(parents=True)
        with locked(folder.with_name(".cpu.lock"), waiting=pytest.fail):
            clean = threading.Thread(target=build._clean, args=["cpu", progress])
            clean.start()
            while str(folder.with_name(".cpu.lock")) not in said.getvalue():
                time.sleep(0.01)
            assert folder.exists()
        clean.join()
        assert not folder.exists()
        assert folder.with_name(".cpu.lock").exists()


class Binder:
    """Stands in for the compile of the binding."""

    def __init__(self, monkeypatch):
        self.n_compiled = 0
        monkeypatch.setattr(install.binding, "build_binding", self.build)

    def build(self, *, out_dir, stamp, **_):
        self.n_compiled += 1
        out_dir.mkdir()
        (out_dir / install.binding.extension_name()).write_text("binding")
        runtime.stamp.write_stamp(out_dir, stamp, "sources")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_binding_in_the_cache_is_compiled_again(monkeypatch, progress, tmp_path, damage):
    """A cached binding that has lost bytes (or itself) heals with the next build."""
    binder = Binder(monkeypatch)
    for _ in range(2):
        bound = install.ensure_binding("base", tmp_path, ("c++",), progress, 0)
    assert binder.n_compiled == 1
    library = bound / install.binding.extension_name()
    library.unlink()
    if damage == "cut":
        library.write_text("bind")
    install.ensure_binding("base", tmp_path, ("c++",), progress, 0)
    assert binder.n_compiled == 2
    assert library.read_text() == "binding"


def test_the_installed_binding_is_a_copy(workshop, progress):
    """What happens to the installed binding does not happen to the one in the cache."""
    built = build.run(build.Request(backend="cpu"), progress)
    name = install.binding.extension_name()
    assert not (built.native_dir / name).samefile(runtime.cache_dir() / "bindings" / "one" / name)


def test_clean_forgets_the_cached_binding_too(workshop, progress, monkeypatch):
    """--clean leaves nothing that was built before, the binding included."""
    folder = runtime.cache_dir() / "bindings" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.setattr(install, "binding_dir", lambda _: folder)
    build.run(build.Request(backend="cpu"), progress)
    assert folder.exists()
    build.run(build.Request(backend="cpu", clean=True), progress)
    assert not folder.exists()


def refused(capsys, *arguments):
    """What the command line says about a build that it refuses; never a traceback."""
    assert cli.main(["--backend", "cpu", *arguments]) == 1
    return capsys.readouterr().err


def test_a_cache_that_is_a_file_is_a_sentence(workshop, cache, capsys):
    """ERLLAMA_CACHE_DIR names a file: the path, and that the variable can be changed."""
    cache.parent.mkdir(exist_ok=True)
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("x")
    said = refused(capsys)
    assert "a file is where a folder has to be" in said
    assert f"ERLLAMA_CACHE_DIR (now {cache})" in said


def test_a_native_folder_that_is_a_file_is_a_sentence(workshop, capsys):
    """_native is a file: named, and the cache variable is not blamed."""
    workshop.native_dir.write_text("x")
    said = refused(capsys)
    assert f"a file is where a folder has to be ({workshop.native_dir})" in said
    assert "ERLLAMA_CACHE_DIR" not in said


def test_a_checkout_that_cannot_be_written_is_a_sentence(workshop, capsys, monkeypatch):
    """A read-only file system under the checkout."""
    real = os.open

    def read_only(path, flags, *more):
        if str(path).startswith(str(workshop.native_dir)) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    assert "the file system is read-only" in refused(capsys)


def test_a_user_s_tree_with_a_dangling_link_builds(workshop, progress, tmp_path):
    """--source with a link that leads nowhere is a tree like any other."""
    (tmp_path / "model" / "dangling").symlink_to("nowhere")
    build.run(build.Request(backend="cpu", source=tmp_path / "model"), progress)
    assert workshop.compiles


def test_a_user_s_tree_that_changes_meanwhile_is_not_cached(tmp_path, progress, monkeypatch, pin):
    """An edit during the compile: what came out has no name, so it is not kept."""
    from tools.libllama.source import user_source

    source = user_source(tmp_path / "model")
    monkeypatch.setattr(build, "BUILD_ROOT", tmp_path / "build")
    monkeypatch.setattr(build, "find_toolchain", lambda _: None)
    monkeypatch.setattr(build, "configure", lambda *_: None)
    monkeypatch.setattr(
        build, "compile_targets", lambda *_: (tmp_path / "model" / "CMakeLists.txt").write_text("edited")
    )
    profile = plan_profile("cpu", Platform.here(), commit="0" * 40)
    entry = native.entry_dir("x")
    with pytest.raises(BuildError, match="was changed while it was compiled"):
        build._compile(source, profile, None, 1, "recipe", entry, progress)
    assert not entry.exists()


def test_a_native_build_that_faults_leads_to_the_portable_one(workshop, progress, monkeypatch, said):
    """B20: --native on a CPU that lies about AMX is built a second time, without it, and works."""

    def choose(folder, *, fresh, log):
        if workshop.compiles[-1].native:
            raise runtime.NativeLibraryError("native: died of SIGILL")
        return workshop.choose(folder, fresh=fresh, log=log)

    monkeypatch.setattr(runtime.variant, "choose", choose)
    built = build.run(build.Request(backend="cpu", native=True), progress)
    assert [profile.native for profile in workshop.compiles] == [True, False]
    assert workshop.compiles[1].options["GGML_CPU_ALL_VARIANTS"] == "ON"
    assert json.loads((built.native_dir / "build.json").read_text())["native"] is False
    assert "SIGILL" in said.getvalue()


def test_a_build_that_does_not_run_leaves_the_one_that_did(workshop, progress, monkeypatch):
    """When every variant fails its decode, the installed folder stays and the reason is told."""
    built = build.run(build.Request(backend="cpu"), progress)
    before = (built.native_dir / "build.json").read_text()

    def choose(*_args, **_more):
        raise runtime.NativeLibraryError("zen4: died of SIGILL")

    monkeypatch.setattr(runtime.variant, "choose", choose)
    with pytest.raises(BuildError, match="zen4: died of SIGILL"):
        build.run(build.Request(backend="cpu", cmake_args=("-DX=1",)), progress)
    assert (built.native_dir / "build.json").read_text() == before
    assert sorted(path.name for path in workshop.native_dir.glob("[!.]*")) == ["cpu"]


def test_server_tools_lie_beside_the_one_variant_that_runs(workshop, progress):
    """Upstream's programs pick the best-rated library in their folder, so it holds only the chosen one."""
    built = build.run(build.Request(backend="cpu", server_tools=True), progress)
    names = {path.name for path in (built.native_dir / "tools").iterdir()}
    assert names == {"llama-server", "llama-bench", "libggml-cpu-zen4.so"}


def test_a_user_s_tree_is_recorded_instead_of_the_pin(workshop, progress, tmp_path):
    """--source: build.json names the folder and the tree's digest, and no pin."""
    built = build.run(build.Request(backend="cpu", source=tmp_path / "model"), progress)
    facts = json.loads((built.native_dir / "build.json").read_text())
    assert facts["pin"] is None
    assert facts["source"] == str(tmp_path / "model")
    assert workshop.compiles


def test_the_key_covers_what_the_compiler_s_output_depends_on(monkeypatch):
    """Sources, options, compiler, platform and flags from the environment each make another key."""
    linux = Platform(system="linux", machine="x86_64")
    plain = plan_profile("cpu", linux, commit="0" * 40)
    keys = {
        native.native_key("a", plain, "gcc 12", linux),
        native.native_key("b", plain, "gcc 12", linux),
        native.native_key("a", plan_profile("cuda", linux, commit="0" * 40), "gcc 12", linux),
        native.native_key("a", plain, "gcc 13", linux),
        native.native_key("a", plain, "gcc 12", Platform(system="linux", machine="aarch64")),
    }
    keys.add(native.native_key("a", plain, "gcc 12", linux, "nvcc 12"))
    for name in ("CXXFLAGS", "MACOSX_DEPLOYMENT_TARGET", "SDKROOT", "CUDAARCHS", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, "x")
        keys.add(native.native_key("a", plain, "gcc 12", linux))
    assert len(keys) == 11


def test_an_incomplete_compile_is_not_cached(workshop, tmp_path):
    """A build folder that lacks a library leaves no entry behind."""
    folder = tmp_path / "build" / "bin"
    folder.mkdir(parents=True)
    (folder / "libllama.so").touch()
    profile = plan_profile("cpu", Platform.here(), commit="0" * 40)
    entry = native.entry_dir("x")
    with pytest.raises(BuildError, match="libggml, libggml-base, libllama-common"):
        native.publish_entry(folder.parent, workshop.source, profile, entry)
    assert not native.is_complete(entry)
    assert not entry.exists()


def test_jobs_are_bounded_by_cpus_and_memory(monkeypatch):
    """One compiler per usable CPU, but not more than fit into memory, and at least one."""
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(build.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 2**20)
    assert build.default_jobs() == 2
    monkeypatch.setattr(build.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1)
    assert build.default_jobs() == 1


def test_a_bare_interpreter_is_told_what_it_lacks():
    """Python without site-packages gets a sentence and exit code 1, not a traceback."""
    command = [sys.executable, "-I", "-S", str(build.ROOT / "build_libllama.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: This Python lacks cffi, gguf, numpy")
    assert "make build" in done.stderr


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    """An interrupt anywhere: no traceback, and what to do next."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "run", interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr().err.splitlines() == ["Interrupted. Run the same command again to continue."]


def test_a_build_error_is_a_sentence_and_1(monkeypatch, capsys):
    """What failed comes last but one, what to do last."""

    def failing(*_):
        raise BuildError("It failed.", advice="Do that.", log_tail=["line"])

    monkeypatch.setattr(build, "run", failing)
    assert cli.main(["--backend", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-3:] == ["  | line", "error: It failed.", "  Do that."]


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--backend", "opencl"], ["--nonsense"]])
def test_wrong_usage_is_2(arguments, capsys):
    """Options that do not exist or make no sense are refused by the parser."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_names_every_option_with_an_example(capsys):
    """--help is enough to use it."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for option in ("--backend", "--source", "--cmake-arg", "--with-server-tools", "--native", "--jobs"):
        assert text.count(option) >= 2
    assert "ERLLAMA_CACHE_DIR" in text
