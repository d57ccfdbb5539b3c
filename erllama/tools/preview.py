"""Bytes and sizes for a person's eyes."""

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


def show_bytes(n: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def parse_bytes(text: str) -> int:
    """A size as people type it: 500M, 20G, 1.5g, 4096. Raises: ValueError."""
    units = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    trimmed = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = trimmed[-1:] if trimmed[-1:] in units and trimmed[-1:] else ""
    number = float(trimmed[: len(trimmed) - len(unit)])
    if number < 0:
        raise ValueError(f"{text!r} is negative")
    return int(number * 1024 ** units[unit])
