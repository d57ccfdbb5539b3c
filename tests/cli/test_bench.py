"""`erllama bench`: what can be wrong with its arguments, and that it measures."""

from __future__ import annotations

import json

import pytest

from erllama.cli import bench
from erllama.errors import NativeLibraryError


def test_a_workload_that_does_not_exist_is_wrong_usage(erllama_command):
    """Nothing is loaded; the message lists those there are."""
    said = erllama_command("bench", "P99")
    assert said.status == 2
    assert "no workload 'P99'; there are P1, P1b, P2" in said.err


@pytest.mark.parametrize("argument", ["--runs", "--threads"])
def test_counts_start_at_one(erllama_command, argument):
    """Zero runs measure nothing."""
    said = erllama_command("bench", argument, "0")
    assert said.status == 2
    assert f"argument {argument}: at least 1" in said.err


def test_without_the_server_tools_the_command_to_run_is_named(erllama_command, monkeypatch):
    """Before anything is measured."""

    def find_programs():
        raise NativeLibraryError("llama-server not built; run `python build_libllama.py --with-server-tools`")

    monkeypatch.setattr(bench, "find_programs", find_programs)
    said = erllama_command("bench", "P1", "--vs", "llama-server")
    assert said.status == 1
    assert "python build_libllama.py --with-server-tools" in said.err
    assert said.out == ""


@pytest.mark.model
def test_quick_figures_are_printed_and_written(erllama_command, tiny_gguf, tmp_path):
    """A table on stdout, progress on stderr, JSON in the file."""
    file = tmp_path / "b.json"
    said = erllama_command("bench", "p8", "P7", "--quick", "-m", str(tiny_gguf("dense")), "--json", str(file))
    assert said.status == 0
    assert said.out.index("P7  ") < said.out.index("P8  ")
    assert "computed after the edit" in said.out
    assert "Quick sizes: no bar was judged." in said.out
    assert "P8 look-up" in said.err
    assert [w["id"] for w in json.loads(file.read_text())["workloads"]] == ["P7", "P8"]


def test_a_model_that_is_not_there_fails_its_workload(erllama_command, tmp_path):
    """The table says why, and the command ends with 1: what was asked for was not measured."""
    said = erllama_command("bench", "P7", "--quick", "-m", str(tmp_path / "none.gguf"))
    assert said.status == 1
    assert "not measured: " in said.out
    assert "none.gguf" in said.out
