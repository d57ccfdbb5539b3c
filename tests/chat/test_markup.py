"""Marks: where control-token text is split, and that the text comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erllama.chat.markup import Markup, choose_mark, continued, unescaped
from erllama.chat.prompt import Vocabulary
from erllama.errors import InvalidContent

TEXTS = ["<s>", "</s>", "<|a|>", "<|a|b", "[X]", "<<s>"]
MARK = "\ue000"
hostile = st.text(st.sampled_from("<>s/|ab[X] "), max_size=30)


@given(hostile)
def test_no_piece_holds_a_control_token(text):
    """Split, no control-token text is whole; without the marks it is the text."""
    markup = Markup(TEXTS)
    [split] = markup.split([text], MARK)
    assert split.replace(MARK, "") == text
    assert not any(markup.places(piece) for piece in split.split(MARK))


@given(st.lists(hostile, max_size=4))
def test_parts_are_split_as_one_text(texts):
    """However a text is parted, no control-token text is whole once the parts are joined."""
    markup = Markup(TEXTS)
    made = markup.split(texts, MARK)
    assert [part.replace(MARK, "") for part in made] == texts
    assert not any(markup.places(piece) for piece in "".join(made).split(MARK))


@given(hostile, hostile)
def test_neutral_text_begins_no_control_token(text, behind):
    """Whatever stands behind it, and ordinary text stays."""
    markup = Markup(TEXTS)
    neutral = markup.neutral(text)
    assert len(neutral) == len(text)
    assert all(at >= len(text) for at in markup.places(neutral + behind))
    assert markup.neutral("plain words, 1 > 0") == "plain words, 1 > 0"


def test_names_between_brackets():
    """What some templates write in angle brackets: a bare word of a control token becomes another."""
    markup = Markup(TEXTS)
    assert [markup.neutral_name(name) for name in ("s", "a", "X", "city", "a<")] == [
        "xs",
        "xa",
        "xX",
        "city",
        "ax",
    ]


def test_quotes_of_arguments():
    """Arguments are JSON text: there a control-token text with a quote has a backslash."""
    markup = Markup(['<|"|>'])
    assert markup.split([r'{"a": "<|\"|>"}'], MARK) == [rf'{{"a": "<{MARK}|\"|>"}}']


def test_spared_texts_stay():
    """What a template looks for in an assistant's words."""
    assert Markup(TEXTS).split(["a<s>b</s>"], MARK, ["<s>"]) == [f"a<s>b<{MARK}/s>"]
    assert Markup([]).split(["a<s>b"], MARK) == ["a<s>b"]
    assert Markup(TEXTS).neutral("a<s>b</s>", ["<s>"]) == "a<s>bx/s>"


def test_marks_are_characters_nobody_used():
    """Neither as they are nor as escapes; when all are used, the messages are refused."""
    assert choose_mark("plain") == "\ue000"
    assert choose_mark("\ue000 and \\uE001") == "\ue002"
    with pytest.raises(InvalidContent, match="private-use"):
        choose_mark("".join(map(chr, range(0xE000, 0xF900))))


def test_marks_written_as_escapes_are_found():
    """A template that writes JSON in ASCII."""
    assert unescaped("a\\ue000b\\uE000", "\ue000") == "a\ue000b\ue000"


def test_a_piece_behind_others_gets_no_space_of_its_own():
    """A tokenizer that begins every text with a space begins a piece without."""

    def spacing(text, *, add_special, parse_special):
        return [ord(c) for c in (text if text.startswith("\n") else " " + text)]

    assert continued("abc", spacing) == [97, 98, 99]
    assert continued("", spacing) == []
    assert Vocabulary(spacing, lambda token: bytes([token])).ids("abc") == (97, 98, 99)


def test_a_tokenizer_that_merges_the_line_break():
    """Where the line break does not stand alone, the piece is tokenised by itself."""

    def merging(text, *, add_special, parse_special):
        return [1] if text == "\n" else [2, 3] if text.startswith("\n") else [4, 5]

    assert continued("ab", merging) == [4, 5]
