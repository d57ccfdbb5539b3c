"""Key bytes for a person's eyes."""

from __future__ import annotations

import struct

from erllama.kvcache.key import CONTROL_BYTE


def show_text(key_bytes: bytes, width: int | None = None) -> str:
    """Key bytes as one line of visible characters.

    Control characters become their pictures (␊), control tokens ⟨id⟩, invalid bytes �. With `width`, the
    middle of longer text is left out.
    """
    pieces: list[str] = []
    plain = bytearray()
    at = 0
    while at < len(key_bytes):
        if key_bytes[at] == CONTROL_BYTE and at + 5 <= len(key_bytes):
            pieces.append(_visible(bytes(plain)))
            plain.clear()
            pieces.append(f"⟨{struct.unpack_from('>I', key_bytes, at + 1)[0]}⟩")
            at += 5
        else:
            plain.append(key_bytes[at])
            at += 1
    text = "".join(pieces) + _visible(bytes(plain))
    if width is not None and len(text) > width:
        half = (width - 1) // 2
        text = f"{text[:half]}…{text[len(text) - (width - 1 - half) :]}"
    return text


def _visible(raw: bytes) -> str:
    shown = []
    for char in raw.decode("utf-8", "replace"):
        if ord(char) < 0x20:
            shown.append(chr(0x2400 + ord(char)))
        elif char == "\x7f":
            shown.append("␡")
        elif not char.isprintable() and char != " ":
            shown.append(f"⟨U+{ord(char):04X}⟩")
        else:
            shown.append(char)
    return "".join(shown)
