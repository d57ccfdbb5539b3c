"""An answer held to a schema is the JSON alone: no ```` ```json ```` around it, no white space without a use.

Upstream's grammars let a model write a Markdown fence around the JSON, some demand it, and its parsers hide
it. Hidden text ends answers at stop texts nobody sees, costs tokens, and parts the next turn's prompt.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erllama import llama

FENCE = ("```json", "```")
_FENCED = r'"```json" space (response-format(?:-schema)?) space "```"'
_MAY_BE_FENCED = re.compile(rf"\({_FENCED} \| (?:space )?\1(?: space)?\)")
_MUST_BE_FENCED = re.compile(_FENCED)
_BARE_ROOT = re.compile(r'^root ::= ("(?:[^"\\]|\\.)*" |)space space (response-format)$', re.MULTILINE)


def unfenced(applied: llama.Applied) -> llama.Applied:
    """With a grammar that takes no fence, and a parser that does not wait for one.

    White space before the JSON stays where thinking, or the prompt's beginning of the answer, may need it.
    """
    grammar = _MAY_BE_FENCED.sub(r"\1", applied.grammar)
    parser = applied.parser
    if _MUST_BE_FENCED.search(grammar):
        grammar = _MUST_BE_FENCED.sub(r"\1", grammar)
        parser = _with_optional_fence(parser)
    root = _BARE_ROOT.search(grammar)
    if root and json.loads(root[1] or '""') == applied.generation_prompt:
        grammar = grammar.replace(root[0], f"root ::= {root[1]}{root[2]}")
    return dataclasses.replace(applied, grammar=grammar, parser=parser)


def _with_optional_fence(parser: str) -> str:
    """Upstream's parser, whose fence may be missing."""
    saved = json.loads(parser)
    arena = json.loads(saved["arena"])
    nodes = arena["parsers"]
    for place, node in enumerate(list(nodes)):
        if node["type"] == "literal" and node["literal"] in FENCE:
            nodes.append(node)
            nodes[place] = {"type": "repetition", "child": len(nodes) - 1, "min_count": 0, "max_count": 1}
    return json.dumps({**saved, "arena": json.dumps(arena)})
