"""System messages where a template takes none; and templates asked whether they do."""

from __future__ import annotations

from functools import partial

import pytest
from chat.scenes import FOLDER
from runtime.chat_scenes import ScriptedChat

from erllama.errors import InvalidContent
from erllama.server.late_system import needs_care, with_reminders
from server.scenes import serving

HEAD = {"role": "system", "content": "Be kind."}
ASK = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Yes?"}
LATE = {"role": "system", "content": "Be short."}
NOTE = "<system-reminder>\nBe short.\n</system-reminder>"


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "made"),
    [
        ([HEAD, ASK], [HEAD, ASK]),
        ([HEAD, LATE, ASK], [{"role": "system", "content": "Be kind.\n\nBe short."}, ASK]),
        ([ASK, LATE], [user(f"Hello\n\n{NOTE}")]),
        ([ASK, SAID, LATE, ASK], [ASK, SAID, user(f"{NOTE}\n\nHello")]),
        ([ASK, SAID, LATE, LATE, ASK], [ASK, SAID, user(f"{NOTE}\n\n{NOTE}\n\nHello")]),
        ([ASK, ASK, LATE], [ASK, user(f"Hello\n\n{NOTE}")]),
        (
            [{"role": "tool", "content": "21", "tool_call_id": "1"}, LATE],
            [{"role": "tool", "content": f"21\n\n{NOTE}", "tool_call_id": "1"}],
        ),
        (
            [
                user([{"type": "text", "text": "a"}]),
                {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            ],
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": NOTE}])],
        ),
    ],
)
def test_late_ones_become_reminders(messages, made):
    """Those at the head are one; the others stay where they are, in what was said before them."""
    given = [dict(message) for message in messages]
    assert with_reminders(given) == made
    assert given == messages


def test_what_is_no_text_is_refused():
    """It is not made into text by force."""
    for content in (None, 5, [{"type": "image"}], ["a"]):
        with pytest.raises(InvalidContent):
            with_reminders([ASK, {"role": "system", "content": content}])


def test_one_at_the_head_needs_nothing():
    """Nor does a conversation without any."""
    assert not needs_care([HEAD, ASK, SAID])
    assert not needs_care([ASK])
    assert needs_care([HEAD, LATE, ASK])
    assert needs_care([ASK, LATE])


@pytest.mark.parametrize("template", sorted(path.stem for path in FOLDER.glob("*.jinja")))
async def test_every_template_reads_an_instruction_that_comes_late(template):
    """As Claude Code sends it: behind the user's message; it is in the prompt, after that message."""
    body = {
        "model": "fake",
        "max_tokens": 5,
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": "The question."},
            {"role": "system", "content": "The late instruction."},
        ],
    }
    async with serving(partial(ScriptedChat, template=template)) as scene:
        reply = await scene.client.post("/v1/messages", json=body)
        if reply.status_code == 501:
            pytest.skip("no chat template that can be used")
        assert reply.status_code == 200, reply.text
        (prompt,) = scene.backends["fake"].prompts
        assert -1 < prompt.find("The question.") < prompt.find("The late instruction.")
        counted = await scene.client.post(
            "/v1/messages/count_tokens", json={k: body[k] for k in body if k != "max_tokens"}
        )
        usage = reply.json()["usage"]
        assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_creation_input_tokens"]


async def test_a_late_instruction_does_not_cost_the_cache():
    """The next turn reuses everything up to its own end, the instruction included."""
    messages = [
        {"role": "user", "content": "The question. " * 20},
        {"role": "system", "content": "Tokens left: 99"},
    ]
    async with serving(partial(ScriptedChat, template="Qwen3.5-4B")) as scene:
        reads = []
        for turn in range(3):
            body = {"model": "fake", "max_tokens": 50, "messages": messages, "system": "Be kind. " * 20}
            reply = (await scene.client.post("/v1/messages", json=body)).json()
            reads.append(reply["usage"]["cache_read_input_tokens"])
            messages = [
                *messages,
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": f"And {turn}?"},
                {"role": "system", "content": f"Tokens left: {turn}"},
            ]
        assert 450 < reads[1] < reads[2]
