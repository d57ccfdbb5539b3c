"""`erllama generate` is warm between runs: what one run has read, the next one finds on disk."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from erllama.cli import kept
from erllama.files import cache_dir
from erllama.tools.kvc import main as kvc

from .conftest import on_terminal, start

PROMPT = "The keeper writes down who comes and goes, and what the weather was like. " * 12
GREEDY = ("--max-tokens", "4", "--temperature", "0", "--stats")


def reused(err: str) -> tuple[int, int]:
    """Prompt tokens, and how many of them came from the cache, out of the line of `--stats`."""
    found = re.search(r"prompt (\d+) tokens \((\d+) from the cache", err)
    assert found is not None, err
    return int(found[1]), int(found[2])


@pytest.fixture
def generate(erllama_command, smollm2_path):
    """Run it greedily on a prompt of some hundred tokens."""

    def run(*more: str, prompt: str = PROMPT):
        return erllama_command("generate", "-m", str(smollm2_path), "-p", prompt, *GREEDY, *more)

    return run


@pytest.mark.model
@pytest.mark.slow
def test_the_second_run_is_warm(generate):
    """Same answer, one token computed; a longer prompt computes what is new. Folder 0700, files 0600."""
    cold, warm = generate(), generate()
    n_prompt, n_cold = reused(cold.err)
    assert n_prompt > 150
    assert n_cold == 0
    assert reused(warm.err) == (n_prompt, n_prompt - 1)
    assert warm.out == cold.out
    n_longer, n_reused = reused(generate(prompt=f"{PROMPT} Then the fog came.").err)
    assert n_reused >= n_prompt - 2  # the prompt's last space may join the next word
    assert n_longer > n_prompt
    folder = cache_dir() / "kv"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list((folder / "nodes").iterdir())
    assert files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert kvc(["verify", str(folder)]) == 0


@pytest.mark.model
@pytest.mark.slow
def test_no_cache_keeps_and_reads_nothing(generate):
    """`--no-cache`: no folder, and what others kept is not used."""
    assert reused(generate("--no-cache").err)[1] == 0
    assert not (cache_dir() / "kv").exists()
    generate()
    assert reused(generate("--no-cache").err)[1] == 0


@pytest.mark.model
@pytest.mark.slow
def test_a_folder_and_a_budget_of_ones_own(generate, tmp_path):
    """`--kv-dir` is where it is kept, `--kv-max` how much: too small for a block, nothing is."""
    own = str(tmp_path / "mine")
    generate("--kv-dir", own)
    assert not (cache_dir() / "kv").exists()
    assert reused(generate("--kv-dir", own, "--kv-max", "1G").err)[1] > 0
    small = str(tmp_path / "small")
    generate("--kv-dir", small, "--kv-max", "10k")
    assert reused(generate("--kv-dir", small, "--kv-max", "10k").err)[1] == 0


@pytest.mark.model
@pytest.mark.slow
def test_two_runs_at_once_share_the_folder(generate, smollm2_path):
    """Started together, both answer alike, and leave a clean folder that the third finds warm."""
    command = ("generate", "-m", str(smollm2_path), "-p", PROMPT, *GREEDY)
    running = [start(*command) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0][0] == said[1][0]
    assert kvc(["verify", str(cache_dir() / "kv")]) == 0
    n_prompt, n_reused = reused(generate().err)
    assert n_reused == n_prompt - 1


@pytest.mark.model
@pytest.mark.slow
def test_a_folder_that_cannot_be_used_costs_a_warning(generate, tmp_path):
    """A file where the folder should be: a line on stderr, the answer as ever."""
    (tmp_path / "file").write_text("")
    said = generate("--kv-dir", str(tmp_path / "file" / "kv"))
    assert said.status == 0
    assert said.out.strip()
    warning, stats = said.err.splitlines()
    assert warning.startswith("erllama: nothing is kept between runs: ")
    assert reused(stats)[1] == 0


@pytest.mark.model
@pytest.mark.slow
def test_a_terminal_is_told_what_came_from_the_cache(smollm2_path):
    """Without `--stats`, on a terminal: one line at the end."""
    _, _, shown = on_terminal("generate", "-m", str(smollm2_path), "-p", "Once", "--max-tokens", "2")
    assert shown.splitlines()[-1].endswith(b"0 of 1 prompt tokens came from the cache")


def test_a_folder_without_permission_is_none(tmp_path, monkeypatch, caplog):
    """A folder that may not be written: no tier and a warning; one that holds nodes is still read."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may do anything
    assert kept.kept_tiers(str(tmp_path)) == []
    assert "cannot be written" in caplog.text
    (tmp_path / "nodes").mkdir()
    assert [tier.root for tier in kept.kept_tiers(str(tmp_path))] == [str(tmp_path)]


def test_the_default_budget_leaves_room_on_the_disk(tmp_path, monkeypatch):
    """4 GiB, but never more than a quarter of what is free; a budget given is a budget kept."""
    for free, expected in ((100 << 30, 4 << 30), (8 << 30, 2 << 30)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        assert kept.kept_tiers(str(tmp_path))[0].max_bytes == expected
        assert kept.kept_tiers(str(tmp_path), 5 << 30)[0].max_bytes == 5 << 30


def test_a_home_folder_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    """`~` in `--kv-dir` is the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.kept_tiers("~/kv")[0].root == str(Path(tmp_path) / "kv")
