"""What `kvc explain` looks for, and how much of it one stored node shares: pure.

Tokens are compared as they are. Text is compared with the key bytes of nodes, without a model: what tokens
it would become is not known. Key bytes name control tokens by id only, so where one is stored, the text may
have anything that looks like one (`<|im_start|>`, `</s>`, `[INST]`), and the same id must look the same
everywhere. Control tokens before any text (BOS), and the space that some vocabularies put in front, need not
be in the text.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from erllama.kvcache.key import CONTROL_BYTE, Tokens, common_prefix, control_piece

from .preview import show_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from erllama.kvcache.meta import NodeMeta

AROUND: Final = 32  # bytes of text (or tokens / 4) shown before and behind the first difference
_MARK: Final = re.compile(rb"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,24}\]")
_CONTROL: Final = struct.Struct(">BI")


@dataclass(frozen=True, slots=True)
class Where:
    """A position in what is asked: tokens or bytes of it, and what control tokens were taken for."""

    at: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """How a node compares: where it ends if it matches whole (there may be several ways), and else how far.

    `n_tokens`: how many of its tokens are shared, None where only bytes are known. `stored`, `asked`: both
    sides around the first difference.
    """

    ends: tuple[Where, ...] = ()
    at: int = 0
    n_tokens: int | None = None
    stored: str = ""
    asked: str = ""


class Asked(Protocol):
    """Tokens or text."""

    @property
    def unit(self) -> str:
        """What positions count."""
        ...

    def __len__(self) -> int: ...

    def compare(self, node: NodeMeta, where: Where) -> Shared:
        """How much of `node` is what is asked from `where` on."""
        ...

    def may_hold(self, node: NodeMeta, where: Where) -> bool:
        """Whether what is asked goes on behind `where` with this node, after something in between."""
        ...


@dataclass(frozen=True)
class AskedTokens:
    """Token ids."""

    ids: Tokens
    unit: str = field(default="token", init=False)

    def __len__(self) -> int:
        return len(self.ids)

    def compare(self, node: NodeMeta, where: Where) -> Shared:
        """See `Asked`."""
        n = common_prefix(node.tokens, self.ids[where.at :])
        at = where.at + n
        ends = (Where(at),) if n == len(node.tokens) else ()
        stored = _show_ids(node.tokens[max(0, n - AROUND // 4) : n + AROUND // 4])
        return Shared(ends, at, n, stored, _show_ids(self.ids[max(0, at - AROUND // 4) : at + AROUND // 4]))

    def may_hold(self, node: NodeMeta, where: Where) -> bool:
        """See `Asked`."""
        return node.start >= where.at and common_prefix(node.tokens, self.ids[node.start :]) > 0


def _show_ids(ids: Tokens) -> str:
    return " ".join(map(str, ids.tolist()))


@dataclass(frozen=True)
class AskedText:
    """Text, as UTF-8."""

    text: bytes
    unit: str = field(default="byte", init=False)

    def __len__(self) -> int:
        return len(self.text)

    def compare(self, node: NodeMeta, where: Where) -> Shared:
        """See `Asked`."""
        states, stored_at, at = [where], 0, where.at
        for piece in _pieces(node.text):
            reached = [self._advance(piece, state) for state in states]
            states = [end for ends, _ in reached for end in ends]
            if not states:
                n = max(n for _, n in reached)
                at, stored_at = at + n, stored_at + n
                break
            n_piece = _CONTROL.size if isinstance(piece, int) else len(piece)
            at, stored_at = max(state.at for state in states), stored_at + n_piece
        ends = tuple(dict.fromkeys(states)) if node.text else ()
        return Shared(ends, at, None, _around(node.text, stored_at), self._around(at))

    def _advance(self, piece: bytes | int, where: Where) -> tuple[list[Where], int]:
        """Where a piece that matches ends, and how many bytes of one that does not are shared."""
        at, marks = where.at, dict(where.marks)
        if not isinstance(piece, int):
            is_first = at == 0 and piece[:1] == b" " and self.text[:1] != b" "
            wanted = piece[1:] if is_first else piece
            n = _n_common(wanted, self.text[at : at + len(wanted)])
            return ([Where(at + n, where.marks)], n) if n == len(wanted) else ([], n)
        ends = [where] if at == 0 else []
        if piece in marks:
            return (
                [*ends, Where(at + len(marks[piece]), where.marks)]
                if self.text.startswith(marks[piece], at)
                else ends
            ), 0
        if (found := _MARK.match(self.text, at)) is not None:
            ends.append(Where(found.end(), (*where.marks, (piece, found[0]))))
        return ends, 0

    def _around(self, at: int) -> str:
        before, behind = self.text[max(0, at - AROUND) : at], self.text[at : at + AROUND]
        return f"{show_text(before)}|{show_text(behind)}"

    def may_hold(self, node: NodeMeta, where: Where) -> bool:
        """See `Asked`."""
        plain = max((p for p in _pieces(node.text) if isinstance(p, bytes)), key=len, default=b"")
        return len(plain) >= AROUND and self.text.find(plain[: 4 * AROUND], where.at) >= 0


def _pieces(key_bytes: bytes) -> Iterator[bytes | int]:
    """Runs of plain text, and ids of control tokens."""
    at = 0
    while at < len(key_bytes):
        end = key_bytes.find(bytes((CONTROL_BYTE,)), at)
        if end == at and at + _CONTROL.size <= len(key_bytes):
            yield int(_CONTROL.unpack_from(key_bytes, at)[1])
            at += _CONTROL.size
        else:  # FF that is no control token's: a byte of the model's, compared as it is
            end = len(key_bytes) if end <= at else end
            yield key_bytes[at:end]
            at = end


def _n_common(a: bytes, b: bytes) -> int:
    return common_prefix(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


def _around(key_bytes: bytes, at: int) -> str:
    """The text around a position, which a bar marks; control tokens stay whole."""
    return f"{show_text(_clip(key_bytes, at - AROUND, at))}|{show_text(_clip(key_bytes, at, at + AROUND))}"


def _clip(key_bytes: bytes, low: int, high: int) -> bytes:
    shown, at = [], 0
    for piece in _pieces(key_bytes):
        if isinstance(piece, int):
            if low <= at < high:
                shown.append(control_piece(piece))
            at += _CONTROL.size
        else:
            shown.append(piece[max(0, low - at) : max(0, high - at)])
            at += len(piece)
    return b"".join(shown)
