"""Choosing a CPU library: by running it, best first, remembered, and never twice the one that faults."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

import pytest

from erllama.errors import NativeLibraryError
from erllama.llama import variant
from erllama.llama.variant import Outcome

OK = Outcome(0, "")


class Children:
    """Stands in for the child processes: scores and fates by variant name."""

    def __init__(self, scores, fates=None):
        self.scores, self.fates, self.tried = scores, fates or {}, []

    def __call__(self, command):
        name = command[-1].rsplit("/", 1)[-1].removeprefix("libggml-cpu").removesuffix(".so").lstrip("-")
        if "--score" in command:
            return Outcome(0, f"{self.scores[name]}\n")
        self.tried.append(name)
        return self.fates.get(name, OK)


@pytest.fixture
def native(tmp_path):
    """A native folder with four CPU libraries, as far as their names go."""
    folder = tmp_path / "native"
    folder.mkdir()
    for name in ("x64", "haswell", "zen4", "sapphirerapids"):
        (folder / f"libggml-cpu-{name}.so").touch()
    (folder / "libggml-base.so").touch()
    (folder / "build.json").write_text(json.dumps({"stamp": "one"}))
    return folder


SCORES = {"x64": 1, "haswell": 8, "zen4": 64, "sapphirerapids": 0}


def test_takes_the_best_rated_that_runs(native):
    """The best rated library is tried first, and one that works ends the search."""
    children = Children(SCORES)
    assert variant.choose(native, run=children).name == "libggml-cpu-zen4.so"
    assert children.tried == ["zen4"]


def test_what_does_not_apply_is_never_run(native):
    """A rating of 0 means that the CPU lacks a feature: such a library is not even tried."""
    children = Children(SCORES, dict.fromkeys(SCORES, Outcome(1, "no")))
    with pytest.raises(NativeLibraryError):
        variant.choose(native, run=children)
    assert children.tried == ["zen4", "haswell", "x64"]


@pytest.mark.parametrize("fault", [signal.SIGILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_faulting_variant_leads_to_the_next(native, fault):
    """B20: a library that kills its process (AMX promised, not delivered) is passed over, and said so."""
    said = []
    children = Children({**SCORES, "sapphirerapids": 999}, {"sapphirerapids": Outcome(-fault, "")})
    assert variant.choose(native, run=children, log=said.append).name == "libggml-cpu-zen4.so"
    assert f"died of {fault.name}" in said[0]


def test_a_variant_that_computes_nonsense_leads_to_the_next(native):
    """A self-test that fails without a crash counts the same."""
    children = Children(SCORES, {"zen4": Outcome(1, "a logit is not finite\n")})
    assert variant.choose(native, run=children).name == "libggml-cpu-haswell.so"


def test_no_variant_that_runs_is_an_error_with_all_reasons(native):
    """When nothing runs, the error tells what each one died of."""
    fates = {name: Outcome(-signal.SIGILL, "") for name in SCORES}
    with pytest.raises(NativeLibraryError, match="zen4: died of SIGILL; haswell: died of SIGILL"):
        variant.choose(native, run=Children(SCORES, fates))


def test_the_choice_is_remembered_per_cpu_and_build(native, monkeypatch):
    """The second start runs no child; another CPU or another build starts over."""
    variant.choose(native, run=Children(SCORES, {"zen4": Outcome(-4, "")}))

    def never(command):
        pytest.fail(f"ran {command}")

    assert variant.choose(native, run=never).name == "libggml-cpu-haswell.so"
    (native / "build.json").write_text(json.dumps({"stamp": "two"}))
    assert variant.choose(native, run=Children(SCORES)).name == "libggml-cpu-zen4.so"
    monkeypatch.setattr(variant, "cpu_identity", lambda: "another")
    assert variant.choose(native, run=Children({**SCORES, "zen4": 0})).name == "libggml-cpu-haswell.so"


def test_the_build_tries_again_what_is_remembered(native):
    """`fresh` ends the build with a real decode, whatever an earlier one found."""
    variant.choose(native, run=Children(SCORES, {"zen4": Outcome(-4, "")}))
    assert variant.choose(native, fresh=True, run=Children(SCORES)).name == "libggml-cpu-zen4.so"


def test_a_remembered_variant_that_is_gone_is_searched_anew(native):
    """A remembered name without its file does not count."""
    variant.choose(native, run=Children(SCORES))
    (native / "libggml-cpu-zen4.so").unlink()
    assert variant.choose(native, run=Children(SCORES)).name == "libggml-cpu-haswell.so"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"variant": 7}', '{"variant": "../../etc"}'])
def test_a_damaged_memory_is_searched_anew(native, cache, damage):
    """A half-written or foreign memory file is no answer."""
    variant.choose(native, run=Children(SCORES))
    (memory,) = (cache / "variants").iterdir()
    memory.write_text(damage)
    assert variant.choose(native, run=Children(SCORES)).name == "libggml-cpu-zen4.so"


def test_a_cache_folder_that_cannot_be_written_only_costs_time(native, cache):
    """Without a place to remember, the choice is still made, and nothing is left behind."""
    cache.write_text("a file where the folder should be")
    assert variant.choose(native, run=Children(SCORES)).name == "libggml-cpu-zen4.so"


def test_the_environment_overrides(native, monkeypatch, tmp_path):
    """ERLLAMA_CPU_VARIANT names a variant or a file; a name that is neither lists those there are."""
    monkeypatch.setenv(variant.OVERRIDE, "x64")
    assert variant.choose(native).name == "libggml-cpu-x64.so"
    other = tmp_path / "libggml-cpu-own.so"
    other.touch()
    monkeypatch.setenv(variant.OVERRIDE, str(other))
    assert variant.choose(native) == other
    monkeypatch.setenv(variant.OVERRIDE, "zen5")
    with pytest.raises(NativeLibraryError, match=r"zen5 .*zen4"):
        variant.choose(native)


def test_a_build_without_variants_has_one_candidate(tmp_path):
    """A native build's single library is tried like any other; no library at all is None."""
    (tmp_path / "libggml-cpu.so").touch()
    assert variant.choose(tmp_path, run=Children({"": 1})).name == "libggml-cpu.so"
    (tmp_path / "libggml-cpu.so").unlink()
    assert variant.choose(tmp_path, run=Children({})) is None


@pytest.mark.slow
def test_a_library_that_really_executes_an_illegal_instruction(tmp_path):
    """The real children: a compiled library rated highest dies of SIGILL, and its reason is told."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the native build needs a compiler, and so does this test"
    code = tmp_path / "fault.c"
    code.write_text(
        "#include <signal.h>\n"
        "int ggml_backend_score(void) { return 1 << 20; }\n"
        "__attribute__((constructor)) static void nothing(void) {}\n"
    )
    faulting = tmp_path / "libggml-cpu-faulting.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(faulting)], check=True)
    assert variant.rank({"faulting": faulting}, variant._run) == ["faulting"]
    code.write_text("#include <signal.h>\nint ggml_backend_score(void) { raise(SIGILL); return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(faulting)], check=True)
    command = [variant.sys.executable, str(variant._SELFTEST), "--score", str(faulting)]
    assert variant._run(command).reason == "died of SIGILL"
    assert variant.rank({"faulting": faulting}, variant._run) == []


def test_every_way_to_die_has_words():
    """Real-time signals have no name in Python, and a reason all the same."""
    assert variant.Outcome(-40, "").reason == "died of signal 40"
    assert variant.Outcome(-11, "").reason == "died of SIGSEGV"
