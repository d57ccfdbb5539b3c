"""What is read of an answer is what `common_chat_parse` gives for the same text, called directly.

A program of forty lines is compiled against llama-common; nothing of ours lies between it and the parser.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from chat.scenes import FOLDER, ONE_CALL, TOOLS, TWO_CALLS, USER, call, templates, written
from erllama import llama
from erllama.chat.answer import Answer, read_answer
from erllama.chat.prompt import ChatParams
from erllama.errors import InvalidContent
from erllama.llama import ffi

pytestmark = [pytest.mark.model, pytest.mark.slow]

FAMILIES = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "deepseek-ai-DeepSeek-V3.1",
    "Kimi-K2-Instruct",
    "ibm-granite-granite-4.0",
    "openai-gpt-oss-120b",
    "GLM-4.6",
    "Cohere2MoE",
    "google-gemma-4-31B-it",
]
NASTY = call("call1aaaa", "get_weather", city='a "q" \\ </tool_call> {"b": [1]} 🙂\n', n=-17)
MESSAGES = [
    ONE_CALL,
    TWO_CALLS,
    {"role": "assistant", "content": "", "tool_calls": [NASTY]},
    {"role": "assistant", "content": "Plain words, {braces} and <tags>."},
]


@pytest.fixture(scope="module")
def direct_parse(vendor_dir, tmp_path_factory):
    """Cases to what upstream reads of them."""
    libraries = ffi.library().native_dir
    program = tmp_path_factory.mktemp("direct") / "direct_parse"
    folders = ("common", "include", "ggml/include", "vendor")
    subprocess.run(
        [
            *shlex.split(os.environ.get("CXX", "g++")),
            *("-std=c++17", "-O0", "-w", *(f"-I{vendor_dir / folder}" for folder in folders)),
            *(str(Path(__file__).with_name("direct_parse.cpp")), f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
            *("-lllama-common", "-lllama", "-lggml", "-lggml-base", "-pthread", "-o", str(program)),
        ],
        check=True,
    )

    def read(cases):
        lines = "".join(json.dumps(case) + "\n" for case in cases)
        done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return read


def answers(name):
    """Texts that the model of a template writes: calls, content, and each cut in its middle."""
    native = templates(name)
    for message in MESSAGES:
        try:
            _, text = written(native, message)
        except InvalidContent:  # no two calls in one message
            continue
        yield text, False
        for part in (0.25, 0.6, 0.9):
            yield text[: int(len(text) * part)], True


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_read_as_upstream_reads_them(direct_parse, name):
    """Content, reasoning, names and arguments equal upstream's result; what it refuses is an error here."""
    texts = list(answers(name))
    source = {"template": (FOLDER / f"{name}.jinja").read_text(), "bos": "<s>", "eos": "</s>"}
    asked = {**source, "messages": [USER], "tools": TOOLS}
    theirs = direct_parse([{**asked, "text": text, "partial": partial} for text, partial in texts])
    applied = templates(name).apply({"messages": [USER], "tools": TOOLS})
    params = ChatParams(prompt="", prompt_ids=[], applied=applied, tool_names=("get_weather", "get_time"))
    n_calls = 0
    for (text, partial), wanted in zip(texts, theirs, strict=True):
        with llama.ChatParser(applied.parser) as parser:
            if "error" in wanted:
                with pytest.raises(InvalidContent):
                    parser.parse(text, partial=partial)
                continue
            assert as_upstream(parser.parse(text, partial=partial)) == plain(wanted), text
        if partial:
            continue
        n_calls += len(wanted.get("tool_calls", ()))
        for message in (read_answer(params, text, partial=False), streamed(params, text)):
            assert message.content == wanted.get("content", "")
            assert (message.reasoning_content or "") == wanted.get("reasoning_content", "")
            assert [(c.name, c.arguments) for c in message.tool_calls] == [
                (c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in wanted.get("tool_calls", ())
            ]
    assert n_calls


def streamed(params, text):
    """The message of an answer that came a few characters at a time."""
    with Answer(params) as answer:
        for at in range(0, len(text), 5):
            answer.feed(text[at : at + 5])
        return answer.finish(complete=True)[1]


def as_upstream(parsed):
    """The shim's shape as plain tuples."""
    calls = [(c["id"], c["name"], c["arguments"]) for c in parsed["tool_calls"]]
    return parsed["content"], parsed["reasoning_content"], calls


def plain(wanted):
    """Upstream's shape as plain tuples."""
    calls = [
        (c.get("id", ""), c["function"]["name"], c["function"]["arguments"])
        for c in wanted.get("tool_calls", ())
    ]
    return wanted.get("content") or "", wanted.get("reasoning_content", ""), calls
