"""Stored text in other tokens than the caller's: what is gained, and that no byte changes (K1, K2, K25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache.stores import bench

from erllama.engine.retokenise import retokenised
from erllama.errors import InvalidContent
from erllama.kvcache.key import Identity, Prompt, as_tokens, control_piece
from erllama.kvcache.kinds import PartKind, Provenance
from erllama.kvcache.match import Match, MatchedNode
from erllama.llama import Model
from erllama.options import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from erllama.llama.vocab import Vocab

CONTROLS = (900, 901)
# "a" to "e", all pairs of them, an é whole and by its bytes, a space, the byte 0xFF that is no control token.
PIECES = {i: bytes((97 + i,)) for i in range(5)}
PIECES |= {10 + 5 * i + j: bytes((97 + i, 97 + j)) for i in range(5) for j in range(5)}
PIECES |= {50: "é".encode(), 51: b"\xc3", 52: b"\xa9", 53: b" ", 54: b"\xff"}
PIECES |= {token: control_piece(token) for token in CONTROLS}
IDS = {piece: token for token, piece in PIECES.items()}
ID = Identity(shape_hash=b"toy")


def key_pieces(ids: Sequence[int]) -> list[bytes]:
    """Key bytes of the toy vocabulary."""
    return [PIECES[i] for i in ids]


def spelled(ids: Sequence[int]) -> bytes:
    """What ids spell."""
    return b"".join(key_pieces(ids))


def tokenize(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Pairs where possible, then letters."""
    assert not add_special
    assert not parse_special
    data, ids = text.encode(), []
    while data:
        n = 2 if data[:2] in IDS else 1
        ids.append(IDS[data[:n]])
        data = data[n:]
    return ids


def with_a_space(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """As tokenizers do that begin every text with a space."""
    return [53, *tokenize(text, add_special=add_special, parse_special=parse_special)]


def ids_of(text: str) -> list[int]:
    """One id per letter; `<` and `>` are the control tokens."""
    found = {"<": CONTROLS[0], ">": CONTROLS[1]}
    return [found.get(c) or IDS[c.encode()] for c in text]


def matched(stored: Sequence[int], prompt: Sequence[int], *, by_bytes: bool = True) -> Match:
    """A match of one node whose text is a beginning of the prompt's."""
    text = spelled(stored)
    assert spelled(prompt).startswith(text)
    node = MatchedNode(
        name=b"n" * 32,
        start=0,
        ids=as_tokens(stored),
        n_bytes=len(text),
        by_bytes=by_bytes,
        provenance=Provenance.PREFILL,
        parts={PartKind.BASE: "ram"},
    )
    at = Prompt.of(prompt, key_pieces(prompt)).token_at(len(text))
    return Match(identity=ID, nodes=(node,), partial=None, token_pos=at, byte_pos=len(text))


def resumed(stored: Sequence[int], prompt: Sequence[int], tokenizer=tokenize) -> list[int] | None:
    """The ids to use for a prompt of which `stored` is stored."""
    match = matched(stored, prompt)
    return retokenised(match, prompt, key_pieces(prompt), tokenize=tokenizer, key_pieces=key_pieces)


def fails(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """It must not be asked, or refuses."""
    raise InvalidContent("this tokenizer refuses everything")


def test_between_two_of_the_callers_tokens_their_own_ids_follow() -> None:
    """K25, aligned: nothing is tokenised again; the caller's ids stay, however they were chosen."""
    stored, prompt = ids_of("abcd"), [IDS[b"ab"], IDS[b"cd"], *ids_of("abe<abc")]
    assert resumed(stored, prompt, fails) == [*stored, *ids_of("abe<abc")]


def test_inside_one_of_the_callers_tokens_the_rest_is_tokenised_again() -> None:
    """K25, mid-token: the checkpoint's ids, then tokenise(rest) up to the next control token, then theirs."""
    stored = ids_of("abc")
    prompt = [IDS[b"ab"], IDS[b"cd"], *ids_of("ea<ab>c")]
    assert resumed(stored, prompt) == [*stored, IDS[b"de"], IDS[b"a"], *ids_of("<ab>c")]
    assert resumed(stored, [IDS[b"ab"], IDS[b"cd"]]) == [*stored, IDS[b"d"]]


def test_the_end_of_the_prompt_may_be_the_checkpoint() -> None:
    """Then the stored ids are all there is."""
    assert resumed(ids_of("abcd"), [IDS[b"ab"], IDS[b"cd"]], fails) == ids_of("abcd")


def test_nothing_is_gained_where_tokens_match() -> None:
    """The caller's ids do: nothing by bytes, nothing stored, or the very same ids."""
    prompt = ids_of("abcde")
    for match in (
        matched(prompt[:3], prompt, by_bytes=False),
        matched(prompt[:3], prompt),
        Match(identity=ID, nodes=(), partial=None, token_pos=0, byte_pos=0),
    ):
        pieces = key_pieces(prompt)
        assert retokenised(match, prompt, pieces, tokenize=fails, key_pieces=key_pieces) is None


@pytest.mark.parametrize(
    ("why", "stored", "prompt", "tokenizer"),
    [
        ("inside a character", [0, 51], [0, 50, 1], tokenize),
        ("a half character before a control token", ids_of("a"), [IDS[b"ab"], 51, CONTROLS[0]], tokenize),
        ("a space in front", ids_of("a"), [IDS[b"ab"], 2], with_a_space),
        ("refused", ids_of("a"), [IDS[b"ab"], 2], fails),
        ("inside a control token", [0, 54], [0, CONTROLS[0], 1], tokenize),
    ],
)
def test_what_cannot_be_exact_is_left_alone(
    why: str, stored: list[int], prompt: list[int], tokenizer
) -> None:
    """D7: then the prompt is computed as it came."""
    assert resumed(stored, prompt, tokenizer) is None, why


def test_ids_that_do_not_spell_what_was_matched_are_left_alone() -> None:
    """A stored text that is not that of its ids was written by somebody else; it changes no prompt."""
    prompt = [IDS[b"ab"], *ids_of("cd")]
    match = matched(ids_of("ab"), prompt)
    match.nodes[0].ids[:] = ids_of("ba")
    assert retokenised(match, prompt, key_pieces(prompt), tokenize=tokenize, key_pieces=key_pieces) is None


@st.composite
def segmented(draw: st.DrawFn, text: list[int]) -> list[int]:
    """Ids that spell the same as `text`, cut otherwise."""
    ids: list[int] = []
    for token in text:
        joined = IDS.get(PIECES[ids[-1]] + PIECES[token]) if ids and token not in CONTROLS else None
        if joined is not None and draw(st.booleans()):
            ids[-1] = joined
        elif token == 50 and draw(st.booleans()):
            ids += [51, 52]
        else:
            ids.append(token)
    return ids


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A stored history and a prompt; they share a beginning, as text, and go on as they like."""
    letters = st.lists(st.sampled_from([0, 1, 2, 50, *CONTROLS]), max_size=14)
    head, ahead = draw(letters), draw(letters)
    behind = draw(st.just([]) | letters)  # mostly the prompt goes on where the stored history ends
    return draw(segmented(head + behind)), draw(segmented(head + ahead))


@settings(max_examples=150, deadline=None)
@given(scenes(), st.booleans())
def test_key_bytes_never_change(scene: tuple[list[int], list[int]], adds_space: bool) -> None:
    """Whatever the store finds: the ids spell the prompt, begin with what is stored, and then it is found."""
    stored, prompt = scene
    if not stored or not prompt:
        return

    async def look() -> None:
        async with bench() as b:
            saved = None
            for at in range(0, len(stored), 4):
                ids = stored[at : at + 4]
                saved = await b.save(ids, saved, identity=ID, text=spelled(ids))
            pieces = key_pieces(prompt)
            match = await b.store.find(ID, Prompt.of(prompt, pieces))
            ids = retokenised(
                match,
                prompt,
                pieces,
                tokenize=with_a_space if adds_space else tokenize,
                key_pieces=key_pieces,
            )
            if ids is None:
                return
            assert spelled(ids) == spelled(prompt)
            assert ids != prompt
            assert ids[: match.n_tokens] == match.ids.tolist()
            again = await b.store.find(ID, Prompt.of(ids))
            assert again.n_tokens >= match.n_tokens, "by tokens alone"
            by_tokens = await b.store.find(ID, Prompt.of(prompt))
            n_bytes = len(spelled(prompt[: by_tokens.n_tokens]))
            assert len(spelled(ids[: again.n_tokens])) >= n_bytes, "no less than the caller's ids find"
            if match.token_pos is not None:
                assert ids[match.n_tokens :] == prompt[match.token_pos :]

    trio.run(look)


# --- a real vocabulary ---


@pytest.fixture(scope="module")
def vocab(smollm2_path: Path) -> Iterator[Vocab]:
    """SmolLM2's."""
    with Model.open(smollm2_path, ModelOptions(vocab_only=True)) as model:
        yield model.vocab


@pytest.fixture(scope="module")
def single_bytes(vocab: Vocab) -> dict[int, int]:
    """Its tokens of one byte."""
    spelled_by = ((vocab.piece(t), t) for t in range(vocab.n_tokens) if not vocab.is_control(t))
    return {piece[0]: t for piece, t in spelled_by if len(piece) == 1}


CHAT = (
    "<|im_start|>user\nWhat is an unbelievably naïve überraschung? 你好 🙂<|im_end|>\n"
    "<|im_start|>assistant\nIt is one that nobody expected.<|im_end|>\n"
)


@pytest.mark.parametrize("n_stored", [3, 20, 31, 60, 61, 62, 90, 100])
async def test_the_real_vocabulary(vocab: Vocab, single_bytes: dict[int, int], n_stored: int) -> None:
    """SmolLM2: a chat stored letter by letter is the beginning of the same chat as the template gives it."""

    def pieces(ids: Sequence[int]) -> list[bytes]:
        return [control_piece(t) if vocab.is_control(t) else vocab.piece(t) for t in ids]

    prompt = vocab.tokenize(CHAT, add_special=False, parse_special=True)
    letters: list[int] = []
    for token, piece in zip(prompt, pieces(prompt), strict=True):
        letters += [token] if vocab.is_control(token) else [single_bytes[byte] for byte in piece]
    assert b"".join(pieces(letters)) == b"".join(pieces(prompt))
    assert len(letters) > len(prompt)
    stored = letters[:n_stored]
    async with bench() as b:
        await b.save(stored, identity=ID, text=b"".join(pieces(stored)))
        match = await b.store.find(ID, Prompt.of(prompt, pieces(prompt)))
        assert match.n_tokens == n_stored
        ids = retokenised(match, prompt, pieces(prompt), tokenize=vocab.tokenize, key_pieces=pieces)
    if ids is None:
        rest = b"".join(pieces(letters[n_stored:])).split(b"\xff")[0]
        with pytest.raises(UnicodeDecodeError):
            rest.decode()
        return
    assert b"".join(pieces(ids)) == b"".join(pieces(prompt))
    assert ids[:n_stored] == stored
    if match.token_pos is not None:
        assert ids[n_stored:] == prompt[match.token_pos :]
    n_controls = sum(map(vocab.is_control, stored))
    controls = [t for t in prompt if vocab.is_control(t)]
    assert [t for t in ids[n_stored:] if vocab.is_control(t)] == controls[n_controls:]
    assert len(ids) < len(letters), "the rest is in whole words again"
