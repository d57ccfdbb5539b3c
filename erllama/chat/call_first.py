"""A grammar that demands a call lets no text stand before it.

Upstream's grammars let the model say anything first, without an end. Its rule for such a text is called after
the text's node in the parser (`until-12`), so the parser tells which rules are content. What they let through
is cut down to a little white space: the language gets smaller, and the parser reads all of it as before.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from erllama import llama

WHITE_SPACE = r"[ \t\n]{0,4}"
Node = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Parser:
    """The nodes of upstream's parser."""

    nodes: list[Node]
    rules: dict[str, int]

    def body(self, name: str) -> Node:
        """What a rule consists of."""
        return self.nodes[self.nodes[self.rules[name]]["child"]]

    def is_content(self, node: Node) -> bool:
        return node["type"] == "tag" and bool(node["tag"] == "content")

    def free_text(self) -> set[int]:
        """The nodes that let any text through as content, and nothing but content."""
        children: dict[bool, set[int]] = {True: set(), False: set()}
        for node in self.nodes:
            children[self.is_content(node)] |= {*node.get("children", ()), node.get("child", -1)}
        return {i for i in children[True] - children[False] if i >= 0 and self.nodes[i]["type"] == "until"}

    def has_named_text(self, rule: str) -> bool:
        """Whether any text is its content by the name of another rule, which elsewhere may be thinking."""
        body = self.body(rule)
        parts = [self.nodes[i] for i in body["children"]] if body["type"] == "sequence" else []
        texts = [self.nodes[part["child"]] for part in parts if self.is_content(part)]
        return any(
            text["type"] in ("rule", "ref") and self.body(text["name"])["type"] == "until" for text in texts
        )

    def alternatives(self, rule: str) -> list[str]:
        """The rules between which a rule chooses; none if it is anything else."""
        body = self.body(rule)
        if body["type"] != "choice":
            return []
        nodes = [self.nodes[i] for i in body["children"]]
        return (
            [node["name"] for node in nodes] if all(node["type"] in ("rule", "ref") for node in nodes) else []
        )


def call_first(applied: llama.Applied, begun: str = "") -> str:
    """The grammar, without text before a call. `begun`: the content that the prompt has already."""
    parser = _parser_of(applied)
    blank = f'("{_escaped(begun)}")? {WHITE_SPACE}' if begun else WHITE_SPACE
    grammar = applied.grammar
    for node in parser.free_text():
        grammar = _with_rule(grammar, f"until-{node}", blank)
    messages = {rule for rule in parser.rules if parser.has_named_text(rule)}
    for rule in parser.rules:
        names = parser.alternatives(rule)
        kept = [name for name in names if name not in messages]
        if kept and kept != names:
            grammar = _with_rule(grammar, rule, " | ".join(kept))
    return grammar


def one_call(applied: llama.Applied, grammar: str) -> str:
    """The grammar, where it lets calls follow each other although one is allowed (an oversight)."""
    parser = _parser_of(applied)
    for name, place in parser.rules.items():
        body = parser.body(name)
        if parser.nodes[place]["trigger"] and (body["type"], body.get("max_count")) == ("repetition", -1):
            grammar = re.sub(rf"^({re.escape(name)} ::= .*)\+$", r"\1", grammar, flags=re.MULTILINE)
    return grammar


def _parser_of(applied: llama.Applied) -> _Parser:
    arena = json.loads(json.loads(applied.parser)["arena"])
    return _Parser(arena["parsers"], arena["rules"])


def _escaped(text: str) -> str:
    """As a literal of a grammar."""
    return re.sub(r'["\\\x00-\x1F\x7F]', lambda found: f"\\x{ord(found[0]):02X}", text)


def _with_rule(grammar: str, name: str, body: str) -> str:
    return re.sub(rf"^{re.escape(name)} ::= .*$", lambda _: f"{name} ::= {body}", grammar, flags=re.MULTILINE)
