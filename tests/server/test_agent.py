"""An agent with tools over ten turns through /v1/messages, with the server started again in the middle."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import anthropic
import pytest

from server.conftest import start_server, stop_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

SYSTEM = "Use the tools. " * 30
CITIES = ("Rome", "Lima", "Oslo", "Cairo", "Paris")
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": list(CITIES)}, "unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["city", "unit"],
        },
    }
]
# SmolLM2's own template knows no tools; this one writes them as many models read them.
TEMPLATE = """{% if tools %}<|im_start|>system
{{ messages[0].content }} Call a tool: <tool_call>
{"name": ..., "arguments": ...}
</tool_call> Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages[1:] %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
N_TURNS, RESTART_AT = 10, 5
SLACK = 127  # tokens behind the last stored block


def question(number: int) -> dict:
    return {"type": "text", "text": f"How is the weather in {CITIES[number % len(CITIES)]}?"}


def called(call_id: str, arguments: dict) -> dict:
    call = {"type": "tool_use", "id": call_id, "name": "get_weather", "input": arguments}
    return {"role": "assistant", "content": [call]}


def answered(call_id: str, text: str, number: int) -> dict:
    result = {"type": "tool_result", "tool_use_id": call_id, "content": text}
    return {"role": "user", "content": [result, question(number)]}


class Agent:
    """Asks, sends back what its tool said, and keeps the books."""

    def __init__(self) -> None:
        self.messages = [{"role": "user", "content": [question(-3)]}]
        for number in (-3, -2, -1):  # so small a model needs examples
            call_id = f"toolu_first{-number:04d}"
            city = {"city": CITIES[number % len(CITIES)], "unit": "celsius"}
            self.messages += [called(call_id, city), answered(call_id, "sun", number + 1)]
        self.reads: list[int] = []
        self.over: list[int] = []  # computed beyond what was new
        self._n_history = 0

    def turn(self, client: anthropic.Anthropic, number: int) -> None:
        """One of them, every other one streamed."""
        choice = {"type": "any", "disable_parallel_tool_use": True}
        asked = {"model": "smol", "system": SYSTEM, "tools": TOOLS, "messages": self.messages}
        asked["tool_choice"] = choice
        options = {"max_tokens": 64, "metadata": {"user_id": "agent"}, "extra_body": {"temperature": 0}}
        if number % 2:
            with client.messages.stream(**asked, **options) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**asked, **options)
        usage = reply.usage
        n_prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        assert client.messages.count_tokens(**asked).input_tokens == n_prompt
        n_new = n_prompt - self._n_history
        self.over.append(n_prompt - usage.cache_read_input_tokens - n_new)
        self.reads.append(usage.cache_read_input_tokens)
        self._n_history = n_prompt + usage.output_tokens
        [call] = [block for block in reply.content if block.type == "tool_use"]
        arguments = dict(sorted(call.input.items(), reverse=True))  # as clients resend: written anew
        self.messages += [called(call.id, arguments), answered(call.id, f"drizzle, {number}", number + 1)]


def test_ten_turns_and_a_restart(smollm2_path, tmp_path: Path):
    """X12: reads grow every turn, also over the restart, and a turn computes what is new and little more."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = tmp_path / "erllama.toml"
    config.write_text(
        f"[models.smol]\npath = '{smollm2_path}'\nchat_template_file = 'template.jinja'\n"
        "context = { n_ctx = 4096, n_threads = 1 }\n"
    )
    agent = Agent()
    for turns in (range(RESTART_AT), range(RESTART_AT, N_TURNS)):
        process, url = start_server("--config", str(config), "--kv-dir", str(tmp_path / "kv"))
        try:
            with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
                for number in turns:
                    agent.turn(client, number)
        finally:
            assert stop_server(process) == 0
    assert agent.reads[0] == 0
    assert all(later > earlier for earlier, later in itertools.pairwise(agent.reads)), agent.reads
    assert all(over <= SLACK for over in agent.over[1:]), agent.over
