"""The native library as it was really built: linkage, self-test, and a variant that really faults.

Needs the build that `make test` does first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from erllama.llama import variant
from tools.libllama import linkage, native, runtime, tree
from tools.libllama.errors import BuildError
from tools.libllama.folders import copy_tree
from tools.libllama.profile import Platform
from tools.libllama.selftest_model import write_selftest_model

pytestmark = pytest.mark.model

NATIVE_DIR = runtime.NATIVE / Platform.here().default_backend


@pytest.fixture(scope="module")
def facts():
    """build.json of the build in this checkout."""
    path = NATIVE_DIR / "build.json"
    assert path.is_file(), "there is no native build here: run `make build`"
    return json.loads(path.read_text())


def run_selftest(folder, library):
    command = [sys.executable, str(runtime.SELFTEST), str(folder), str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nothing_is_linked_to_ssl_or_openmp(facts):
    """B2: the listing of every built object names no libssl, libcrypto or libgomp, and all is found."""
    objects = [path for path in NATIVE_DIR.rglob("*.so") if path.is_file()]
    assert len(objects) > 5
    listing = {path.name: linkage.needed(path) for path in objects}
    assert all(listing.values())
    linkage.check_linkage(objects)


def test_libraries_refer_to_each_other_by_plain_names(facts):
    """No symbolic links and no version in a name: a wheel can carry the folder as it is."""
    assert not [path for path in NATIVE_DIR.rglob("*") if path.is_symlink()]
    assert {"libllama", "libllama-common", "libggml", "libggml-base"} <= {
        path.stem for path in native.libraries(NATIVE_DIR)
    }


def test_build_json_lists_the_files_that_are_there(facts):
    """What the build recorded is what lies in the folder."""
    for name, size in facts["files"].items():
        assert (NATIVE_DIR / name).stat().st_size == size


def test_the_chosen_variant_decodes(facts):
    """The self-test, run as the build runs it."""
    chosen = variant.choose(NATIVE_DIR)
    done = run_selftest(NATIVE_DIR, chosen)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_plainest_variant_decodes_too(facts):
    """Without any extension of the CPU the same self-test passes."""
    plain = NATIVE_DIR / "libggml-cpu-x64.so"
    if Platform.here().machine != "x86_64":
        plain = variant.choose(NATIVE_DIR)
    assert run_selftest(NATIVE_DIR, plain).returncode == 0


def test_a_library_that_really_faults_is_passed_over(facts, tmp_path):
    """B20: a best-rated variant that executes an illegal instruction dies alone; the next one is taken."""
    folder = tmp_path / "native"
    copy_tree(NATIVE_DIR, folder)
    compiler = shutil.which("cc")
    assert compiler, "the native build needs a compiler, and so does this test"
    code = tmp_path / "fault.c"
    code.write_text(
        "#include <signal.h>\n"
        "int ggml_backend_score(void) { return 1 << 20; }\n"
        "void *ggml_backend_init(void) { raise(SIGILL); return 0; }\n"
    )
    faulting = folder / "libggml-cpu-faulting.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(faulting)], check=True)
    said = []
    chosen = variant.choose(folder, log=said.append)
    assert said[0] == "CPU variant faulting: died of SIGILL; trying the next"
    assert chosen.name == variant.choose(NATIVE_DIR).name
    again = []
    assert variant.choose(folder, log=again.append) == chosen
    assert again == []


def test_a_truncated_selftest_model_fails_in_words(facts, tmp_path):
    """The self-test says what went wrong instead of crashing."""
    folder = tmp_path / "native"
    copy_tree(NATIVE_DIR, folder)
    model = folder / "selftest.gguf"
    data = model.read_bytes()
    model.unlink()
    model.write_bytes(data[: len(data) // 2])
    done = run_selftest(folder, variant.choose(NATIVE_DIR))
    assert done.returncode == 1
    assert "could not be loaded" in done.stdout


def test_the_selftest_model_is_the_same_everywhere(tmp_path):
    """Two writes give the same bytes."""
    write_selftest_model(tmp_path / "a")
    write_selftest_model(tmp_path / "b")
    assert tree.file_digest(tmp_path / "a") == tree.file_digest(tmp_path / "b")


@pytest.mark.parametrize("name", ["libssl.so.3", "libcrypto.so.3", "libgomp.so.1"])
def test_an_unwanted_linkage_is_refused(name, tmp_path, monkeypatch):
    """B2: a library that got OpenSSL or OpenMP through an option stops the build by name."""
    monkeypatch.setattr(linkage, "needed", lambda _: [name])
    with pytest.raises(BuildError, match=rf"x\.so is linked to {name}"):
        linkage.check_linkage([tmp_path / "x.so"])


def test_a_library_of_ours_that_is_missing_is_named(facts):
    """A folder that lacks a library which another one asks for is refused."""
    with pytest.raises(BuildError, match=r"libllama\.so does not find libggml"):
        linkage.check_linkage([NATIVE_DIR / "libllama.so"])


def test_what_a_dependency_is_linked_to_is_its_own_business(tmp_path):
    """A library whose dependency uses OpenMP (a GPU toolkit's may) does not count as using it."""
    compiler = shutil.which("cc")
    assert compiler, "the native build needs a compiler, and so does this test"
    (tmp_path / "x.c").write_text("int x;\n")

    def link(name, *arguments):
        command = [compiler, "-shared", "-fPIC", "-Wl,--no-as-needed", str(tmp_path / "x.c"), f"-L{tmp_path}"]
        subprocess.run([*command, *arguments, "-o", str(tmp_path / name)], check=True)
        return tmp_path / name

    link("libgomp.so.1", "-Wl,-soname,libgomp.so.1")
    toolkit = link("libtoolkit.so", "-l:libgomp.so.1", "-Wl,-soname,libtoolkit.so")
    ours = link("libours.so", "-ltoolkit", f"-Wl,-rpath-link,{tmp_path}")
    assert "libtoolkit.so" in linkage.needed(ours)
    linkage.check_linkage([ours])
    with pytest.raises(BuildError, match=r"libtoolkit\.so is linked to libgomp"):
        linkage.check_linkage([toolkit])


def test_a_machine_that_cannot_tell_says_so(monkeypatch, tmp_path):
    """Without a tool that lists what a library asks for, the check is not silently left out."""
    monkeypatch.setattr(linkage.shutil, "which", lambda _: None)
    monkeypatch.setattr(linkage.sys, "platform", "linux")
    with pytest.raises(BuildError, match="readelf was not found"):
        linkage.needed(tmp_path / "libx.so")
