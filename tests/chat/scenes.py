"""Conversations for every template, and answers as its own history writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from erllama import llama
from erllama.chat.grammar import SchemaGrammars
from erllama.chat.prompt import Renderer, Vocabulary
from erllama.chat.templates import Template

FOLDER = Path(__file__).resolve().parents[2] / "vendor" / "llama.cpp" / "models" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B": "takes tools as variables of its own (xml_tools, python_tools)",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "knows no tools",
    "llama-cpp-rwkv-world": "knows no tools",
    "microsoft-Phi-3.5-mini-instruct": "knows no tools",
}
REFUSES_DIALOGUE = {"google-gemma-2-2b-it": "must alternate"}
NO_CALLS = {
    "LFM2-8B-A1B": "leaves calls out of histories",
    "LFM2.5-Instruct": "leaves calls out of histories",
    "ibm-granite-granite-3.3-2B-Instruct": "leaves calls out of histories",
    "google-gemma-2-2b-it": "knows no tools",
    **NO_TOOLS,
}
# What ends an answer and is no text of it.
ENDS = (
    *(
        "<|eom_id|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "<SPECIAL_12>",
        "<|calls|>",
        "<|call|>",
    ),
    *("<|im_end|>", "<|eot_id|>", "</s>", "[e~[", "</assistant>", "<|end|>", "<｜hy_eos:opensource｜>"),
    "\n<|START_OF_TURN_TOKEN|>",
)


def tool(name: str) -> dict[str, Any]:
    """A tool that takes a city and perhaps a number."""
    properties = {"city": {"type": "string"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Asks.", "parameters": schema}}


def call(call_id: str, name: str, **arguments: object) -> dict[str, Any]:
    """A call of a tool, in a message."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


TOOLS = [tool("get_weather"), tool("get_time")]
USER = {"role": "user", "content": "Weather and time in Oslo?"}
ONE_CALL = {"role": "assistant", "content": "", "tool_calls": [call("call1aaaa", "get_weather", city="Oslo")]}
TWO_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        call("call1aaaa", "get_weather", city="Oslo"),
        call("call2bbbb", "get_time", city="Oslo", n=3),
    ],
}


def result(call_id: str, name: str, content: str) -> dict[str, Any]:
    """The answer of a tool."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def dialogue(said: str = "And in Rome?") -> list[dict[str, Any]]:
    """A dialogue in which both tools were called, one after the other."""
    second = call("call2bbbb", "get_time", city="Bergen", n=3)
    return [
        {"role": "system", "content": "Be brief."},
        USER,
        ONE_CALL,
        result("call1aaaa", "get_weather", "drizzle"),
        {"role": "assistant", "content": "", "tool_calls": [second]},
        result("call2bbbb", "get_time", "noon"),
        {"role": "assistant", "content": "It is wet now."},
        {"role": "user", "content": said},
    ]


def templates(name: str) -> llama.ChatTemplates:
    """One of upstream's templates, without a model."""
    return llama.ChatTemplates.of_text((FOLDER / f"{name}.jinja").read_text(), bos="<s>", eos="</s>")


def special_texts(source: str) -> list[str]:
    """What in a template looks like a control token."""
    found = re.findall(
        r"<\|[^|<>'\"{}\s]{1,40}\|?>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?[\w:]{2,30}>", source
    )
    return sorted({*found, "<s>", "</s>", "<|im_end|>"})


class ByteVocabulary:
    """Every byte is a token, every special text is one."""

    def __init__(self, texts: list[str]) -> None:
        self.ids = {text: 256 + i for i, text in enumerate(texts)}
        longest_first = sorted(texts, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids."""
        parts = self._split.split(text) if parse_special else [text]
        return [t for part in parts for t in ([self.ids[part]] if part in self.ids else part.encode())]

    def piece(self, token: int) -> bytes:
        """Control tokens show nothing."""
        return bytes([token]) if token < 256 else b""

    def special(self) -> list[tuple[int, str, bool]]:
        """As `Vocab.special_texts` gives them."""
        return [(token, text, True) for text, token in self.ids.items()]


def renderer(name: str) -> tuple[Renderer, ByteVocabulary]:
    """A renderer of one of upstream's templates, with a vocabulary of its markup."""
    native = templates(name)
    vocabulary = ByteVocabulary(special_texts(native.source))
    template = Template.of(native, vocabulary.special())
    return Renderer(template, Vocabulary(vocabulary.tokenize, vocabulary.piece), SchemaGrammars()), vocabulary


def written(native: llama.ChatTemplates, message: dict[str, Any]) -> tuple[llama.Applied, str]:
    """What the prompt for `USER` is, and `message` as the model would have to write it behind that prompt."""
    inputs = {"messages": [USER], "tools": TOOLS}
    asked = native.apply(inputs)
    told = native.apply({**inputs, "messages": [USER, message], "add_generation_prompt": False}).prompt
    plain = {"role": "assistant", "content": "XYZZY"}
    end = native.apply({**inputs, "messages": [USER, plain], "add_generation_prompt": False}).prompt
    if told.startswith(asked.prompt):
        answer = told[len(asked.prompt) :]
    else:  # the prompt opens a thinking block that histories leave out
        words = [word for _, word in asked.triggers]
        pairs = zip(told, asked.prompt, strict=False)
        begin = next(i for i, (one, other) in enumerate(pairs) if one != other)
        at = min(
            (told.index(word, begin - 32) for word in words if word in told[begin - 32 :]), default=begin
        )
        answer = told[at:]
        if asked.thinking_ends and asked.thinking_start in asked.generation_prompt:
            answer = f"Hm.{asked.thinking_ends[0]}{answer}"
    answer = answer.removesuffix(end.rpartition("XYZZY")[2])
    cut = min((answer.index(text) for text in ENDS if text in answer), default=len(answer))
    return asked, answer[:cut].rstrip("\n")
