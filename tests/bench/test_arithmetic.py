"""The model that computes nothing, here and behind HTTP."""

from __future__ import annotations

import pytest

from erllama.bench.arithmetic import open_behind_http, open_here
from erllama.bench.over_http import _token
from erllama.bench.settings import Settings
from erllama.bench.workload import Found


@pytest.mark.slow
async def test_both_sides_do_the_same_work(tmp_path):
    """The tokens asked for, each in a piece of its own, whoever is asked; and what HTTP adds is told."""
    settings = Settings(model=tmp_path, folder=tmp_path, n_threads=1, n_runs=1, quick=True)
    async with open_here() as own, open_behind_http(settings, own.banned) as server:
        for side in (own, server):
            answer = await side.ask([65] * 20, 30, cache=False)
            assert (answer.n_prompt, answer.n_generated, len(answer.times)) == (20, 30, 30)
        assert 0 < await server.cpu_s() < 60
    found = Found()
    await _token(settings, found)
    (figure,) = found.figures
    assert figure.name == "CPU of HTTP, a streamed token"
    assert -10 < figure.ours.median < 10  # of so few tokens, less than what the two sides differ by anyway
