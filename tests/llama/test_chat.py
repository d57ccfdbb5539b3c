"""llama-common behind JSON: what it gives, what it refuses; nothing gets across but typed errors."""

from __future__ import annotations

import json
import logging
import random
import threading
from contextlib import suppress

import psutil
import pytest

from erllama import llama
from erllama.errors import HandleClosed, InvalidContent, InvalidGrammar, NativeError
from llama.support import run_python

pytestmark = pytest.mark.model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def chatml():
    """A plain template, without a model."""
    with llama.ChatTemplates.of_text(CHATML) as templates:
        yield templates


def test_a_template_without_a_model(chatml):
    """It renders, and says what it can."""
    applied = chatml.apply({"messages": [USER]})
    assert applied.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert applied.generation_prompt == "<|im_start|>assistant\n"
    assert chatml.source == CHATML
    assert chatml.is_explicit
    assert chatml.caps["supports_tools"] is False


def test_a_models_own_template(smollm2):
    """C1: the GGUF's template, with the model's own tokens."""
    with llama.ChatTemplates.of_model(smollm2) as templates:
        prompt = templates.apply({"messages": [USER]}).prompt
        assert templates.is_explicit
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_without_a_template(gemma):
    """ChatML takes its place, and that can be seen."""
    with llama.ChatTemplates.of_model(gemma) as templates:
        assert not templates.is_explicit
    with llama.ChatTemplates.of_model(gemma, CHATML) as templates:
        assert templates.is_explicit


@pytest.mark.parametrize("n", [0, 4095, 4096, 4097, 1 << 20])
def test_long_messages_are_complete(chatml, n):
    """C2: whatever their length, the last characters are in the prompt."""
    prompt = chatml.apply({"messages": [{"role": "user", "content": "ü" * n + "end"}]}).prompt
    assert prompt.count("ü") == n
    assert prompt.endswith("end<|im_end|>\n<|im_start|>assistant\n")


def test_nul_characters_are_characters(chatml):
    """In messages; a template cannot have any."""
    assert "a\0b" in chatml.apply({"messages": [{"role": "user", "content": "a\0b"}]}).prompt
    with pytest.raises(InvalidContent, match="NUL"):
        llama.ChatTemplates.of_text("a\0b")


@pytest.mark.parametrize(
    "text", ["", "  ", "{% for %}", "{{ x(", "{% endfor %}", "x" * (2 << 20), "(" * 1000]
)
def test_templates_that_cannot_be_parsed(text):
    """The reason is llama-common's, in a typed error."""
    with pytest.raises(InvalidContent, match="template"):
        llama.ChatTemplates.of_text(text)


BAD_INPUTS = [
    {},
    {"messages": "x"},
    {"messages": [1]},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": 1, "content": "x"}]},
    {"messages": [{"role": "user", "content": 1}]},
    {"messages": [{"role": "user", "content": [{}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]},
    {"messages": [USER], "tools": 3},
    {"messages": [USER], "tools": [{}]},
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": 3}}]},
    {"messages": [USER], "tool_choice": "maybe"},
    {"messages": [USER], "reasoning_format": "deep"},
    {"messages": [USER], "now_s": "x"},
    {"messages": [USER], "parallel_tool_calls": "x"},
]


@pytest.mark.parametrize("inputs", BAD_INPUTS, ids=range(len(BAD_INPUTS)))
def test_bad_inputs_are_refused(chatml, inputs):
    """Whatever C++ throws arrives as a typed error."""
    with pytest.raises(InvalidContent):
        chatml.apply(inputs)
    assert chatml.apply({"messages": [USER]}).prompt


def test_random_inputs_never_crash(chatml):
    """Messages of random JSON: rendered or refused."""
    rng = random.Random(5)

    def anything(depth=0):
        kind = rng.randrange(8 if depth < 4 else 5)
        if kind == 5:
            return [anything(depth + 1) for _ in range(rng.randrange(4))]
        if kind > 5:
            keys = ("role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id")
            return {rng.choice(keys): anything(depth + 1) for _ in range(rng.randrange(5))}
        return [
            None,
            True,
            rng.random() * 1e9,
            rng.randrange(-9, 9),
            rng.choice(("user", "text", "", "{{x}}")),
        ][kind]

    for _ in range(400):
        inputs = {"messages": [anything(1) for _ in range(rng.randrange(4))], "tools": anything(1)}
        with suppress(InvalidContent, InvalidGrammar):
            chatml.apply(inputs)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_is_bounded(chatml, opening):
    """Recursion in C++ would end the process: schemas, arguments and answers nested too deep are refused."""
    n = 100_000
    with pytest.raises(InvalidContent, match="nested deeper"):
        llama.ChatParser(chatml.apply({"messages": [USER]}).parser).parse(opening * n)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    value: object = "x"
    for _ in range(400):
        value = [value] if opening == "[" else {"a": value}
    with pytest.raises(InvalidContent, match="nested deeper"):
        chatml.apply(
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "x": value}
        )
    with pytest.raises((InvalidContent, InvalidGrammar), match="nested deeper"):
        llama.schema_to_grammar({"const": value})


def test_what_is_no_json_is_refused(chatml):
    """Numbers that JSON has not, surrogates, objects of Python's own."""
    for value in (float("nan"), "\ud800", object(), {1, 2}):
        with pytest.raises(InvalidContent):
            chatml.apply({"messages": [USER], "template_kwargs": {"x": value}})


def test_failures_leak_nothing(chatml):
    """C3: a hundred thousand refused messages keep the process as large as it was."""
    bad = {"messages": [USER, {"role": "assistant", "content": "x" * 100, "tool_calls": [{}]}]}
    process = psutil.Process()

    def refuse(n):
        for _ in range(n):
            with pytest.raises(InvalidContent):
                chatml.apply(bad)

    refuse(2_000)
    before = process.memory_info().rss
    refuse(100_000)
    assert process.memory_info().rss - before < 4 << 20
    assert llama.live_texts() == 0


def test_threads_share_a_template(chatml):
    """Rendering and closing from many threads: each call is whole, or says that it is closed."""
    failed: list[BaseException] = []

    def render():
        try:
            for i in range(100):
                text = f"{threading.get_ident()} {i}"
                assert text in chatml.apply({"messages": [{"role": "user", "content": text}]}).prompt
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    chatml.close()
    with pytest.raises(HandleClosed):
        chatml.apply({"messages": [USER]})


def test_a_parser_reads_prefixes_and_wholes(chatml):
    """Partial texts never raise; NUL and characters beyond the BMP survive."""
    with llama.ChatParser(chatml.apply({"messages": [USER]}).parser) as parser:
        text = "a\0b 🙂 ü"
        for end in range(len(text) + 1):
            assert parser.parse(text[:end], partial=True)["content"] == text[:end]
        assert parser.parse(text) == {
            "role": "assistant", "content": text, "reasoning_content": "", "tool_calls": [],
        }  # fmt: skip
    with pytest.raises(HandleClosed):
        parser.parse("x")


def test_templates_speak_through_pythons_logging(vendor_dir, caplog):
    """llama-common's own logger ends in `llama.cpp`."""
    folder = vendor_dir / "models" / "templates"
    text = (folder / "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with caplog.at_level(logging.INFO, "llama.cpp"), llama.ChatTemplates.of_text(text) as templates:
        templates.apply({"messages": [USER], "tools": tools})
        llama.shutdown_logs()  # waits until what is queued has been logged
        llama.resume_logs()
    [record] = [r for r in caplog.records if "does not natively describe tools" in r.message]
    assert (record.name, record.levelno) == ("llama.cpp", logging.WARNING)


def test_unreadable_answers_are_not_logged(vendor_dir, caplog):
    """What a model wrote is no line in anybody's log."""
    text = (vendor_dir / "models" / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with caplog.at_level(logging.INFO, "llama.cpp"), llama.ChatTemplates.of_text(text) as templates:
        applied = templates.apply({"messages": [USER], "tools": tools})
        with llama.ChatParser(applied.parser) as parser, pytest.raises(InvalidContent):
            parser.parse("<tool_call>\nsecret")
        llama.shutdown_logs()
        llama.resume_logs()
    assert not [r for r in caplog.records if r.name == "llama.cpp"]


def test_nothing_is_printed():
    """Templates, parsers and refused answers write nothing to stderr."""
    done = run_python(
        "from erllama import llama\n"
        f"t = llama.ChatTemplates.of_text({CHATML!r})\n"
        "p = llama.ChatParser(t.apply({'messages': [{'role': 'user', 'content': 'x'}]}).parser)\n"
        "for bad in ({}, {'messages': 3}):\n"
        "    try: t.apply(bad)\n"
        "    except Exception: pass\n"
        "try: llama.ChatTemplates.of_text('{% for %}')\n"
        "except Exception: pass\n"
        "try: llama.schema_to_grammar({'type': 'strange'})\n"
        "except Exception: pass\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_schema_errors_name_the_place():
    """The converter's own words, typed."""
    with pytest.raises(InvalidGrammar, match="#/properties/a"):
        llama.schema_to_grammar({"type": "object", "properties": {"a": {"type": "strange"}}})
    with pytest.raises(InvalidGrammar):
        llama.schema_to_grammar({"$ref": "elsewhere"})


def test_special_texts(smollm2):
    """Ids, texts and kinds of what is read as one token."""
    found = {text: (token, is_control) for token, text, is_control in smollm2.vocab.special_texts()}
    assert found["<|im_end|>"] == (2, True)
    for text, (token, _) in found.items():
        assert smollm2.vocab.tokenize(text, add_special=False, parse_special=True) == [token]


def test_unknown_parsers_are_refused():
    """A parser description that is none."""
    for text in ("", "{", "[]", json.dumps({"format": 99}), json.dumps({"format": 0, "arena": "{"})):
        with pytest.raises(NativeError):
            llama.ChatParser(text)


ENDLESS = {
    "blocks": "{% if true %}" * 40_000 + "{% endif %}" * 40_000,
    "loops": "{% for a in [1] %}" * 20_000 + "{% endfor %}" * 20_000,
    "alternatives": "{% if a %}" + "{% elif a %}" * 80_000 + "{% endif %}",
    "negations": "{{ " + "not " * 200_000 + "x }}",
    "signs": "{{ " + "-" * 500_000 + "1 }}",
    "conditions": "{{ " + "1 if a else " * 80_000 + "2 }}",
    "sums": "{{ " + "1 + " * 200_000 + "1 }}",
    "filters": "{{ 'a'" + "|trim" * 150_000 + " }}",
    "attributes": "{{ a" + ".b" * 300_000 + " }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_that_would_use_up_the_stack(name):
    """Refused before llama-common's interpreter sees them."""
    with pytest.raises(InvalidContent, match=r"too long|nested|more than"):
        llama.ChatTemplates.of_text(ENDLESS[name])


def test_templates_at_the_limits_run():
    """What is just allowed fits onto the stack of a thread."""
    for text in (
        "{{ " + "1 + " * 1000 + "1 }}",
        "{{ " + "not " * 1000 + "x }}",
        "{{ " + "-" * 4000 + "1 }}",
        "{% if true %}" * 128 + "x" + "{% endif %}" * 128,
        "{% if a %}" + "{% elif a %}" * 1000 + "{% endif %}x",
        '{{ "' + "{% if %}" * 10_000 + '" }}',
    ):
        found = []

        def render(text=text, found=found):
            with llama.ChatTemplates.of_text(text) as templates:
                found.append(templates.apply({"messages": [USER]}).prompt)

        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
        assert found[0]
