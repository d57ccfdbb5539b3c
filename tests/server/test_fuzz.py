"""Requests made up from the server's own OpenAPI document: none of them breaks it, or its promises."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import hypothesis
import pytest
import schemathesis
import trio
from hypothesis import strategies
from runtime.chat_scenes import ScriptedChat

from server.scenes import chat_body, serving

N_EXAMPLES = 10  # of each operation
SETTINGS = hypothesis.settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)
TEXT = {"anyOf": [{"type": "string"}, {"enum": ["Hi", "\u0000", "\ud7ff<|im_end|>", ""]}]}
PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "image", "tool_result"]}, "text": TEXT},
    },
}
CALL = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"enum": ["f", ""]}, "arguments": {"enum": ["{}", '{"a": 1}', "{", {}]}},
            "required": ["name", "arguments"],
        },
    },
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "user", "assistant", "system", "tool"]},
        "content": {"anyOf": [TEXT, PARTS]},
        "tool_calls": {"type": "array", "items": CALL, "maxItems": 2},
        "tool_call_id": TEXT,
    },
    "required": ["role", "content"],
}
TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"const": "f"},
        "function": {
            "type": "object",
            "properties": {"name": {"const": "f"}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
        "input_schema": {"type": "object"},
    },
    "required": ["type", "function"],
}
HELLO = {"role": "user", "content": "Hi"}
GOOD = [
    [HELLO],
    [{"role": "system", "content": "Be kind."}, HELLO, {"role": "assistant", "content": "Yes?"}, HELLO],
]
# Lists that the document leaves open, filled as clients would nearly fill them; and models that are there.
KNOWN = {
    "model": {"const": "fake"},
    "messages": {"anyOf": [{"enum": GOOD}, {"type": "array", "items": MESSAGE, "maxItems": 3}]},
    "tools": {"type": "array", "items": TOOL, "maxItems": 2},
}


def document_with(document: dict, known: dict) -> dict:
    """The document with those properties of every body."""
    made = json.loads(json.dumps(document))
    for schema in made["components"]["schemas"].values():
        schema.get("properties", {}).update(
            {name: value for name, value in known.items() if name in schema.get("properties", {})}
        )
    return made


def _required(document: dict, operation) -> tuple[str, ...]:
    """Fields that make the smallest body."""
    body = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    return (*document["components"]["schemas"][name].get("required", ()), "messages", "prompt")


CHECKS = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


def ask_everything(url: str, document: dict) -> tuple[Counter, list[str]]:
    """Statuses by operation, and what was wrong."""
    statuses, wrong = Counter(), []
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        required = _required(document, operation) if "requestBody" in operation.definition.raw else ()
        _ask(url, operation, required, statuses, wrong)
    return statuses, wrong


def _ask(url: str, operation, required: tuple[str, ...], statuses: Counter, wrong: list[str]) -> None:
    documented = operation.definition.raw["responses"]
    checks = [schemathesis.checks.CHECKS.get_one(name) for name in CHECKS]

    @SETTINGS
    @hypothesis.given(case=operation.as_strategy(), n_more=strategies.integers(0, 5))
    def check(case, n_more):
        if required and isinstance(case.body, dict) and n_more < 5:  # few fields at once are often taken
            more = [name for name in case.body if name not in required][:n_more]
            case.body = {name: case.body[name] for name in case.body if name in (*required, *more)}
        reply = case.call(base_url=url, timeout=60)
        statuses[operation.label, reply.status_code] += 1
        told = f"{case.as_curl_command()} -> {reply.status_code} {reply.text[:300]}"
        if reply.status_code >= 500 and str(reply.status_code) not in documented:
            wrong.append(told)
        try:
            case.validate_response(reply, checks=checks)
        except BaseExceptionGroup as group:  # schemathesis has one of its own
            wrong.append(f"{told}: {[str(why) for why in group.exceptions]}")

    check()


@pytest.mark.slow
async def test_no_request_of_the_document_breaks_the_server():
    """No 5xx but the 501 that stands there, no undocumented status, type or shape; and it still answers."""
    # As clients write them, and as the document alone has them.
    for known in (KNOWN, {}):
        async with serving(partial(ScriptedChat, says="Hi"), within_s=200) as scene:
            document = (await scene.client.get("/openapi.json")).json()
            ask = partial(ask_everything, scene.url, document_with(document, known))
            statuses, wrong = await trio.to_thread.run_sync(ask)
            assert not wrong, "\n".join(wrong[:5])
            assert (await scene.client.post("/v1/chat/completions", json=chat_body())).status_code == 200
            await scene.wait_idle()
        if known:
            answered = {operation for operation, status in statuses if status == 200}
            for path in (
                "/v1/chat/completions",
                "/v1/messages",
                "/api/chat",
                "/v1/completions",
                "/v1/responses",
            ):
                assert f"POST {path}" in answered, f"{path} was never asked anything that it could answer"
