"""Conversations stay warm: what was sampled is the history, also resent by clients that write it anew."""

from __future__ import annotations

import json

import pytest
import trio
from chat.scenes import FOLDER

import erllama

pytestmark = [pytest.mark.model, pytest.mark.slow]

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "hour": {"enum": ["morning", "evening"]}},
    "required": ["city", "hour"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Tells about a place.", "parameters": PLACE},
    }
    for name in ("get_weather", "get_traffic")
]
SLACK = 127  # tokens behind the last stored block, and of an answer that was written anew


def resent(message):
    """The answer as a client sends it that decodes arguments and writes them in another order."""
    plain = message.to_dict()
    for made in plain.get("tool_calls", ()):
        arguments = json.loads(made["function"]["arguments"])
        made["function"]["arguments"] = json.dumps(dict(sorted(arguments.items(), reverse=True)), indent=None)
    return plain


async def test_turns_with_tools_and_a_restart(smollm2_path, tmp_path):
    """X12: every turn computes its new message and little more, before and after a restart."""
    template = (FOLDER / "meta-llama-Llama-3.2-3B-Instruct.jinja").read_text()
    messages = [{"role": "system", "content": "Use the tools."}]
    over: list[int] = []  # what was computed beyond what the history did not hold
    n_history = 0

    async def ask(model, **options):
        nonlocal n_history
        answer = await model.chat(messages, tools=TOOLS, temperature=0.7, seed=1, max_tokens=48, **options)
        over.append(answer.stats.n_computed - (answer.stats.n_prompt - n_history))
        n_history = answer.committed_tokens
        messages.append(resent(answer.message))
        results = [
            {"role": "tool", "tool_call_id": c.id, "content": "Fine."} for c in answer.message.tool_calls
        ]
        messages.extend(results)
        return bool(results)

    async def turns(numbers):
        async with erllama.open_engine(
            tiers=[erllama.DiskTier("kv", str(tmp_path / "kv"), 1 << 30)]
        ) as engine:
            model = await engine.load_model(
                smollm2_path,
                context=erllama.ContextOptions(n_ctx=4096, n_threads=1),
                policy=erllama.SavePolicy(min_tokens=64, cold_min_tokens=64),
                tier="kv",
                chat_template=template,
            )
            brace = model.tokenize("{", add_special=False)[0]
            for number in numbers:
                messages.append({"role": "user", "content": f"Question {number}: how are things in Oslo?"})
                called = await ask(
                    model, tool_choice="required", parallel_tool_calls=False, logit_bias={brace: 14.0}
                )
                if called:
                    await ask(model, tool_choice="none")

    with trio.fail_after(120):
        await turns(range(2))
        n_before = len(over)
        await turns(range(2, 4))
    assert sum(bool(message.get("tool_calls")) for message in messages) >= 2
    assert over.pop(n_before) < 256  # after a restart: from the last whole block on
    assert max(over[1:]) <= SLACK, over


async def test_answers_are_found_in_the_tokens_that_were_sampled(smollm2_path):
    """Text that the tokenizer would cut otherwise: the ids of the history are those that were sampled."""
    policy = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16)
    async with erllama.open_engine() as engine:
        options = erllama.ContextOptions(n_ctx=2048, n_threads=1)
        model = await engine.load_model(smollm2_path, context=options, policy=policy)
        messages = [{"role": "user", "content": "Say something strange."}]
        letters = "abcdefgh" * 8
        grammar = "root ::= " + " ".join(f'"{letter}"' for letter in letters)
        bias = {token: 20.0 for letter in set(letters) for token in model.tokenize(letter, add_special=False)}
        first = await model.chat(messages, grammar=grammar, temperature=0.0, logit_bias=bias)
        messages += [first.message, {"role": "user", "content": "And again?"}]
        second = await model.chat(messages, max_tokens=4)
        rendered = await model.render_chat_template(messages)
    assert first.reply == letters
    n_history = len(first.context_tokens) - 1  # the model may end its turn in another way than the template
    assert rendered[:n_history] != first.context_tokens[:-1], "the tokenizer cuts as the model did: no test"
    assert second.context_tokens[:n_history] == first.context_tokens[:-1]
    assert second.stats.n_computed <= second.stats.n_prompt - n_history + 2
