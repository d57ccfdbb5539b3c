"""Text assembly: whole characters, stop strings over borders, exactness of what is held back."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from erllama.engine.text import TextAssembler

# Few letters and few lengths, so that stops, prefixes of stops and split characters all occur often.
STOPS = st.lists(st.text("ab🎉é", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(
    st.one_of(
        st.text("abé🎉", max_size=4).map(str.encode),
        st.sampled_from([b"\xf0", b"\x9f", b"\x8e", b"\x89", b"\xc3", b"\xff"]),
    ),
    max_size=12,
)


def run(pieces: list[bytes], *stops: str) -> tuple[list[str], TextAssembler]:
    """What every piece shows, the flush last; a stop ends the generation as in the engine."""
    text = TextAssembler(stops)
    shown = []
    for piece in pieces:
        shown.append(text.feed(piece))
        if text.stop_sequence is not None:
            break
    return [*shown, text.finish()], text


def first_stop(decoded: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Earliest position, then the shortest: independent of the code under test."""
    hits = [(decoded.index(s), len(s), s) for s in stops if s in decoded]
    return min(hits) if hits else None


def test_bytes_of_a_split_character_wait():
    """An emoji that comes byte by byte is shown once, whole."""
    shown, _ = run([bytes([b]) for b in "🎉".encode()])
    assert shown == ["", "", "", "🎉", ""]


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_a_character_cut_by_the_end_is_one_replacement(n_bytes: int):
    """At max_tokens inside a character the rest is a single U+FFFD, wherever the cut is."""
    shown, text = run([b"hi", "🎉".encode()[:n_bytes]])
    assert shown == ["hi", "", "\ufffd"]
    assert text.text == "hi\ufffd"


def test_invalid_bytes_do_not_swallow_what_follows():
    """A byte that can never be UTF-8 is U+FFFD at once, and the next character is intact."""
    shown, _ = run([b"a", b"\xff", b"b", b"\xc3", b"c"])
    assert shown == ["a", "\ufffd", "b", "", "\ufffdc", ""]


def test_a_stop_over_three_pieces_never_shows():
    """`E`, `N`, `D` with stop `END`: no piece shows a part of it."""
    shown, text = run([b"so ", b"E", b"N", b"D", b"more"], "END")
    assert shown == ["so ", "", "", "", ""]
    assert (text.text, text.stop_sequence) == ("so ", "END")


def test_a_mere_prefix_of_a_stop_is_delivered_at_the_end():
    """What was held back for a stop that never came is flushed."""
    shown, text = run([b"so ", b"E", b"N"], "END")
    assert shown == ["so ", "", "", "EN"]
    assert (text.text, text.stop_sequence) == ("so EN", None)


def test_a_broken_prefix_is_shown_as_soon_as_it_is_broken():
    """Held text goes out with the piece that rules the stop out."""
    shown, _ = run([b"E", b"N", b"E", b"N", b"x"], "END")
    assert shown == ["", "", "EN", "", "ENx", ""]


def test_of_two_stops_the_earlier_position_wins():
    """Two stops in one piece: the text is cut at the earlier, whatever their order in the list."""
    for stops in (["yy", "x"], ["x", "yy"]):
        _, text = run([b"a yy x"], *stops)
        assert (text.text, text.stop_sequence) == ("a ", "yy")


def test_of_a_stop_and_its_prefix_the_prefix_matches():
    """One stop is a prefix of the other: the shorter is complete first."""
    for pieces in ([b"1 abc"], [b"1 a", b"b", b"c"]):
        _, text = run(pieces, "abc", "ab")
        assert (text.text, text.stop_sequence) == ("1 ", "ab")


def test_a_stop_may_begin_inside_a_piece_and_end_inside_another():
    """Borders of tokens mean nothing to a stop string."""
    _, text = run([b"one st", b"op two"], "stop")
    assert text.text == "one "


def test_a_stop_inside_an_emoji_sequence():
    """A stop that is one code point of a joined emoji cuts there, although its bytes came split."""
    family = "👩\u200d🔬"
    _, text = run([bytes([b]) for b in family.encode()], "🔬")
    assert (text.text, text.stop_sequence) == ("👩\u200d", "🔬")


def test_a_replacement_character_may_be_a_stop():
    """A stop that only the flush completes is found all the same."""
    shown, text = run([b"ok", b"\xf0\x9f"], "\ufffd")
    assert (shown[-1], text.text, text.stop_sequence) == ("", "ok", "\ufffd")


def test_nothing_comes_after_a_stop():
    """Pieces fed after the match are dropped."""
    text = TextAssembler(["."])
    assert [text.feed(b"a.b"), text.feed(b"c"), text.finish()] == ["a", "", ""]


@given(PIECES)
def test_without_stops_the_text_is_the_decoded_bytes(pieces: list[bytes]):
    """Joined text equals the bytes decoded at once, however they were cut."""
    shown, text = run(pieces)
    assert "".join(shown) == text.text == b"".join(pieces).decode(errors="replace")


@given(PIECES, STOPS)
def test_text_ends_at_the_first_stop(pieces: list[bytes], stops: list[str]):
    """The answer is the decoded text up to the first stop seen when pieces arrive one by one."""
    shown, text = run(pieces, *stops)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    so_far = ""
    hit = None
    for piece in [*pieces, None]:
        so_far += decoder.decode(b"", True) if piece is None else decoder.decode(piece)
        if (hit := first_stop(so_far, stops)) is not None:
            break
    assert text.text == "".join(shown) == (so_far if hit is None else so_far[: hit[0]])
    assert text.stop_sequence == (None if hit is None else hit[2])


@given(st.text("abé🎉", max_size=24), st.text("ab🎉", min_size=1, max_size=4), st.data())
def test_chunking_changes_nothing_with_one_stop(whole: str, stop: str, data: st.DataObject):
    """One stop string: the same answer however the bytes are cut into tokens."""
    raw = whole.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    _, text = run(pieces, stop)
    assert text.text == whole.partition(stop)[0]


@given(st.lists(st.text("ab🎉", max_size=3), max_size=10), STOPS)
@example(["ab"], ["aba", "ba"])
def test_held_back_text_is_exactly_what_may_become_a_stop(pieces: list[str], stops: list[str]):
    """After each piece, what is not shown is the longest end of the text that begins a stop string."""
    text = TextAssembler(stops)
    so_far = ""
    for piece in pieces:
        text.feed(piece.encode())
        so_far += piece
        if text.stop_sequence is not None:
            return
        ends = [so_far[len(so_far) - n :] for n in range(len(so_far) + 1)]
        held = max((e for e in ends if any(s.startswith(e) and s != e for s in stops)), key=len, default="")
        assert text.text == so_far[: len(so_far) - len(held)]
