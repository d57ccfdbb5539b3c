"""Three words planted in a long prompt are found: cold, warm, warm after a kill; the folder is clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

PLANTED = {200: "zebra", 760: "lantern", 1330: "marble"}  # offset in tokens → word

PROGRAM = textwrap.dedent(
    """
    import json, sys, trio, erllama
    from erllama import ContextOptions, DiskTier, SavePolicy

    def planted(model, words, n):
        def tokens(text):
            return model.tokenize(text, add_special=False)
        filler = tokens(" ".join(f"Item {i} costs {i * 7919 % 1000} coins." for i in range(n // 6)))
        prompt = []
        for offset, word in sorted(words.items()):
            prompt += filler[len(prompt) : offset] + tokens(f" Remember the code word {word}. ")
        ask = tokens(" The three code words to remember are")
        return prompt + filler[len(prompt) : n - len(ask)] + ask

    async def main(path, root, words):
        words = {int(offset): word for offset, word in json.loads(words).items()}
        async with erllama.open_engine(tiers=[DiskTier("kv", root)]) as engine:
            model = await engine.load_model(
                path,
                context=ContextOptions(n_threads=1, n_ctx=2048),
                policy=SavePolicy(min_tokens=64, cold_min_tokens=64),
                tier="kv",
            )
            prompt = planted(model, words, 1500)
            for _ in range(2):
                before = model.statistics().n_prefill_tokens
                answer = await model.complete(prompt, max_tokens=16, temperature=0.0)
                n = model.statistics().n_prefill_tokens - before
                said = [answer.generated, answer.cache_hit_kind, answer.cache_source, n, len(prompt)]
                await engine.cache.flush()
                print(json.dumps(said), flush=True)
            async with model.stream([*prompt, *prompt[:100]], max_tokens=300) as events:  # killed here
                async for event in events:
                    print("busy", flush=True)

    trio.run(main, *sys.argv[1:])
    """
)


def test_planted_words_survive_a_kill(smollm2_path: Path, tmp_path: Path) -> None:
    """X1, X3: the same answer each time; nothing is computed again; `kvc verify` finds nothing wrong."""
    answers: list[list[object]] = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(smollm2_path), str(tmp_path), json.dumps(PLANTED)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        ) as child:
            assert child.stdout is not None
            answers += [json.loads(child.stdout.readline()) for _ in range(2)]
            child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        verify = subprocess.run(
            [sys.executable, "-m", "erllama.tools.kvc", "verify", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert verify.returncode == 0, verify.stdout + verify.stderr
    n = answers[0][4]
    assert n == 1500
    how = [tuple(answer[1:4]) for answer in answers]
    assert how == [
        ("cold", None, n - 1),
        ("exact", "live", 0),
        ("exact", "kv", 0),
        ("exact", "live", 0),
    ]
    assert all(answer[0] == answers[0][0] for answer in answers)
