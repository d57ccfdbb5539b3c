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


class Dialogue:
    """A conversation with tools; `over` is what each turn computed beyond its new messages."""

    def __init__(self, path, folder, max_tokens):
        self.path, self.folder, self.max_tokens = path, folder, max_tokens
        self.messages = [{"role": "system", "content": "Use the tools."}]
        self.over: list[int] = []
        self.n_calls = 0
        self._n_history = 0

    async def turns(self, numbers):
        """Ask these questions in an engine of their own, whose files are those of the others."""
        tiers = [erllama.DiskTier("kv", str(self.folder / "kv"), 1 << 30)]
        async with erllama.open_engine(tiers=tiers) as engine:
            model = await engine.load_model(
                self.path,
                context=erllama.ContextOptions(n_ctx=4096, n_threads=1),
                policy=erllama.SavePolicy(min_tokens=64, cold_min_tokens=64),
                tier="kv",
                chat_template=(FOLDER / "meta-llama-Llama-3.2-3B-Instruct.jinja").read_text(),
            )
            brace = model.tokenize("{", add_special=False)[0]
            for number in numbers:
                self.messages.append({"role": "user", "content": f"Question {number}: how is Oslo?"})
                if await self._ask(
                    model, tool_choice="required", parallel_tool_calls=False, logit_bias={brace: 14.0}
                ):
                    await self._ask(model, tool_choice="none")

    async def _ask(self, model, **options):
        answer = await model.chat(
            self.messages, tools=TOOLS, temperature=0.7, seed=1, max_tokens=self.max_tokens, **options
        )
        self.over.append(answer.stats.n_computed - (answer.stats.n_prompt - self._n_history))
        self._n_history = answer.committed_tokens
        calls = answer.message.tool_calls
        results = [{"role": "tool", "tool_call_id": c.id, "content": "Fine."} for c in calls]
        self.messages += [resent(answer.message), *results]
        self.n_calls += len(calls)
        return bool(calls)


async def test_turns_with_tools_and_a_restart(smollm2_path, tmp_path):
    """X12: every turn computes its new message and little more, before and after a restart."""
    await check_turns(smollm2_path, tmp_path, 10, 40)


async def test_turns_with_tools_and_a_restart_on_a_sliding_window(gemma_path, tmp_path):
    """The same where memory has a window, which can be cut nowhere but at what was kept."""
    await check_turns(gemma_path, tmp_path, 4, 56)


async def check_turns(path, folder, n_turns, max_tokens):
    """Half of the turns, a restart, the others."""
    dialogue = Dialogue(path, folder, max_tokens)
    with trio.fail_after(500):
        await dialogue.turns(range(n_turns // 2))
        await dialogue.turns(range(n_turns // 2, n_turns))
    assert dialogue.n_calls >= n_turns // 2
    assert max(dialogue.over[1:]) <= SLACK, dialogue.over


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


# Answers of earlier turns come with other spaces than the model wrote.
SPACED = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | replace(' ', '  ') if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("warmed", [False, True])
async def test_an_answer_that_is_written_otherwise_can_be_computed_ahead(smollm2_path, warmed):
    """The guide's advice: `warm` with the answer, rendered as history."""
    policy = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16)
    async with erllama.open_engine() as engine:
        options = erllama.ContextOptions(n_ctx=2048, n_threads=1)
        model = await engine.load_model(smollm2_path, context=options, policy=policy, chat_template=SPACED)
        messages = [{"role": "user", "content": "Tell a long story of a fox."}]
        answer = await model.chat(messages, temperature=0.0, max_tokens=120)
        messages.append(answer.message)
        if warmed:
            await model.warm(messages, add_generation_prompt=False)
        messages.append({"role": "user", "content": "Go on."})
        stats = (await model.chat(messages, max_tokens=2)).stats
    assert answer.reply.count(" ") > 40
    assert (stats.n_computed <= 24) == warmed, stats


# Opens a thinking block, and leaves it out of what is history.
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.mark.parametrize("kind", ["dense", "window", "recurrent", "hybrid"])
async def test_thinking_that_the_history_lacks_costs_its_turn_only(tiny_gguf, kind):
    """FAULTS: only the last answer is computed again; where memory cannot be cut, some of its block too."""
    policy = erllama.SavePolicy(min_tokens=16, cold_min_tokens=16, block_tokens=64)
    slack = 8 if kind == "dense" else 64 + 8  # what is kept at the prompt's end ends behind <think>
    async with erllama.open_engine() as engine:
        options = erllama.ContextOptions(n_ctx=4096, n_threads=1)
        model = await engine.load_model(tiny_gguf(kind), context=options, policy=policy, chat_template=THINKS)
        messages = [{"role": "system", "content": "Be brief. " * 40}]
        n_before = n_thinking = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn}?" + " Please." * 20})
            answer = await model.chat(messages, thinking_budget_tokens=8, max_tokens=40, seed=turn)
            stats = answer.stats
            if turn:
                assert stats.n_computed <= stats.n_prompt - n_before + slack, (turn, stats)
            n_before = stats.n_prompt
            n_thinking += bool(answer.message.reasoning_content)
            messages.append(answer.message)
    assert n_thinking
