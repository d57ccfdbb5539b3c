"""P2: cold prefill."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .figure import Bar, against
from .llama_bench import bench_prefill
from .own import Own, open_own
from .spread import take_turns
from .workload import Found, Workload

if TYPE_CHECKING:
    from .settings import Settings

BAR = Bar(">=", 0.98)


async def measure(settings: Settings, found: Found) -> None:
    """One request at a time, first token included; llama-bench computes the same number of tokens."""
    lengths = settings.pick((512, 2048, 6000), (96, 192))
    for type_kv in ("f16", "q8_0"):
        with_kv = settings.with_kv(type_kv)
        async with open_own(with_kv, n_ctx=max(lengths) + 64) as own:
            for n in lengths:
                settings.say(f"{n} tokens, {type_kv}")
                sides = [partial(_ours, own, n)]
                if settings.programs is not None:
                    sides.append(partial(_theirs, with_kv, n))
                rates = await take_turns(settings.runs(5 if n < 4000 else 2), *sides, warm_up=n < 1000)
                await found.add(
                    against(
                        f"{n} tokens, {type_kv} KV",
                        "tokens/s",
                        rates[0],
                        rates[1] if len(rates) > 1 else [],
                        "llama-bench",
                        BAR,
                        at=n,
                    )
                )


async def _ours(own: Own, n: int, run: int) -> float:
    answer = await own.ask(own.prompts.prompt(n, run), 1, cache=False)
    return n / answer.first_token_s


async def _theirs(settings: Settings, n: int, run: int) -> float:
    return await bench_prefill(settings, n)


PREFILL = Workload(
    id="P2",
    title="cold prefill",
    compared=(
        "tokens/s until the first token, through the API and with the prompt's last token as a step of its "
        "own, against llama-bench's prompt processing of as many tokens"
    ),
    measure=measure,
)
