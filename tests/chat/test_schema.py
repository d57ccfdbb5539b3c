"""A schema either holds the answer to all it says, or is refused with place, keyword and reason."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.schemas import ENFORCED, PERSON, REFUSED
from erllama import llama
from erllama.chat.grammar import SchemaGrammars
from erllama.chat.pattern import PatternError, canonical_pattern
from erllama.chat.schema import canonical_schema
from erllama.chat.schema_facts import CONSTRAINTS
from erllama.errors import InvalidGrammar

LIKED = {'"': 4.0, "}": 4.0, "]": 4.0, "a": 3.0, "b": 3.0}  # answers end before long
MAX_TOKENS = 500


@pytest.fixture(scope="module")
def tiny(tiny_gguf):
    """A tiny model with random weights: it writes anything a grammar allows."""
    with llama.Model.open(tiny_gguf("dense")) as model:
        params = llama.ContextParams(n_ctx=4096, n_batch=64, n_seq_max=1, n_threads=1)
        with llama.Context.open(model, params) as context:
            yield model, context


def sampled(tiny, grammar, seed):
    """What a random model writes under a grammar; it would rather close than open."""
    model, context = tiny
    bias = {t: -9.0 for t in range(model.vocab.n_tokens) if not model.vocab.piece(t).isascii()}
    bias |= {model.vocab.tokenize(text, add_special=False)[-1]: more for text, more in LIKED.items()}
    params = llama.SamplerParams(
        temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed, grammar=grammar, logit_bias=bias
    )
    batch, pos, written = llama.Batch(64, 1), 0, b""
    context.memory.clear()
    with llama.SamplerChain(model.vocab, params) as chain:
        tokens = model.vocab.tokenize("a", add_special=True)
        while pos < MAX_TOKENS:
            batch.clear()
            row = batch.add(0, tokens, pos)
            assert context.decode(batch) == 0
            pos += len(tokens)
            tokens = [chain.sample(context, row)]
            if model.vocab.is_eog(tokens[0]):
                return written.decode(errors="replace")
            written += model.vocab.piece(tokens[0])
    return None


@pytest.mark.model
@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_generated_satisfies_the_schema(tiny, name):
    """Answers of a random model under the grammar are JSON, and valid for the schema as it was given."""
    schema = ENFORCED[name]
    grammar = SchemaGrammars().of(schema)
    validator = jsonschema.Draft202012Validator(schema)
    finished = [text for seed in range(6) if (text := sampled(tiny, grammar, seed)) is not None]
    assert finished, "no answer ended"
    for text in finished:
        validator.validate(json.loads(text))


@pytest.mark.model
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused(name):
    """The error names the place and the keyword."""
    schema, path, keyword = REFUSED[name]
    with pytest.raises(InvalidGrammar) as caught:
        SchemaGrammars().of(schema)
    assert (caught.value.detail["path"], caught.value.detail["keyword"]) == (path, keyword)
    assert path in str(caught.value)
    assert keyword in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("name", REFUSED)
def test_a_loose_schema_converts(name):
    """What an agent's tool cannot have enforced is left out and noted, and the rest compiles."""
    schema, _, keyword = REFUSED[name]
    try:
        made, notes = canonical_schema(schema, loosen=True)
    except InvalidGrammar as why:
        assert re.search("expected|no type|is an object", str(why))  # noqa: PT017  # wrong, not too much
        return
    llama.check_grammar(llama.schema_to_grammar(made))
    assert keyword in {note.keyword for note in notes}


@pytest.mark.model
def test_repetitions_that_multiply_are_refused():
    """llama.cpp counts what repeats inside of what repeats; the error names the rule, so the property."""
    inner = {"type": "array", "maxItems": 2000, "items": {"type": "string", "maxLength": 2000}}
    with pytest.raises(InvalidGrammar, match="rows"):
        SchemaGrammars().of({"type": "object", "properties": {"rows": inner}, "required": ["rows"]})
    with pytest.raises(InvalidGrammar, match="repe"):
        SchemaGrammars().of({"type": "array", "items": {"type": "null"}, "maxItems": 2000})


@pytest.mark.parametrize("schema", [None, [], "x", 3, {"type": "object", "properties": {"a": 3}}])
def test_what_is_no_schema_is_refused(schema):
    """Anything but an object where a schema belongs."""
    with pytest.raises(InvalidGrammar, match="object"):
        canonical_schema(schema)


def test_depth_is_bounded():
    """A schema nested without end is an error, not a crash."""
    schema = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    for convert in (canonical_schema, SchemaGrammars().of):
        with pytest.raises(InvalidGrammar, match=r"nested|recursion"):
            convert(schema)


@pytest.mark.model
def test_a_schema_is_converted_once():
    """G27: hits and misses can be read; a changed schema is another one."""
    grammars = SchemaGrammars()
    for _ in range(3):
        grammars.of(PERSON)
    grammars.of({"type": "null"})
    counts = grammars.statistics()
    assert (counts.n_hits, counts.n_misses) == (2, 2)


@pytest.mark.model
def test_the_converter_never_warns(capfd):
    """What reaches it is expressible, so it has nothing to print to stderr."""
    grammars = SchemaGrammars()
    for schema in ENFORCED.values():
        grammars.of(schema)
    assert capfd.readouterr().err == ""


@given(st.text(st.sampled_from(r"abz019.^$|()[]{}*+?\dws-,\"x "), max_size=12))
def test_patterns_are_rewritten_faithfully_or_refused(pattern):
    """Whatever Python's engine matches against the rewritten pattern, it finds the given one in."""
    try:
        rewritten = canonical_pattern(pattern)
    except PatternError:
        return
    with warnings.catch_warnings(action="ignore"):  # "possible nested set": [[] is none
        compiled, original = re.compile(rewritten, re.ASCII), re.compile(pattern, re.ASCII)
    for text in ("", "a", "ab", "z9", "0", " ", "a b", "x" * 3, "a-b", "[", "(", "1,2"):
        if compiled.search(text):
            assert original.search(text), (pattern, rewritten, text)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*sorted(CONSTRAINTS), ""]), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*sorted(CONSTRAINTS), "format", "$defs"]), json_values, max_size=5))
def test_any_json_is_a_schema_or_a_typed_error(schema):
    """Whatever stands behind a keyword: converted, loosened or `InvalidGrammar`."""
    for loosen in (False, True):
        with contextlib.suppress(InvalidGrammar):
            canonical_schema(schema, loosen=loosen)


def nested(kinds, depth):
    """Objects within objects, each of several types."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": kinds, "properties": {"a": schema}, "additionalProperties": False}
    return schema


def ladder(n):
    """References to alternatives of references, twice a rung."""
    rungs = {f"A{i}": {"oneOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": {**rungs, f"A{n}": {"type": "null"}}, "$ref": "#/$defs/A0"}


OWN = {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        nested(["object", "array", "string"], 40),
        nested(["object", "object"], 60),
        nested([["object"], "null"], 3),
        ladder(16),
        ladder(2000),
        {"$defs": {"A": OWN}, "$ref": "#/$defs/A"},
        {"$defs": {"A": {"oneOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]}, "B": OWN}, "$ref": "#/$defs/A"},
    ],
)
def test_small_schemas_that_grow_end_soon(schema):
    """A kilobyte that means millions of schemas costs a bounded number of steps."""
    for loosen in (False, True):
        n_steps = 0

        def count(frame, event, arg):
            nonlocal n_steps
            n_steps += event == "call"

        sys.setprofile(count)
        try:
            with contextlib.suppress(InvalidGrammar):
                canonical_schema(schema, loosen=loosen)
        finally:
            sys.setprofile(None)
        assert n_steps < 2_000_000
