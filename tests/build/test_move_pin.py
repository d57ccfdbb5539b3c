"""Moving the pin: from an archive to a report, a new pin.toml, and a way back."""

from __future__ import annotations

import io
import tarfile

import pytest

from tools import move_pin
from tools.libllama import tree
from tools.libllama.pin import Pin, read_pin


def make_archive(path, headers, *, commit=None):
    """An archive as the index serves it: upstream's tree below the package's folder."""
    stem = path.name.removesuffix(".tar.gz")
    files = {f"vendor/llama.cpp/{name}": text.encode() for name, text in headers.items()}
    if commit:
        files[".git/modules/vendor/llama.cpp/HEAD"] = f"{commit}\n".encode()
    with tarfile.open(path, "w:gz") as bundle:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(data)
            bundle.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch, pin, cache):
    """A project whose pin is the tiny archive, and an index that serves version 2.0 of it."""
    pin_file = tmp_path / "pin.toml"
    pin_file.write_text(pin.to_toml())
    served = make_archive(
        tmp_path / "tiny-2.0.tar.gz",
        {"include/llama.h": "void llama_free(int x);\n", "CMakeLists.txt": "project(tiny)\n"},
        commit="f" * 40,
    )

    def download(asked, folder, _progress, _lock):
        assert (asked.version, asked.sha256) == ("2.0", "")
        return served.rename(folder / served.name)

    monkeypatch.setattr("tools.libllama.fetch.download", download)
    monkeypatch.setattr(move_pin, "PIN_FILE", pin_file)
    monkeypatch.setattr(move_pin, "read_pin", lambda: read_pin(pin_file))
    monkeypatch.setattr(move_pin, "used_names", lambda _: ["llama_x", "llama_free"])
    monkeypatch.setattr(move_pin, "remove_sources", lambda _: None)
    return pin_file


class Commands:
    """Takes the place of the build and of the tests."""

    def __init__(self, monkeypatch, *ends):
        self.run, self.ends = [], list(ends)
        monkeypatch.setattr(move_pin.subprocess, "run", self)

    def __call__(self, command, **_):
        self.run.append(command[1:])
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return type("Done", (), {"returncode": end})


def test_a_report_changes_nothing(here, capsys):
    """--report says what is gone and leaves the pin."""
    before = here.read_text()
    assert move_pin.main(["2.0", "--report"]) == 0
    out = capsys.readouterr().out
    assert "GONE     llama_x" in out
    assert f'commit = "{"f" * 40}"' in out
    assert here.read_text() == before


def test_the_pin_moves_and_all_tests_run(here, monkeypatch, capsys, cache):
    """B1: the new pin names the archive's digest, tree and commit; then the build, then every test."""
    commands = Commands(monkeypatch, 0, 0)
    assert move_pin.main(["2.0"]) == 0
    assert commands.run == [["build_libllama.py"], ["-m", "pytest"]]
    moved = read_pin(here)
    assert (moved.version, moved.archive, moved.commit) == ("2.0", "tiny-2.0.tar.gz", "f" * 40)
    assert moved.sha256 == tree.file_digest(cache / "downloads" / "tiny-2.0.tar.gz")
    assert "tests pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ([3], 3, "failed: build_libllama.py"),
        ([0, 1], 1, "failed: -m pytest"),
        ([KeyboardInterrupt()], 130, "was interrupted: build_libllama.py"),
        ([0, 130], 130, "was interrupted: -m pytest"),
    ],
)
def test_what_goes_wrong_after_the_move_tells_the_way_back(here, monkeypatch, capsys, ends, code, words):
    """A failed build or test, and Ctrl-C in either, is two lines: what happened, and how to go back."""
    Commands(monkeypatch, *ends)
    assert move_pin.main(["2.0"]) == code
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [f"The pin is moved, but this {words}", move_pin._WAY_BACK]


def test_an_archive_without_llama_cpp_is_refused(here, tmp_path, monkeypatch, capsys):
    """A version that holds no such tree leaves the pin, and says so."""
    before = here.read_text()
    other = make_archive(tmp_path / "tiny-2.0.tar.gz", {"readme": "nothing"})
    monkeypatch.setattr(
        "tools.libllama.fetch.download", lambda _a, folder, _p, _l: other.rename(folder / other.name)
    )
    assert move_pin.main(["2.0"]) == 1
    assert "holds no llama.cpp" in capsys.readouterr().err
    assert here.read_text() == before


def test_an_archive_without_its_git_folder_has_no_known_commit(tmp_path, pin):
    """Upstream's commit is a courtesy of the archive, not a need."""
    archive = make_archive(tmp_path / "tiny-2.0.tar.gz", {"include/llama.h": ""})
    assert move_pin._commit(archive, Pin(**{**pin.as_dict(), "version": "2.0"})) == "unknown"


def test_a_cache_that_is_a_file_is_a_sentence(here, cache, capsys, monkeypatch, tmp_path):
    """ERLLAMA_CACHE_DIR names a file: one sentence, and the pin stays."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ERLLAMA_CACHE_DIR", str(tmp_path / "file"))
    before = here.read_text()
    assert move_pin.main(["2.0"]) == 1
    assert "a file is where a folder has to be" in capsys.readouterr().err
    assert here.read_text() == before


def test_ctrl_c_before_the_move(here, monkeypatch, capsys):
    """An interrupted download is one line, and the pin is where it was."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(move_pin, "fetch", interrupted)
    assert move_pin.main(["2.0"]) == 130
    assert "the pin is where it was" in capsys.readouterr().err
